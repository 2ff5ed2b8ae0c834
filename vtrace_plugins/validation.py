"""An opt-in look at the data itself, for mistakes that have the right shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vtrace_plugins._core.api import resolve
from vtrace_plugins._core.checks import VTraceError, check_backend, check_inputs
from vtrace_plugins._core.inputs import CLIPS, FLAGS, Inputs
from vtrace_plugins.diagnostics import importance


class Finding(NamedTuple):
    """One likely mistake."""

    argument: str
    """Which argument it is about."""
    message: str
    """What was seen, and what to do about it."""


class Report(NamedTuple):
    """What :func:`validate` found; true if that is nothing."""

    findings: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        if not self.findings:
            return "nothing suspicious"
        return "\n".join(f"{finding.argument}: {finding.message}" for finding in self.findings)


def validate(
    log_pi: Tensor,
    log_mu: Tensor,
    values: Tensor,
    rewards: Tensor,
    terminated: Tensor,
    truncated: Tensor | None = None,
    *,
    bootstrap_values: Tensor | None = None,
    last_value: Tensor | None = None,
    next_values: Tensor | None = None,
    mask: Tensor | None = None,
    gamma: float | Tensor,
    rho_bar: float | Tensor = 1.0,
    c_bar: float | Tensor = 1.0,
    pg_rho_bar: float | Tensor | None = None,
    lam: float = 1.0,
    weight_advantages: bool = True,
    time_dim: int = -1,
    backend: str = "auto",
) -> Report:
    """Look for likely mistakes in the data of a :func:`vtrace_plugins.vtrace` call; takes the same arguments.

    Reads the data, so it waits for the GPU: for a first batch, or a test, and not for a training loop. What it finds is
    likely, not certain.

    ==============================  ====================================================================================
    about                           what is suspicious
    ==============================  ====================================================================================
    any floating argument           NaN or inf where it is read
    log_pi, log_mu                  none is negative and all are at most 1 (probabilities?); far apart (other actions?)
    terminated, truncated           both set at a step (it counts as terminated); set at most steps (inverted?); only
                                    ever at step 0 of the window, as flags of the step *before* would be
    bootstrap_values                filled at steps where it is ignored
    rewards                         climb for 8 steps and fall back at once where no episode ends (a boundary missing?)
    next_values                     equal to ``values`` (not shifted?), or to the next value behind a truncated step (V
                                    of the state after the reset?)
    time_dim                        values jump to and fro along time and change little along another dimension (axes
                                    swapped?)
    gamma and the three clips       tensors out of range, which the call itself does not read
    ==============================  ====================================================================================

    Returns:
        A ``Report``: true if nothing was found, and readable as a string.

    Raises:
        VTraceError: for what :func:`vtrace_plugins.vtrace` itself refuses.

    Example:
        >>> import torch
        >>> p = torch.tensor([[0.5, 0.4, 0.6]])
        >>> print(validate(p, p.log(), p, p, p > 1, last_value=p[:, 0], gamma=0.9))
        log_pi: all are in [0, 1]: log-probabilities wanted, these look like probabilities
    """
    check_backend(backend)
    given = Inputs(
        log_pi, log_mu, values, rewards, terminated, truncated, bootstrap_values, last_value, next_values, mask,
        gamma, rho_bar, c_bar, rho_bar if pg_rho_bar is None else pg_rho_bar, lam, weight_advantages, time_dim,
    )  # fmt: skip
    x = check_inputs(given)
    resolve(backend, x.values.device)
    if x.values.is_meta:
        raise VTraceError("values", "data to look at", "meta tensors, which have none")
    if x.values.numel() == 0:
        return Report(())
    with torch.no_grad():
        return Report(tuple(Finding(*found) for found in _findings(_Data(x))))


class _Data:
    """The arguments with time first, flags as bool and what follows from them."""

    def __init__(self, x: Inputs) -> None:
        def first(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.movedim(x.time_dim, 0)

        self.inputs = x
        self.floats: dict[str, Tensor] = {}
        for name in ("log_pi", "log_mu", "values", "rewards", "bootstrap_values", "next_values"):
            t = first(getattr(x, name))
            if t is not None:
                self.floats[name] = t
        shape, device = self.floats["values"].shape, x.values.device
        flags = {name: first(getattr(x, name)) for name in FLAGS}
        no, yes = (torch.full(shape, value, device=device) for value in (False, True))
        self.terminated = flags["terminated"] != 0 if flags["terminated"] is not None else no
        self.truncated = no if flags["truncated"] is None else flags["truncated"] != 0
        self.real = yes if flags["mask"] is None else flags["mask"] != 0
        last = ~torch.cat([self.real[1:], no[:1]])
        self.bootstraps = (self.truncated | last) & ~self.terminated & self.real
        self.read = dict.fromkeys(("log_pi", "log_mu", "values", "rewards"), self.real)
        self.read |= {"bootstrap_values": self.bootstraps, "next_values": self.real & ~self.terminated}


def _findings(data: _Data) -> Iterator[tuple[str, str]]:
    """(argument, message) of each likely mistake."""
    x, floats = data.inputs, data.floats
    for name, t in floats.items():
        bad = int((~torch.isfinite(t) & data.read[name]).sum())
        if bad:
            yield name, f"NaN or inf at {bad} steps that are read"
    if x.last_value is not None:
        bad = int((~torch.isfinite(x.last_value) & data.bootstraps[-1]).sum())
        if bad:
            yield "last_value", f"NaN or inf at {bad} windows whose end is bootstrapped"
    yield from _log_probs(data)
    yield from _flags(data)
    yield from _resets(data)
    yield from _continuations(data)
    yield from _axes(data)
    for name in ("gamma", *CLIPS):
        high = 1.0 if name == "gamma" else float("inf")
        option = getattr(x, name)
        if isinstance(option, Tensor) and not bool(((option >= 0) & (option <= high)).all()):
            yield name, f"out of [0, {high:g}]: results are undefined"


def _log_probs(data: _Data) -> Iterator[tuple[str, str]]:
    suspicious = False
    for name in ("log_pi", "log_mu"):
        t = data.floats[name][data.real]
        if t.numel() and bool(((t >= 0) & (t <= 1)).all()) and bool((t > 0).any()):
            yield name, "all are in [0, 1]: log-probabilities wanted, these look like probabilities"
            suspicious = True
    if suspicious:
        return
    found = importance(data.floats["log_pi"], data.floats["log_mu"], mask=data.real, time_dim=0)
    if found.ess < 0.01 and data.real.sum() > 100:
        yield (
            "log_pi",
            (
                f"an effective sample size of {found.ess:.1e}: a policy very far from the one that collected, or "
                "log-probs of other actions"
            ),
        )


def _flags(data: _Data) -> Iterator[tuple[str, str]]:
    both = int((data.terminated & data.truncated & data.real).sum())
    if both:
        yield "truncated", f"set beside terminated at {both} steps, which count as terminated: no bootstrap there"
    ends = (data.terminated | data.truncated) & data.real
    share = ends[data.real].float().mean().item()
    if ends.shape[0] > 1 and share > 0.5:
        yield "terminated", f"{share:.0%} of the steps end an episode: flags inverted, or a discount in their place?"
    elif ends.shape[0] > 1 and bool(ends[0].any()) and not bool(ends[1:].any()):
        yield "terminated", "set at the window's first step alone: flags of the step before (episode starts)?"


def _resets(data: _Data) -> Iterator[tuple[str, str]]:
    """Rewards that grow as an episode goes on (a score, a distance covered) fall back where the next one begins."""
    rewards, climb = data.floats["rewards"].double(), 8  # differences of unsigned integers are never negative
    if rewards.shape[0] < climb + 2:
        return
    span = rewards.unfold(0, climb + 2, 1)
    climbs = (span[..., :-1].diff(dim=-1) >= 0).all(-1) & (span[..., -2] > span[..., 0])
    falls = climbs & (span[..., -1] <= span[..., 0])
    goes_on = data.real & ~(data.terminated | data.truncated)
    missing = int((falls & goes_on[climb:-1] & data.real[climb + 1 :]).sum())
    if missing:
        yield (
            "rewards",
            f"climb for {climb} steps and fall back at once {missing} times where no episode ends: boundaries missing?",
        )


def _continuations(data: _Data) -> Iterator[tuple[str, str]]:
    values = data.floats["values"]
    bootstrap = data.floats.get("bootstrap_values")
    if bootstrap is not None:
        ignored = data.real & ~data.bootstraps
        filled = int((bootstrap[ignored] != 0).sum())
        counts = bootstrap[data.bootstraps]
        if filled and counts.numel() and bool((counts == 0).all()):
            yield (
                "bootstrap_values",
                f"0 at every step where it counts, and filled at {filled} where not: one step off?",
            )
        elif filled:
            yield "bootstrap_values", f"filled at {filled} steps where it is ignored: fine if V of every next state"
    after = data.floats.get("next_values")
    if after is not None and values.shape[0] > 1:
        if bool((after == values)[data.real].all()) and not bool((values == values[:1]).all()):
            yield "next_values", "equal to values: the value after each step is wanted"
        inside = data.truncated[:-1] & ~data.terminated[:-1] & data.real[:-1] & data.real[1:]
        if bool(inside.any()) and bool((after[:-1] == values[1:])[inside].all()):
            yield (
                "next_values",
                (
                    "behind truncated steps it is the value of the next episode's first state: V of the state that was "
                    "cut off is wanted"
                ),
            )


def _axes(data: _Data) -> Iterator[tuple[str, str]]:
    values = data.floats["values"].double()
    if bool((~data.real).any()) or values.shape[0] < 8:
        return
    along = lambda t, dim: t.diff(dim=dim).abs().mean()  # noqa: E731
    over_time, changes = along(values, 0), values.diff(dim=0)
    if bool((changes[1:] * changes[:-1]).sum() >= 0):  # they drift: environments in step, perhaps, but not other rows
        return
    for dim in range(1, values.ndim):
        if values.shape[dim] >= 8 and along(values, dim) < 0.2 * over_time:
            original = [d for d in range(values.ndim) if d != data.inputs.time_dim][dim - 1]
            yield "time_dim", f"values change far less along dimension {original} than along time: axes swapped?"
            return
