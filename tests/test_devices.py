"""What more than one GPU, and one without memory to spare, ask for."""

import pytest
import torch
from helpers import tensors, window

from vtrace_plugins import VTraceError, vtrace

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SHAPES = {"one pass": (5, 100), "chunks, two passes": (2, 40_000)}


def run(data, backend):
    result = vtrace(**data, gamma=0.97, backend=backend)
    grads = torch.autograd.grad(result.targets.sum() + result.advantages.square().sum(), data["values"])
    return *result, *grads


@two_gpus
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_data_on_a_gpu_that_is_not_the_current_one(shape, backend):
    there = tensors(window(*shape, boundaries=0.02), "cuda:1", torch.float32)
    here = {k: x.to("cuda:0") for k, x in there.items()}
    for data in (here, there):
        data["values"].requires_grad_()
    with torch.cuda.device(0):
        for _ in range(2):  # the call that prepares the launch, and one that finds it
            found = run(there, backend)
            assert all(x.device == torch.device("cuda:1") for x in found)
            assert torch.cuda.current_device() == 0
    for x, y in zip(found, run(here, backend), strict=True):
        assert torch.equal(x.cpu(), y.cpu())


@two_gpus
def test_a_stream_of_the_other_gpu():
    data = tensors(window(64, 100), "cuda:1", torch.float32)
    wanted = vtrace(**data, gamma=0.97)
    torch.cuda.synchronize(1)
    stream = torch.cuda.Stream(device=1)
    with torch.cuda.stream(stream):
        found = vtrace(**data, gamma=0.97)
    stream.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@two_gpus
@pytest.mark.parametrize("name", ["log_mu", "truncated", "bootstrap_values"])
@pytest.mark.parametrize("backend", ["auto", "triton", "torch"])
def test_tensors_on_two_gpus(name, backend):
    data = tensors(window(4, 10), "cuda:0", torch.float32)
    vtrace(**data, gamma=0.97, backend=backend)  # so that a launch is prepared
    data[name] = data[name].to("cuda:1")
    with pytest.raises(VTraceError, match=f"^{name}: expected device cuda:0 .*, got device cuda:1$"):
        vtrace(**data, gamma=0.97, backend=backend)


def test_results_that_do_not_fit():
    data = {k: x[:, :1].expand(1, 2**20) for k, x in tensors(window(1, 1), "cuda", torch.float32).items()}
    vtrace(**data, gamma=0.97)
    huge = {k: x[:, :1].expand(2**17, 2**20) for k, x in data.items()}
    with pytest.raises(torch.OutOfMemoryError, match=r"^vtrace: its results .* free memory or pass fewer windows"):
        vtrace(**huge, gamma=0.97)
    vtrace(**data, gamma=0.97)  # and nothing is broken by it
