"""The functional against upstream's, on every shape that upstream gets right."""

import pytest
import torch
from torchrl.objectives.value.functional import vtrace_advantage_estimate as stock

from vtrace_plugins import VTraceError
from vtrace_plugins.torchrl import vtrace_advantage_estimate as ours


def data(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    normal = lambda: torch.randn(shape, generator=generator, dtype=dtype)  # noqa: E731
    done = torch.rand(shape, generator=generator) < 0.2
    terminated = done & (torch.rand(shape, generator=generator) < 0.5)
    return normal(), normal(), normal(), normal(), normal(), done, terminated


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(
    ("shape", "time_dim"),
    [((10, 1), -2), ((3, 10, 1), -2), ((2, 3, 10, 1), -2), ((3, 10, 4), -2), ((3, 10, 2, 1), 1), ((10, 3, 1), 0),
     ((10, 3, 1), -3), ((3, 10), -1), ((3, 10), 1), ((3, 1, 1), -2), ((2, 1500, 1), -2)],
)  # fmt: skip
def test_parity(shape, time_dim, dtype):
    arguments = data(*shape, dtype=dtype)
    gamma = torch.tensor(0.97)  # as upstream rounds it
    kwargs = {"rho_thresh": 1.25, "c_thresh": 0.875, "time_dim": time_dim}
    for x, y in zip(ours(gamma, *arguments, **kwargs), stock(gamma, *arguments, **kwargs), strict=True):
        scale = max(1.0, y.abs().max().item())
        torch.testing.assert_close(x / scale, y / scale, rtol=0, atol=2e-6 if dtype == torch.float32 else 1e-12)


def test_per_step_gamma():
    arguments = data(3, 10, 1)
    gamma = 0.97 ** torch.randint(1, 4, (3, 10, 1))
    for x, y in zip(ours(gamma, *arguments), stock(gamma, *arguments), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=4e-6)


def test_without_terminated_every_done_is_one():
    *arguments, done, _ = data(3, 10, 1)
    for x, y in zip(ours(0.97, *arguments, done), stock(0.97, *arguments, done), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=4e-6)


def test_no_steps():
    assert [x.shape for x in ours(0.97, *data(3, 0, 1))] == [(3, 0, 1)] * 2


def test_a_wrong_shape_names_the_argument():
    log_pi, log_mu, value, next_value, reward, done, terminated = data(3, 10, 1)
    with pytest.raises(VTraceError, match=r"^reward: expected shape \[3, 10, 1\].*got shape \[3, 9, 1\]"):
        ours(0.97, log_pi, log_mu, value, next_value, reward[:, 1:], done, terminated)


def test_an_option_of_the_core():
    """It has upstream's arguments, not those of ``vtrace``."""
    with pytest.raises(
        VTraceError, match=r"^lam: expected one of vtrace_advantage_estimate's arguments, \[.*'rho_thresh'"
    ):
        ours(0.9, *data(3, 10, 1), lam=0.9)
