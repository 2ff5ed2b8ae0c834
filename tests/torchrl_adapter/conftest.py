import pytest

pytest.importorskip("torchrl")
