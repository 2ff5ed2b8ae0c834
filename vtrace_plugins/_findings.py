"""What :func:`vtrace_plugins.validate` looks for: one function for each kind of mistake.

Each looks at finite numbers only, so that a NaN in one place hides nothing in another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vtrace_plugins._core.inputs import CLIPS, FLAGS, Inputs
from vtrace_plugins.diagnostics import importance


class Finding(NamedTuple):
    """One mistake, or something to know."""

    argument: str
    """Which argument it is about."""
    message: str
    """What was seen, and what to do about it."""
    severity: Literal["error", "warning", "note"]
    """``"error"``: certainly a mistake; ``"warning"``: likely one; ``"note"``: right data may have it."""


class Data:
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
        self.real = yes if flags["mask"] is None else flags["mask"] != 0
        self.terminated = self.real & (flags["terminated"] != 0 if flags["terminated"] is not None else no)
        self.truncated = self.real & (no if flags["truncated"] is None else flags["truncated"] != 0)
        self.ends = self.terminated | self.truncated
        last = ~torch.cat([self.real[1:], no[:1]])
        self.bootstraps = (self.truncated | last) & ~self.terminated & self.real
        self.inside = (self.real & ~self.ends & ~last)[:-1]  # step t and t + 1 are of one episode, [T - 1, ...]
        self.read = dict.fromkeys(("log_pi", "log_mu", "values", "rewards"), self.real)
        self.read |= {"bootstrap_values": self.bootstraps, "next_values": self.real & ~self.terminated}

    @property
    def steps(self) -> int:
        return self.real.shape[0]


def findings(data: Data) -> Iterator[Finding]:
    """Everything that is found in the data."""
    return chain(*(look(data) for look in _LOOKS))


def _numbers(data: Data) -> Iterator[Finding]:
    x = data.inputs
    for name, t in data.floats.items():
        impossible = torch.isneginf(t) if name == "log_pi" else torch.zeros_like(t, dtype=torch.bool)
        bad = int((~torch.isfinite(t) & ~impossible & data.read[name]).sum())
        if bad:
            yield Finding(name, f"NaN or inf at {bad} steps that are read", "error")
        never = int((impossible & data.read[name]).sum())
        if never:
            yield Finding(name, f"-inf at {never} steps: the policy would never take the recorded action", "note")
    if x.last_value is not None:
        bad = int((~torch.isfinite(x.last_value) & data.bootstraps[-1]).sum())
        if bad:
            yield Finding("last_value", f"NaN or inf at {bad} windows whose end is bootstrapped", "error")
    for name in ("gamma", *CLIPS):
        high = 1.0 if name == "gamma" else float("inf")
        option = getattr(x, name)
        if isinstance(option, Tensor) and not bool(((option >= 0) & (option <= high)).all()):
            yield Finding(name, f"out of [0, {high:g}]: results are undefined", "error")


def _log_probs(data: Data) -> Iterator[Finding]:
    suspicious = False
    for name in ("log_pi", "log_mu"):
        t = data.floats[name][data.real & torch.isfinite(data.floats[name])]
        if t.numel() and bool(((t >= 0) & (t <= 1)).all()) and bool((t > 0).any()) and bool((t != t[0]).any()):
            message = "all are in [0, 1]: log-probabilities wanted, these look like probabilities"
            yield Finding(name, message, "warning")
            suspicious = True
    if suspicious:
        return
    log_pi, log_mu = data.floats["log_pi"], data.floats["log_mu"]
    there = data.real & torch.isfinite(log_mu) & ~torch.isnan(log_pi)
    found = importance(log_pi, log_mu, mask=there, time_dim=0)
    if int(there.sum()) > 100 and not bool(found.ess >= 0.01):  # NaN where no ratio is above 0
        yield Finding(
            "log_pi",
            f"an effective sample size of {found.ess:.1e}: a policy very far from the one that collected, or log-probs "
            "of other actions",
            "warning",
        )


def _flags(data: Data) -> Iterator[Finding]:
    both = int((data.terminated & data.truncated).sum())
    if both:
        message = f"set beside terminated at {both} steps, which count as terminated: no bootstrap there"
        yield Finding("truncated", message, "note")
    if data.steps == 1 or not bool(data.real.any()):
        return
    for name, flag in (("terminated", data.terminated), ("truncated", data.truncated)):
        share = flag[data.real].float().mean().item()
        if share > 0.8:  # episodes or slices of two steps have half of that, a hand of blackjack has 0.7
            message = f"{share:.0%} of the steps end an episode: flags inverted, or a discount in their place?"
            yield Finding(name, message, "warning" if share < 1 else "note")
            return
    rows = data.ends.flatten(1)
    if int(rows[0].sum()) > 1 and bool(rows[0].float().mean() > 0.5) and not bool(rows[1:].any()):
        message = "set at the window's first step alone: flags of the step before (episode starts)?"
        yield Finding("terminated", message, "warning")


_LATE = (
    "set one step late: dones[t] that means 'done before step t' (CleanRL, SB3's episode_starts). Shift it: "
    "terminated[t] = dones[t + 1], and the last one comes from the step after the window"
)


def _same_state(data: Data, after: Tensor | None) -> Tensor | None:
    """Where the value after step t is ``values[t + 1]`` to rounding, ``[T - 1, ...]``."""
    values = data.floats["values"]
    if after is None:
        return None
    precision = max(torch.finfo(t.dtype).eps for t in (values, after))
    values, after = values.double(), after.double()
    scale = values[torch.isfinite(values)].abs().max().clamp(min=1e-3) if bool(torch.isfinite(values).any()) else 1.0
    return (after[:-1] - values[1:]).abs() <= min(64 * precision, 1e-2) * scale


def _is_filled(data: Data) -> bool:
    """Whether ``bootstrap_values`` holds the value after every step, and not only where it is used."""
    inside = data.floats["bootstrap_values"][:-1][data.inside]
    return bool(inside.numel()) and bool((inside != 0).double().mean() > 0.5)


def _late_flags(data: Data) -> Iterator[Finding]:
    """Flags that belong to the step before."""
    if data.steps < 3:
        return
    alone = data.ends[1:-1] & ~data.ends[:-2] & ~data.ends[2:]
    flagged = alone & data.real[:-2] & data.real[2:]  # a step on either side, and nothing ends there
    known, enough = ("next_values", 1) if "next_values" in data.floats else ("bootstrap_values", 2)
    same = _same_state(data, data.floats.get(known))
    if known == "bootstrap_values" and same is not None and not _is_filled(data):
        same = None
    if same is not None:
        late, right = int((flagged & ~same[:-1] & same[1:]).sum()), int((flagged & same[:-1] & ~same[1:]).sum())
        others = data.inside.clone()
        others[:-1] &= ~data.ends[1:-1]  # the steps before a flag
        if late >= enough and late > 9 * right and bool(others.any()) and bool(same[others].float().mean() >= 0.9):
            shown = f"{known} is the value of another state at the step before, {late} times"
            yield Finding("terminated", f"{_LATE} ({shown})", "error")
            return
    reason = _rewards_say_late(data, flagged) or _values_say_late(data, flagged)
    if reason:
        yield Finding("terminated", f"{_LATE} ({reason})", "warning")


def _rewards_say_late(data: Data, flagged: Tensor) -> str:
    """A reward that is special at the step before each flag, at hardly another step, and never at the flag."""
    rewards = data.floats["rewards"].double()
    known = data.real & torch.isfinite(rewards)
    if int(flagged.sum()) < 5 or not bool(known.any()):
        return ""
    special = known & (rewards != rewards[known].mode().values)
    others = known & ~data.ends
    others[:-1] &= ~data.ends[1:]
    if not bool(others.any()):
        return ""
    before, at = (special[part][flagged].float().mean() for part in (slice(None, -2), slice(1, -1)))
    if bool(before > 0.8) and bool(at < 0.1) and bool(special[others].float().mean() < 0.1):
        return "the reward is another one at the step before nearly each flag, and at hardly a step else"
    return ""


def _values_say_late(data: Data, flagged: Tensor) -> str:
    """Values that jump from the step before each flag to the flag, and hardly elsewhere."""
    values = data.floats["values"].double()
    jumps = values.diff(dim=0).abs()
    known = torch.isfinite(jumps) & data.real[:-1] & data.real[1:]
    there = flagged & known[:-1] & known[1:]
    others = known & ~data.ends[:-1] & ~data.ends[1:]
    if int(there.sum()) < 8 or int(others.sum()) < 8:
        return ""
    before, after, elsewhere = jumps[:-1][there], jumps[1:][there], jumps[others].mean()
    n, more = len(before), int((before > after).sum())
    surprise = (2 * more - n) / math.sqrt(n)  # in deviations of a coin that is thrown n times
    if surprise > 4 and bool(before.mean() > 1.5 * elsewhere) and bool(after.mean() < 1.5 * elsewhere):
        return "values jump before the flags, and not after them"
    return ""


def _holes(data: Data) -> Iterator[Finding]:
    """Real steps after padding that followed a step which ended nothing."""
    step = torch.arange(data.steps, device=data.real.device).view(-1, *[1] * (data.real.ndim - 1))
    latest = torch.where(data.real, step, -1).cummax(0).values  # the last real step up to each
    before = torch.cat([torch.full_like(latest[:1], -1), latest[:-1]])
    ended = data.ends.gather(0, before.clamp(min=0))
    holes = int((data.real & (before >= 0) & (before < step - 1) & ~ended).sum())
    if holes:
        yield Finding(
            "mask",
            f"{holes} holes: real steps follow padding, and the step before it neither terminated nor was truncated. "
            "A window ends at each hole, so no credit crosses it: leave the padding out of the rows, or flag the step "
            "before it if an episode ends there",
            "warning",
        )


def _resets(data: Data) -> Iterator[Finding]:
    """Rewards that grow as an episode goes on (a score, a distance covered) fall back where the next one begins."""
    rewards, climb = data.floats["rewards"].double(), 8  # differences of unsigned integers are never negative
    if data.steps < climb + 2:
        return
    span = rewards.unfold(0, climb + 2, 1)
    rises = span[..., :-1].diff(dim=-1)
    # A reward that is 0 nearly always and 1 at times rises, too: three rises are a climb.
    falls = (rises >= 0).all(-1) & ((rises > 0).sum(-1) >= 3) & (span[..., -1] <= span[..., 0])
    falls &= data.inside.unfold(0, climb, 1)[:-1].all(-1)  # one episode up to the last step of the climb
    change = rewards.diff(dim=0)[data.inside]
    if change.numel() == 0 or bool((change < 0).double().mean() > 0.2):  # up and down: no such reward
        return
    missing, right = int((falls & data.inside[climb:]).sum()), int((falls & data.ends[climb:-1]).sum())
    if missing > max(2, right):
        message = f"climb for {climb} steps and fall back at once {missing} times where no episode ends: "
        yield Finding("rewards", message + "boundaries missing?", "warning")


def _bootstrap_values(data: Data) -> Iterator[Finding]:
    bootstrap = data.floats.get("bootstrap_values")
    if bootstrap is None:
        return
    ignored = data.real & ~data.bootstraps
    filled = int((bootstrap[ignored] != 0).sum())
    counts = bootstrap[data.bootstraps]
    if counts.numel() > 2 and bool((counts == 0).all()) and 0 < filled < 3 * counts.numel():
        message = f"0 at every step where it counts, and filled at {filled} where not: one step off?"
        yield Finding("bootstrap_values", message, "warning")
    elif filled:
        message = f"filled at {filled} steps where it is ignored: fine if V of every next state"
        yield Finding("bootstrap_values", message, "note")


def _next_values(data: Data) -> Iterator[Finding]:
    values, after = data.floats["values"], data.floats.get("next_values")
    same = _same_state(data, after)
    if after is None or same is None or not bool(data.inside.any()):
        return
    known = torch.isfinite(values) & torch.isfinite(after)
    inside = data.inside & known[:-1] & known[1:]
    if not bool((values[:-1] != values[1:])[inside].any()):  # a critic that says the same of all states
        return
    if bool((after == values)[data.real & known].all()):
        yield Finding("next_values", "equal to values: the value after each step is wanted", "error")
        return
    cut = data.truncated[:-1] & ~data.terminated[:-1] & data.real[1:] & known[:-1] & known[1:]
    cut = cut & ~cut.flatten(1).all(1).view(-1, *[1] * (cut.ndim - 1))  # where all rows are cut, batches were joined
    if len(after[:-1][cut].unique()) > 1 and bool((after[:-1] == values[1:])[cut].all()):
        yield Finding(
            "next_values",
            "behind truncated steps it is the value of the next episode's first state: V of the state that was cut off "
            "is wanted",
            "warning",
        )
    elsewhere = inside & ~same
    if int(elsewhere.sum()) > 0.1 * int(inside.sum()) and _are_of_other_steps(data, after, values, elsewhere):
        yield Finding(
            "next_values",
            f"at {int(elsewhere.sum())} steps inside episodes it is the value of another step than the next one: "
            "windows shuffled in time, or time_dim is another dimension",
            "error",
        )


def _are_of_other_steps(data: Data, after: Tensor, values: Tensor, where: Tensor) -> bool:
    """Whether the values after these steps are values of the data, and not by chance, nor those of n steps later."""
    wanted, there = after[:-1][where], values[data.real].double()
    if len(wanted.unique()) < 5:  # a critic of few numbers
        return False
    found = torch.isin(wanted.double(), there).double().mean()
    # In half precision numbers meet by chance: how many do, if each is moved a little?
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(wanted.shape, generator=generator, dtype=torch.float64).to(wanted.device)
    moved = (wanted.double() + 0.1 * wanted.double().std() * noise).to(after.dtype)
    chance = torch.isin(moved.double(), there).double().mean()
    if not bool(found > 0.9) or not bool(chance < 0.5):
        return False
    # n-step data, in windows that may follow one another in one stream
    one, other, real = (t.movedim(0, -1).flatten() for t in (after, values, data.real))

    def share(n: int) -> float:
        pairs = real[:-n] & real[n:]
        return (one[:-n] == other[n:])[pairs].double().mean().item() if bool(pairs.any()) else 0.0

    several = (n for n in range(2, min(len(one) - 1, 64)) if n % data.steps)  # a whole row later: the other dimension
    return not any(share(n) > share(1) + 0.3 for n in several)


def _axes(data: Data) -> Iterator[Finding]:
    values = data.floats["values"].double()
    if bool((~data.real).any()) or data.steps < 8:
        return

    def along(t: Tensor, dim: int) -> Tensor:
        return t.diff(dim=dim).abs().nanmean()

    values = torch.where(torch.isfinite(values), values, torch.nan)
    over_time, changes = along(values, 0), values.diff(dim=0)
    if bool(
        (changes[1:] * changes[:-1]).nansum() >= 0
    ):  # they drift: environments in step, perhaps, but not other rows
        return
    for dim in range(1, values.ndim):
        if values.shape[dim] >= 8 and 0 < along(values, dim) < 0.2 * over_time:  # 0: one critic for all agents
            original = [d for d in range(values.ndim) if d != data.inputs.time_dim][dim - 1]
            message = f"values change far less along dimension {original} than along time: axes swapped?"
            yield Finding("time_dim", message, "warning")
            return


_LOOKS = (_numbers, _log_probs, _flags, _late_flags, _holes, _resets, _bootstrap_values, _next_values, _axes)
