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
    "NaN that is read": ("error", "rewards", "NaN or inf at 1 steps", lambda d: first(d, "rewards", np.nan)),
    "probabilities": (
        "warning",
        "log_pi",
        "look like probabilities",
        lambda d: d.update(log_pi=d["log_pi"].exp().clamp(max=1)),
    ),
    "other actions": ("warning", "log_pi", "effective sample size", lambda d: d.update(log_pi=d["log_pi"] * 30)),
    "both flags": (
        "note",
        "truncated",
        "set beside terminated at",
        lambda d: d.update(terminated=d["truncated"].clone()),
    ),
    "inverted flags": (
        "warning",
        "terminated",
        "flags inverted",
        lambda d: d.update(terminated=~d["terminated"], truncated=torch.zeros_like(d["truncated"])),
    ),
    "every next value": (
        "note",
        "bootstrap_values",
        "steps where it is ignored",
        lambda d: d.update(bootstrap_values=torch.ones_like(d["values"])),
    ),
    "one step off": (
        "warning",
        "bootstrap_values",
        "one step off",
        lambda d: d.update(
            bootstrap_values=d["bootstrap_values"].roll(-1, 1).where(d["bootstrap_values"] == 0, torch.tensor(0.0))
        ),
    ),
    "swapped axes": (
        "warning",
        "time_dim",
        "far less along dimension 1",
        lambda d: d.update(time_dim=0, values=d["values"] * 100),
    ),
    "impossible actions": (
        "note",
        "log_pi",
        "-inf at 1 steps",
        lambda d: first(d, "log_pi", -np.inf),
    ),
    "gamma": ("error", "gamma", r"out of [0, 1]", lambda d: d.update(gamma=torch.tensor(99.0))),
    "pg_rho_bar": ("error", "pg_rho_bar", r"out of [0, inf]", lambda d: d.update(pg_rho_bar=torch.tensor(-1.0))),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake):
    severity, argument, message, make = MISTAKES[mistake]
    data = good() | {"gamma": 0.97}
    make(data)
    report = validate(**data)
    assert bool(report) is (severity == "note")
    found = [found for found in report.findings if found.argument == argument and message in found.message]
    assert [one.severity for one in found] == [severity], str(report)
    assert f"{severity}: {argument}: " in str(report)


@pytest.mark.parametrize("mistake", ["probabilities", "other actions", "one step off", "swapped axes"])
def test_a_nan_hides_no_mistake(mistake):
    """Found beside the NaN that is found too."""
    _, argument, message, make = MISTAKES[mistake]
    data = good() | {"gamma": 0.97}
    make(data)
    for name in ("log_pi", "log_mu", "values", "rewards"):
        data[name] = data[name].clone()
        data[name][3, 4] = np.nan
    report = validate(**data)
    assert any(found.argument == argument and message in found.message for found in report.findings), str(report)
    assert sum("NaN" in found.message for found in report.findings) == 4


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


def episodes(rows=16, T=60, seed=0, reward=lambda done: torch.ones_like(done, dtype=torch.float64)):
    """Windows of a world of its own: values that drift in an episode and jump at its end; every value after a step."""
    generator = torch.Generator().manual_seed(seed)
    done = torch.rand(rows, T, generator=generator) < 0.1
    state = torch.randn(rows, T + 1, generator=generator, dtype=torch.float64).cumsum(1) * 0.1
    jump = torch.zeros(rows, T + 1, dtype=torch.float64)
    jump[:, 1:] = torch.where(done, 5 * torch.randn(rows, T, generator=generator, dtype=torch.float64), 0.0)
    seen = state + jump.cumsum(1)
    values, after = seen[:, :-1], seen[:, 1:] - jump[:, 1:]  # of the state that the step led to, before a reset
    log_prob = torch.full((rows, T), -1.0, dtype=torch.float64)
    return {
        "log_pi": log_prob,
        "log_mu": log_prob,
        "values": values,
        "rewards": reward(done),
        "terminated": done,
        "gamma": 0.97,
    }, after


def late(done):
    """dones[t] that means "done before step t"."""
    return torch.cat([torch.zeros_like(done[:, :1]), done[:, :-1]], 1)


def severities(report, words):
    return [found.severity for found in report.findings if words in found.message]


