"""The look at the data: silent on right data, one finding for each mistake."""

import inspect

import numpy as np
import pytest
import torch
from helpers import tensors, window

from vtrace_plugins import VTraceError, validate, vtrace


def good(**kwargs):
    """A window as it should be: bootstraps where they count, and values that change slowly in time."""
    data = tensors(window(12, 30, off_policy=0.3, **kwargs))
    data["values"] = data["values"].cumsum(1) * 0.1
    if "bootstrap_values" in data:
        data["terminated"] &= ~data["truncated"]
        last = torch.zeros_like(data["truncated"])
        last[:, -1] = True
        counts = (data["truncated"] | last) & ~data["terminated"]
        data["bootstrap_values"] = torch.where(counts, data["bootstrap_values"], 0.0)
    return data


@pytest.mark.parametrize("continuation", ["bootstrap_values", "last_value", "next_values"])
@pytest.mark.parametrize("time_dim", [0, 1])
def test_right_data(continuation, time_dim):
    data = good(continuation=continuation)
    if continuation == "next_values":
        data["terminated"] &= ~data["truncated"]
    moved = {name: x if x.ndim == 1 else x.movedim(1, time_dim) for name, x in data.items()}
    report = validate(**moved, gamma=0.97, time_dim=time_dim)
    assert report, str(report)
    assert str(report) == "nothing suspicious"


def first(data, name, value):
    data[name] = data[name].clone()
    data[name][0, 0] = value


MISTAKES = {
    "NaN that is read": ("rewards", "NaN or inf at 1 steps", lambda d: first(d, "rewards", np.nan)),
    "probabilities": ("log_pi", "look like probabilities", lambda d: d.update(log_pi=d["log_pi"].exp().clamp(max=1))),
    "other actions": ("log_pi", "effective sample size", lambda d: d.update(log_pi=d["log_pi"] * 30)),
    "both flags": ("truncated", "set beside terminated at", lambda d: d.update(terminated=d["truncated"].clone())),
    "inverted flags": (
        "terminated",
        "flags inverted",
        lambda d: d.update(terminated=~d["terminated"], truncated=torch.zeros_like(d["truncated"])),
    ),
    "every next value": (
        "bootstrap_values",
        "steps where it is ignored",
        lambda d: d.update(bootstrap_values=torch.ones_like(d["values"])),
    ),
    "one step off": (
        "bootstrap_values",
        "one step off",
        lambda d: d.update(
            bootstrap_values=d["bootstrap_values"].roll(-1, 1).where(d["bootstrap_values"] == 0, torch.tensor(0.0))
        ),
    ),
    "swapped axes": (
        "time_dim",
        "far less along dimension 1",
        lambda d: d.update(time_dim=0, values=d["values"] * 100),
    ),
    "gamma": ("gamma", r"out of [0, 1]", lambda d: d.update(gamma=torch.tensor(99.0))),
    "pg_rho_bar": ("pg_rho_bar", r"out of [0, inf]", lambda d: d.update(pg_rho_bar=torch.tensor(-1.0))),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake):
    argument, message, make = MISTAKES[mistake]
    data = good() | {"gamma": 0.97}
    make(data)
    report = validate(**data)
    assert not report
    assert any(found.argument == argument and message in found.message for found in report.findings), str(report)
    assert f"{argument}: " in str(report)


def test_both_log_probs_are_named():
    data = good()
    data |= {name: data[name].exp().clamp(max=1) for name in ("log_pi", "log_mu")}
    report = validate(**data, gamma=0.97)
    assert [f.argument for f in report.findings if "look like probabilities" in f.message] == ["log_pi", "log_mu"]


def test_a_nan_behind_a_window():
    data = good(continuation="last_value")
    data["terminated"][:2, -1] = torch.tensor([True, False])
    data["last_value"][:2] = torch.nan
    assert "last_value: NaN or inf at 1 windows" in str(validate(**data, gamma=0.97))


def test_environments_in_step_are_no_swapped_axes():
    """As in a first batch: all values rise together."""
    data = good(boundaries=0.0)
    data["values"] = torch.arange(30.0).expand(12, 30) + 0.01 * data["values"]
    assert validate(**data, gamma=0.97)


def test_episode_starts_for_ends():
    data = good(boundaries=0.0)
    data["terminated"][:, 0] = True
    assert "episode starts" in str(validate(**data, gamma=0.97))


@pytest.mark.parametrize("shifted", [False, True], ids=["not shifted", "of the state after the reset"])
def test_next_values(shifted):
    data = good(continuation="next_values")
    data["next_values"] = data["values"].roll(-1, 1) if shifted else data["values"]
    wanted = "next episode's first state" if shifted else "equal to values"
    assert wanted in str(validate(**data, gamma=0.97))


@pytest.mark.parametrize("flags", ["missing", "right", "one step late"])
def test_rewards_that_fall_back(flags):
    """A reward that counts the steps of its episode, of 10 each; 3 in the window, two falls a row."""
    data = good(boundaries=0.0)
    t = torch.arange(30).expand(12, 30)
    data["rewards"] = (t % 10).to(data["rewards"])
    if flags != "missing":
        data["terminated"] = t % 10 == (9 if flags == "right" else 0)
    report = validate(**data, gamma=0.97)
    falls = [found.message for found in report.findings if found.argument == "rewards"]
    assert len(falls) == (flags != "right")
    assert all("fall back at once 24 times where no episode ends" in message for message in falls)


def test_rewards_that_count_and_just_vary():
    data = good(boundaries=0.0)
    data["rewards"] = torch.randint(0, 200, (12, 30), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    assert validate(**data, gamma=0.97)


def test_a_nan_that_is_never_read_is_fine_and_wrong_shapes_are_errors():
    data = good()
    inside = ~data["terminated"] & ~data["truncated"]
    inside[:, -1] = False
    data["bootstrap_values"][inside] = torch.nan
    assert "NaN" not in str(validate(**data, gamma=0.97))
    with pytest.raises(VTraceError, match="rewards: expected shape"):
        validate(**data | {"rewards": data["rewards"][:, :3]}, gamma=0.97)


def test_it_takes_what_vtrace_takes():
    """Same names, kinds, defaults and annotations, so that a call is validated by its name alone."""
    assert inspect.signature(validate).parameters == inspect.signature(vtrace).parameters
    with pytest.raises(VTraceError, match="backend: expected one of"):
        validate(**good(), gamma=0.97, backend="cuda")


def test_the_docstring():
    import doctest

    from vtrace_plugins import diagnostics, validation

    for module in (validation, diagnostics):
        failed, tried = doctest.testmod(module)
        assert tried and not failed
