import pytest

pytest.importorskip("torchrl")


@pytest.fixture
def registered():
    """TorchRL's registry has ours under the name vtrace."""
    from vtrace_plugins.torchrl import register, unregister

    register()
    yield
    unregister()