class TestLateFlags:
    """As CleanRL's ``dones`` and SB3's ``episode_starts`` are: the commonest mistake in porting."""

    @pytest.mark.parametrize("flag", ["terminated", "truncated"])
    @pytest.mark.parametrize("continuation", ["next_values", "bootstrap_values"])
    def test_for_certain_by_the_values_after_each_step(self, continuation, flag):
        data, after = episodes()
        data[continuation], done = after, data["terminated"]
        data |= {"terminated": torch.zeros_like(done), flag: done}
        assert validate(**data), str(validate(**data))
        report = validate(**data | {flag: late(done)})
        assert severities(report, "one step late") == ["error"]

    def test_in_half_precision(self):
        data, after = episodes()
        data |= {name: data[name].bfloat16() for name in ("values", "rewards", "log_pi", "log_mu")}
        data["next_values"] = after.bfloat16()
        assert validate(**data)
        assert severities(validate(**data | {"terminated": late(data["terminated"])}), "one step late") == ["error"]

    def test_likely_by_values_that_jump(self):
        data, after = episodes()
        data["last_value"] = after[:, -1]
        assert validate(**data)
        report = validate(**data | {"terminated": late(data["terminated"])})
        assert severities(report, "values jump before the flags") == ["warning"]

    @pytest.mark.parametrize("last", [1.0, -1.0], ids=["a goal", "a fall"])
    def test_likely_by_rewards_at_the_end(self, last):
        data, _ = episodes(reward=lambda done: torch.where(done, last, 0.0))
        data |= {"values": torch.zeros_like(data["values"]), "last_value": torch.zeros(16)}
        assert validate(**data)
        report = validate(**data | {"terminated": late(data["terminated"])})
        assert severities(report, "the reward is another one") == ["warning"]

    def test_a_critic_that_says_nothing_yet(self):
        """Its last layer is 0, as many are at first: nothing can be seen, so nothing is said."""
        data, _ = episodes()
        zeros = torch.zeros_like(data["values"])
        for flags in ({}, {"truncated": late(data["terminated"])}):
            assert validate(**data | flags | {"values": zeros, "next_values": zeros})


class TestOrder:
    @pytest.mark.parametrize("order", ["a permutation", "each row's own", "reversed"])
    def test_windows_shuffled_in_time(self, order):
        data, after = episodes()
        data["next_values"] = after
        index = {
            "a permutation": torch.randperm(60).expand(16, 60),
            "each row's own": torch.rand(16, 60).argsort(1),
            "reversed": torch.arange(59, -1, -1).expand(16, 60),
        }[order]
        shuffled = {name: x.gather(1, index) if isinstance(x, torch.Tensor) else x for name, x in data.items()}
        assert severities(validate(**shuffled), "shuffled in time") == ["error"]

    def test_another_time_dimension(self):
        data, after = episodes()
        report = validate(**data, next_values=after, time_dim=0)
        assert severities(report, "time_dim is another dimension") == ["error"]

    def test_steps_of_several_are_in_order(self):
        """n-step data: the value after a step is that of the state n steps later."""
        values = torch.randn(8, 43, dtype=torch.float64)
        data, _ = episodes(8, 40)
        data |= {"values": values[:, :40], "next_values": values[:, 3:], "terminated": torch.zeros(8, 40)}
        assert validate(**data), str(validate(**data))


