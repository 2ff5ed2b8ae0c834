"""The statistics of the importance ratios, against NumPy and against what they mean."""

import numpy as np
import pytest
import torch
from helpers import window

from vtrace_plugins import VTraceError
from vtrace_plugins.diagnostics import importance


def batch(rows=5, T=40, masked=False, **kwargs):
    data = window(rows, T, masked=masked, **kwargs)
    names = ("log_pi", "log_mu", "terminated", "truncated", *(["mask"] if masked else []))
    return {name: data[name] for name in names}


def by_hand(log_pi, log_mu, terminated, truncated, mask=None, rho_bar=1.0, c_bar=1.0, lam=1.0):
    w, real = np.exp(log_pi - log_mu), np.ones(log_pi.shape, bool) if mask is None else mask
    lengths = np.zeros(w.shape)
    rows, T = w.shape
    for n in range(rows):
        for t in reversed(range(T)):
            goes_on = t + 1 < T and real[n, t + 1] and not (terminated[n, t] or truncated[n, t])
            lengths[n, t] = 1 + (lam * min(c_bar, w[n, t]) * lengths[n, t + 1] if goes_on else 0)
    w, lengths = w[real], lengths[real]
    ess = w.sum() ** 2 / (len(w) * (w**2).sum())
    return w.mean(), (w > rho_bar).mean(), (w > c_bar).mean(), ess, (w - 1 - np.log(w)).mean(), lengths.mean()


