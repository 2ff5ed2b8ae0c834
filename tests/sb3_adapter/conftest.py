import pytest

pytest.importorskip("stable_baselines3")