class TestRightData:
    """What is no mistake: no error, no warning."""

    def test_the_readmes_example(self):
        torch.manual_seed(0)
        log_mu = torch.randn(64, 128) - 1
        data = dict(zip(("values", "rewards", "bootstrap_values"), torch.randn(3, 64, 128), strict=True))
        terminated, truncated = torch.rand(2, 64, 128) < 0.01
        data |= {"log_pi": log_mu + 0.1 * torch.randn(64, 128), "log_mu": log_mu}
        report = validate(**data, terminated=terminated, truncated=truncated, gamma=0.99)
        assert report and {found.severity for found in report.findings} == {"note"}

    def test_a_table_of_values_that_are_nearly_all_zero(self):
        """Before training has reached them; bootstraps are filled where they are used alone."""
        data, _ = episodes(16, 60)
        last = data["terminated"]
        data["values"] = torch.where(last, 0.5, 0.0).double()  # only the state before the end has been learned
        assert validate(**data, last_value=torch.zeros(16))
        assert validate(**data, bootstrap_values=torch.zeros(16, 60))
        assert validate(**data, next_values=torch.cat([data["values"][:, 1:], torch.zeros(16, 1)], 1))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize("scale", [1.0, 20.0])
    def test_next_values_of_a_target_network(self, dtype, scale):
        """They differ from the values at every step; in half precision they are numbers of the data all the same."""
        data, after = episodes()
        data = {name: x.to(dtype) if name in ("log_pi", "log_mu", "rewards") else x for name, x in data.items()}
        lagging = (scale * (after + 0.1 * torch.randn(16, 60, generator=torch.Generator().manual_seed(0)))).to(dtype)
        data["values"] = (scale * data["values"]).to(dtype)
        assert validate(**data, next_values=lagging), str(validate(**data, next_values=lagging))
        zeros = torch.zeros_like(lagging)  # its last layer is still 0
        assert validate(**data | {"values": data["values"].round()}, next_values=zeros)

    @pytest.mark.parametrize(("n", "T"), [(3, 6), (5, 8), (10, 16), (3, 40)])
    def test_steps_of_several_in_windows_of_one_stream(self, n, T):
        """n-step data whose windows follow one another: a value n steps later stands in the next row."""
        stream = torch.randn(8 * T + n, dtype=torch.float64)
        data, _ = episodes(8, T)
        data |= {"values": stream[:-n].view(8, T), "next_values": stream[n:].view(8, T)}
        data["terminated"] = torch.zeros(8, T)
        assert validate(**data), str(validate(**data))

    def test_a_central_critic_has_one_value_for_all_agents(self):
        data, _ = episodes(1, 60)
        noise = torch.randn(1, 60, 1).expand(1, 60, 8)
        shaped = {name: x[..., None].expand(1, 60, 8) for name, x in data.items() if name != "gamma"}
        shaped |= {"values": noise, "last_value": noise[:, -1]}
        assert validate(**shaped, gamma=0.97, time_dim=1)

    def test_two_batches_of_an_environment_that_goes_on(self):
        """The collector cut both where the batch was full: what follows the first is the second's first state."""
        data, _ = episodes(16, 60)
        cut = (torch.arange(60) == 29).expand(16, 60)
        data |= {"terminated": torch.zeros(16, 60), "truncated": cut, "next_values": data["values"].roll(-1, 1)}
        assert validate(**data), str(validate(**data))

    @pytest.mark.parametrize("length", [2, 8])
    def test_slices_in_one_row(self, length):
        """As ``SliceSampler`` returns them: every slice's end is truncated, one that ended itself has both flags."""
        data, after = episodes(1, 400)
        data |= {"next_values": after, "truncated": torch.arange(1, 401)[None] % length == 0}
        pieces = torch.randperm(400 // length)
        for name in ("values", "rewards", "terminated", "truncated", "next_values"):
            data[name] = data[name].view(-1, length)[pieces].view(1, 400)
        assert validate(**data), str(validate(**data))

    @pytest.mark.parametrize("ends", [(1.0, -1.0), (-1.0, -1.0), (1.0, 1.0)], ids=str)
    def test_a_reward_at_the_end_alone(self, ends):
        """Catch, a cliff, a goal: 0, and then once something else."""
        last = torch.arange(9, 41, 9) - 1
        data, after = episodes(16, 40)
        data |= {"terminated": torch.zeros(16, 40), "rewards": torch.zeros(16, 40), "last_value": after[:, -1]}
        data["values"] = 0.1 * data["values"]
        data["terminated"][:, last] = 1
        data["rewards"][::2, last], data["rewards"][1::2, last] = ends
        assert validate(**data), str(validate(**data))

    def test_points_now_and_then(self):
        """0 nearly always, 1 at times, and no episode ends: not a reward that climbs and falls back."""
        data, after = episodes(16, 200)
        data |= {"terminated": torch.zeros(16, 200), "rewards": (torch.rand(16, 200) < 0.05).float()}
        assert validate(**data, last_value=after[:, -1])

    def test_episodes_of_one_step(self):
        data, after = episodes()
        report = validate(**data | {"terminated": torch.ones(16, 60)}, last_value=after[:, -1])
        assert report and severities(report, "100% of the steps end an episode") == ["note"]


class TestHoles:
    """A mask is for padding: a window ends at each hole."""

    @staticmethod
    def with_mask(mask, flags=None):
        data, after = episodes(1, len(mask))
        flags = [0] * len(mask) if flags is None else flags
        masked = {"mask": torch.tensor([mask]), "terminated": torch.tensor([flags]), "bootstrap_values": after}
        return validate(**data | masked)

    @pytest.mark.parametrize(
        ("mask", "holes"), [([1, 0, 1, 1], 1), ([1, 0, 0, 1], 1), ([1, 0, 1, 0, 1], 2), ([0, 1, 0, 1], 1)], ids=str
    )
    def test_between_steps_of_one_episode(self, mask, holes):
        assert severities(self.with_mask(mask), f"{holes} holes") == ["warning"]

    @pytest.mark.parametrize(
        ("mask", "flags"),
        [([1, 1, 0, 0], None), ([0, 0, 1, 1], None), ([1, 0, 1, 1], [1, 0, 0, 0]), ([0, 0, 0, 0], None)],
        ids=["padding behind", "padding before", "an episode ends before it", "padding alone"],
    )
    def test_padding(self, mask, flags):
        assert self.with_mask(mask, flags)


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


@pytest.mark.parametrize("behind", [0.0, 3.0])
def test_rewards_fall_back_into_padding(behind):
    """Whatever the padding holds: a window's end is no missing boundary."""
    data = good(boundaries=0.0)
    t = torch.arange(30).expand(12, 30)
    data["rewards"] = torch.where(t < 20, t + 5, behind).double()
    data["mask"] = t < 20
    assert validate(**data, gamma=0.97), str(validate(**data, gamma=0.97))


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