@pytest.mark.parametrize("masked", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("time_dim", [0, 1])
def test_against_numpy(masked, time_dim):
    data = batch(masked=masked)
    tensors = {name: torch.as_tensor(x).movedim(1, time_dim) for name, x in data.items()}
    found = importance(**tensors, rho_bar=1.3, c_bar=0.8, lam=0.9, time_dim=time_dim)
    np.testing.assert_allclose(torch.stack(found), by_hand(**data, rho_bar=1.3, c_bar=0.8, lam=0.9), rtol=1e-10)


def test_on_policy():
    data = {name: torch.as_tensor(x) for name, x in batch(off_policy=0.0, boundaries=0.0).items()}
    found = importance(**data)
    assert found.ratio == found.ess == 1 and found.rho_clipped == found.c_clipped == found.kl == 0
    assert found.trace_length == (40 + 1) / 2


def right_ess(log_ratio):
    """From log-weights, in float64."""
    x = log_ratio.double().flatten()
    return (2 * x.logsumexp(0) - (2 * x).logsumexp(0)).exp().item() / x.numel()


LOG_RATIOS = {
    "one step has all the weight": lambda n: 48.0 * (torch.arange(n) == 3),
    "large and equal": lambda n: torch.full((n,), 100.0),
    "small and equal": lambda n: torch.full((n,), -100.0),
    "uniform": lambda n: 200 * torch.rand(n) - 100,
    "one is infinite": lambda n: torch.where(torch.arange(n) == 3, torch.inf, 0.0),
    "some are impossible": lambda n: torch.where(torch.arange(n) % 4 == 0, -torch.inf, 0.0),
}


@pytest.mark.parametrize("kind", LOG_RATIOS)
@pytest.mark.parametrize("by_lag", [False, True], ids=["", "by lag"])
def test_the_effective_sample_size_of_any_weights(kind, by_lag):
    """Also where w, or its square, is beyond float32."""
    torch.manual_seed(0)
    log_ratio, lag = LOG_RATIOS[kind](200)[None], torch.arange(200) % 2
    wanted = {"one is infinite": 1 / 200, "some are impossible": 0.75}.get(kind, right_ess(log_ratio))
    if not by_lag:
        found = importance(log_ratio, torch.zeros_like(log_ratio))
        assert found.ess.item() == pytest.approx(wanted, rel=1e-4)
        assert found.kl >= 0
        return
    found = importance(log_ratio, torch.zeros_like(log_ratio), lag=lag, lags=2).ess
    for k in (0, 1):
        alone = importance(log_ratio[:, lag == k], torch.zeros(1, 100)).ess
        torch.testing.assert_close(found[k], alone)


@pytest.mark.slow
def test_more_steps_than_float32_can_count():
    n = 2**24 + 2**22
    log_ratio = torch.full((1, n), 0.1)
    found = importance(log_ratio, torch.zeros(1, 1).expand(1, n), lag=torch.zeros(1, 1, dtype=torch.long), lags=1)
    assert found.ratio.item() == pytest.approx(np.exp(0.1), rel=1e-5)
    assert found.rho_clipped == 1 and found.ess == 1


def test_padding_has_no_weight():
    log_ratio = torch.tensor([[0.0, 0.0, 90.0, torch.inf]])
    mask = torch.tensor([[1, 1, 0, 0]])
    assert importance(log_ratio, torch.zeros(1, 4), mask=mask).ess == 1


def test_weights_that_are_all_zero_have_no_effective_size():
    assert importance(torch.full((1, 5), -torch.inf), torch.zeros(1, 5)).ess.isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_estimate_of_the_kl_is_never_negative(dtype):
    """Near 0, where w - 1 - log w is all rounding, each step's is 0 or more; an infinite ratio has an infinite one."""
    for log_ratio in torch.cat([10.0 ** torch.arange(-12, 0), -(10.0 ** torch.arange(-12, 0))]).to(dtype):
        found = importance(log_ratio.view(1, 1), torch.zeros(1, 1, dtype=dtype)).kl
        assert found >= 0
        assert found.item() == pytest.approx(log_ratio.item() ** 2 / 2, rel=0.1, abs=torch.finfo(dtype).eps ** 1.5)
    assert importance(torch.full((1, 1), torch.inf, dtype=dtype), torch.zeros(1, 1, dtype=dtype)).kl == torch.inf


def test_each_lag_is_that_lags_steps_alone():
    data = {name: torch.as_tensor(x) for name, x in batch(rows=6).items()}
    lag = torch.tensor([0, 0, 1, 3, 3, 9])
    found = importance(**data, lag=lag[:, None], lags=4)
    for k in (0, 1, 3):
        rows = lag.clamp(max=3) == k
        alone = importance(**{name: x[rows] for name, x in data.items()})
        for x, y in zip(found, alone, strict=True):
            torch.testing.assert_close(x[k], y)
    assert all(x[2].isnan() for x in found)


def test_half_precision_and_padding_that_is_nan():
    data = {name: torch.as_tensor(x) for name, x in batch(masked=True).items()}
    wanted = importance(**data)
    for name in ("log_pi", "log_mu"):
        data[name] = torch.where(data["mask"], data[name], torch.nan).half()
    for x, y in zip(importance(**data), wanted, strict=True):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x.double(), y, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_mu": torch.zeros(5, 39)}, r"log_mu: expected shape \[5, 40\] \(the shape of log_pi\), got .* \[5, 39\]"),
        ({"log_pi": None}, "log_pi: expected a torch.Tensor, got NoneType"),
        ({"log_pi": torch.zeros(5, 40).long()}, "log_pi: expected a floating dtype"),
        ({"log_mu": torch.zeros(5, 40).cfloat()}, "log_mu: expected a floating dtype"),
        ({"log_mu": torch.zeros(5, 40, device="meta")}, r"log_mu: expected device cpu \(that of log_pi\)"),
        ({"terminated": np.zeros((5, 40))}, "terminated: expected a torch.Tensor, got ndarray"),
        ({"lag": torch.zeros(5, 40).long(), "lags": 0}, "lags: expected how many lags to report, 1 or more, got 0"),
        ({"lag": torch.zeros(5, 40), "lags": 3}, "lag: expected a integer dtype"),
        ({"lag": torch.zeros(4, 1).long(), "lags": 3}, r"lag: expected a shape that broadcasts to \[5, 40\]"),
        ({"lag": torch.zeros(5, 40)}, "lags: expected lag and lags together"),
        ({"rho_bar": -1.0}, "rho_bar: expected a number of at least 0"),
        ({"time_dim": 2}, "time_dim: expected a dimension of the 2-d data"),
    ],
    ids=str,
)
def test_wrong_arguments(changes, message):
    data = {name: torch.as_tensor(x) for name, x in batch().items()}
    with pytest.raises(VTraceError, match=message):
        importance(**data | changes)


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu():
    data = {name: torch.as_tensor(x, device="cuda") for name, x in batch().items()}
    lag = torch.arange(5, device="cuda")[:, None]
    importance(**data, lag=lag, lags=5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        importance(**data, lag=lag, lags=5)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("lags", [None, 3])
def test_no_data(lags):
    none = torch.zeros(3, 0)
    lag = None if lags is None else none.long()
    assert all(x.isnan().all() and x.numel() == (lags or 1) for x in importance(none, none, lag=lag, lags=lags))
