"""Sizes at the ends: very long, very many, and more elements than 32 bits count."""

import pytest
import torch

from vtrace_plugins import vtrace

pytestmark = pytest.mark.gpu


@pytest.fixture
def large_gpu():
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB")


def random_window(shape, dtype=torch.float32):
    log_mu = torch.randn(shape, device="cuda", dtype=dtype)
    return {
        "log_pi": log_mu + 0.25,
        "log_mu": log_mu,
        "values": torch.randn(shape, device="cuda", dtype=dtype),
        "rewards": torch.randn(shape, device="cuda", dtype=dtype),
        "terminated": torch.rand(shape, device="cuda", dtype=dtype) < 0.01,
    }


@pytest.mark.parametrize("time_dim", [0, 1])
@pytest.mark.parametrize("shape", [(1, 2**20), (3, 2**20), (2**20, 1), (2**20, 3)])
def test_a_million_on_a_side(shape, time_dim):
    data = random_window(shape)
    data["last_value"] = torch.randn(shape[1 - time_dim], device="cuda")
    found, wanted = (vtrace(**data, gamma=0.99, time_dim=time_dim, backend=backend) for backend in ("triton", "torch"))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_more_windows_than_31_bits_count(large_gpu):
    values = torch.randint(-8, 8, (2**31 + 64, 1), device="cuda", dtype=torch.int8).float().requires_grad_()
    one = torch.ones((1, 1), device="cuda").expand_as(values)
    data = {"log_pi": one, "log_mu": one, "rewards": one, "terminated": one, "last_value": one[:, 0]}
    targets, advantages = vtrace(values=values, **data, gamma=0.99, backend="triton")
    assert (targets.amin(), targets.amax()) == (1, 1)
    assert torch.equal(advantages, 1 - values)
    (gradient,) = torch.autograd.grad(advantages, values, one)
    assert (gradient.amin(), gradient.amax()) == (-1, -1)


@pytest.mark.parametrize(("shape", "time_dim"), [((2**11 + 1, 2**20), 1), ((2**11 + 16, 2**20), 0)])
def test_more_elements_than_32_bits_count(large_gpu, shape, time_dim):
    data = random_window(shape, torch.float16)
    data["last_value"] = torch.randn(shape[1 - time_dim], device="cuda", dtype=torch.float16)
    found = vtrace(**data, gamma=0.99, time_dim=time_dim, backend="triton")
    for rows in (slice(0, 2), slice(-2, None)):
        few = {k: x[rows] if k == "last_value" else x.narrow(1 - time_dim, rows.start, 2) for k, x in data.items()}
        wanted = vtrace(**few, gamma=0.99, time_dim=time_dim, backend="torch")
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x.narrow(1 - time_dim, rows.start, 2), y, rtol=1e-2, atol=1e-2)
