"""Random windows of every shape, layout and option against the float64 loop; and facts that hold for any of them."""

import hypothesis.strategies as st
import numpy as np
import oracle
import pytest
import torch
from helpers import TOLERANCE, assert_close, call, rounded, tensors, window
from hypothesis import given, settings

from vtrace_plugins import vtrace

CONTINUATIONS = ("bootstrap_values", "last_value", "next_values")
FLAG_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
)
# The interpreter takes about 0.1 ms an element; compiled code may have more.
MOST_ELEMENTS = {"triton": 3000, "reference": 12_000, "torch": 30_000}
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled there instead")

lengths = st.one_of(st.integers(1, 40), st.integers(1, 300), st.integers(1, 3000))
options = st.fixed_dictionaries(
    {
        "gamma": st.sampled_from([0.0, 0.5, 0.97, 0.99, 1.0]),
        "rho_bar": st.sampled_from([0.5, 1.0, 3.7, float("inf")]),
        "c_bar": st.sampled_from([0.0, 0.5, 1.0]),  # above 1 a long product may leave the float range: tested short
        "pg_rho_bar": st.sampled_from([None, 0.9, 2.2]),
        "lam": st.sampled_from([0.0, 0.9, 1.0]),
        "weight_advantages": st.booleans(),
    }
)


def strided(x, layout, time_dim):
    """The same numbers under other strides: every other element of a larger tensor, or time-major memory."""
    if layout == "holes":
        larger = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), float("nan") if x.is_floating_point() else 1)
        larger = larger.to(x.dtype) if x.dtype != torch.bool else larger.bool()
        larger = larger.to(x.device)
        larger[..., 1::2] = x
        return larger[..., 1::2]
    if layout == "time-major":
        return x.movedim(time_dim, 0).contiguous().movedim(0, time_dim)
    return x


windows = given(
    batch=st.lists(st.integers(1, 5), max_size=3),
    T=lengths,
    time_dim=st.integers(0, 3),
    layout=st.sampled_from(["plain", "holes", "time-major"]),
    continuation=st.sampled_from(CONTINUATIONS),
    masked=st.booleans(),
    flag_dtype=st.sampled_from(FLAG_DTYPES),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    boundaries=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    per_step_gamma=st.booleans(),
    options=options,
    seed=st.integers(0, 2**32 - 1),
)


@windows
def test_any_window(on, **drawn):
    if on == ("triton", "cpu"):
        pytest.skip("below")
    assert_right(on, MOST_ELEMENTS["torch" if on[1] == "cuda" else on[0]], **drawn)


@interpreted
@settings(max_examples=20)
@windows
def test_any_window_in_the_interpreter(**drawn):
    assert_right(("triton", "cpu"), 300, **drawn)


@interpreted
@pytest.mark.slow
@windows
def test_any_window_in_the_interpreter_at_length(**drawn):
    assert_right(("triton", "cpu"), MOST_ELEMENTS["triton"], **drawn)


def assert_right(
    on, limit, *, batch, T, time_dim, layout, continuation, masked, flag_dtype, dtype, boundaries, per_step_gamma,
    options, seed,
):  # fmt: skip
    """The call on these drawn arguments gives the float64 loop's numbers."""
    backend, device = on
    rows = int(np.prod(batch))
    T = max(1, min(T, limit // rows))
    time_dim = min(time_dim, len(batch))
    data = rounded(window(rows, T, seed=seed, continuation=continuation, boundaries=boundaries, masked=masked), dtype)
    if per_step_gamma:
        steps = np.random.default_rng(seed).integers(1, 4, size=(rows, T))
        data["gamma"] = options["gamma"] ** steps
        data = rounded(data, dtype)
    named = options | {"gamma": data.pop("gamma", options["gamma"])}

    shape = (*batch, T)
    given_tensors = {}
    for name, x in tensors(data | ({"gamma": named["gamma"]} if per_step_gamma else {}), device, dtype).items():
        if name == "last_value":
            given_tensors[name] = x.view(batch)
            continue
        x = x.to(flag_dtype) if x.dtype == torch.bool else x
        given_tensors[name] = strided(x.view(shape).movedim(-1, time_dim), layout, time_dim)
    result = vtrace(**(options | given_tensors), time_dim=time_dim, backend=backend)

    expected = oracle.loop(**data, **named)
    for actual, wanted in zip(result, expected, strict=True):
        assert actual.dtype == dtype and actual.shape == given_tensors["values"].shape
        assert_close(actual.movedim(time_dim, -1).reshape(rows, T), wanted, tolerance=2 * TOLERANCE[dtype])


@pytest.mark.parametrize(
    "T", [1, 2, 7, 8, 9, 31, 33, pytest.param(64, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("continuation", CONTINUATIONS)
def test_tile_boundaries(on, small_tiles, continuation, T):
    data = window(5, T, seed=T, continuation=continuation, masked=True)
    result = call(on, data, gamma=0.97, lam=0.9)
    for actual, wanted in zip(result, oracle.loop(**data, gamma=0.97, lam=0.9), strict=True):
        assert_close(actual, wanted)


@pytest.mark.parametrize(("rho_bar", "c_bar"), [(3.7, 1.0), (1.0, 1.5), (float("inf"), float("inf"))])
def test_the_papers_sum(on, rho_bar, c_bar):
    """IMPALA eq. 1 summed over all pairs of steps, at torchbeast's scale: log-ratios in [-2.5, 2.5)."""
    data = window(3, 24, continuation="last_value")
    data["log_pi"] = data["log_mu"] + np.random.default_rng(1).uniform(-2.5, 2.5, size=(3, 24))
    named = {"gamma": 0.9, "rho_bar": rho_bar, "c_bar": c_bar}
    assert_close(call(on, data, **named, pg_rho_bar=2.2).targets, oracle.quadratic(**data, **named))


def test_on_policy_targets_telescope_to_the_discounted_return(on):
    data = window(4, 50, continuation="last_value", boundaries=0.0, off_policy=0.0)
    targets = call(on, data, gamma=0.97).targets
    wanted, ret = np.empty((4, 50)), data["last_value"]
    for t in reversed(range(50)):
        wanted[:, t] = ret = data["rewards"][:, t] + 0.97 * ret
    assert_close(targets, wanted)


@pytest.mark.parametrize("lam", [0.0, 0.9, 0.95, 1.0])
def test_on_policy_advantage_is_gae(on, lam):
    data = window(4, 60, off_policy=0.0)
    done = data["terminated"] | data["truncated"]
    done[:, -1] = True
    after = np.where(done, data["bootstrap_values"], np.roll(data["values"], -1, axis=1))
    delta = data["rewards"] + 0.97 * np.where(data["terminated"], 0, after) - data["values"]
    gae, wanted = np.zeros(4), np.empty((4, 60))
    for t in reversed(range(60)):
        wanted[:, t] = gae = delta[:, t] + 0.97 * lam * np.where(done[:, t], 0, gae)
    result = call(on, data, gamma=0.97, lam=lam, rho_bar=2.0, c_bar=1.0, weight_advantages=False)
    assert_close(result.advantages, wanted)
    assert_close(result.targets, wanted + data["values"])


@pytest.mark.parametrize("lam", [0.7, 1.0])
def test_advantage_is_the_correction_when_the_clips_agree(on, lam):
    data = window(4, 40)
    result = call(on, data, gamma=0.97, lam=lam, rho_bar=1.2, c_bar=1.2)
    assert_close(result.advantages, result.targets.double().cpu().numpy() - data["values"])


def test_splitting_at_cuts_changes_nothing(on):
    data = window(1, 60, seed=3, boundaries=0.08)
    whole = call(on, data, gamma=0.97, lam=0.9)
    ends = [*np.flatnonzero((data["terminated"] | data["truncated"])[0]), 59]
    start = 0
    for end in ends:
        piece = call(on, {name: x[:, start : end + 1] for name, x in data.items()}, gamma=0.97, lam=0.9)
        for part, of in zip(piece, whole, strict=True):
            assert_close(part, of[:, start : end + 1].cpu().numpy(), tolerance=1e-13)
        start = end + 1
    assert len(ends) > 4


def test_any_mask(on, small_tiles):
    """Padding may also stand before or between the real steps."""
    data = window(4, 30, seed=5)
    data["mask"] = np.random.default_rng(5).random((4, 30)) < 0.7
    result = call(on, data, gamma=0.97, lam=0.9)
    for actual, wanted in zip(result, oracle.loop(**data, gamma=0.97, lam=0.9), strict=True):
        assert_close(actual, wanted)
        assert torch.all(actual[torch.as_tensor(~data["mask"])] == 0)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1e300])
@pytest.mark.parametrize("cut", ["terminated", "truncated"])
def test_garbage_after_a_cut_changes_no_bit_before_it(on, small_tiles, cut, garbage):
    data = window(3, 30, boundaries=0.0)
    data[cut][:, 12] = True
    clean = call(on, data, gamma=0.97)
    for name in ("log_pi", "log_mu", "values", "rewards", "bootstrap_values"):
        data[name] = data[name].copy()
        data[name][:, 13:] = garbage
    dirty = call(on, data, gamma=0.97)
    for before, after in zip(clean, dirty, strict=True):
        assert torch.equal(before[:, :13], after[:, :13])
        assert not torch.equal(before[:, 13:], after[:, 13:])


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_unread_entries_may_hold_anything(on, small_tiles, garbage):
    """Bootstraps inside an episode, every continuation at a terminated step, and all of the padding."""
    data = window(6, 30, masked=True)
    clean = call(on, data, gamma=0.97)
    mask = data["mask"]
    last = np.roll(mask, -1, axis=1) == 0
    last[:, -1] = True
    read = mask & (data["truncated"] | last) & ~data["terminated"]
    data["bootstrap_values"] = np.where(read, data["bootstrap_values"], garbage)
    for name in ("log_pi", "log_mu", "values", "rewards"):
        data[name] = np.where(mask, data[name], garbage)
    dirty = call(on, data, gamma=0.97)
    assert all(torch.equal(x, y) for x, y in zip(clean, dirty, strict=True))
    assert torch.all(dirty.targets[torch.as_tensor(~mask)] == 0) and torch.all(dirty.advantages[~mask] == 0)


@pytest.mark.parametrize("field", ["log_pi", "values", "rewards"])
def test_a_nan_stays_in_its_row_and_episode(on, small_tiles, field):
    data = window(3, 30, boundaries=0.0)
    data["truncated"][1, 9] = data["terminated"][1, 24] = True
    clean = call(on, data, gamma=0.97)
    data[field] = data[field].copy()
    data[field][1, 20] = float("nan")
    dirty = call(on, data, gamma=0.97)
    touched = torch.zeros(3, 30, dtype=torch.bool)
    touched[1, 10:21] = True
    for x, y in zip(clean, dirty, strict=True):
        assert torch.equal(x.cpu()[~touched], y.cpu()[~touched])
        assert torch.isnan(y.cpu()[touched]).all()


def test_truncated_is_not_terminated(on):
    data = window(2, 20, boundaries=0.0)
    data["terminated"][:, 7] = True
    terminated = call(on, data, gamma=0.97).targets
    data["truncated"], data["terminated"] = data["terminated"], data["truncated"]
    assert torch.all(call(on, data, gamma=0.97).targets[:, 7] != terminated[:, 7])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_accumulates_in_float32(on, dtype):
    data = rounded(window(4, 100), dtype)
    result = call(on, data, dtype=dtype, gamma=0.97)
    for actual, wanted in zip(result, oracle.loop(**data, gamma=0.97), strict=True):
        assert actual.dtype == dtype
        assert_close(actual, wanted)


def test_float64_anywhere_makes_the_computation_float64(on):
    data = tensors(window(2, 50), on[1], torch.float32)
    wanted = vtrace(
        **{k: x.double() if x.is_floating_point() else x for k, x in data.items()}, gamma=0.97, backend=on[0]
    )
    mixed = data | {"rewards": data["rewards"].double()}
    result = vtrace(**mixed, gamma=0.97, backend=on[0])
    assert result.targets.dtype == torch.float32
    assert torch.equal(result.targets, wanted.targets.float())


def test_integer_rewards(on):
    data = tensors(window(2, 20), on[1])
    data["rewards"] = torch.arange(40, device=on[1]).view(2, 20)
    whole = vtrace(**data, gamma=0.97, backend=on[0])
    assert torch.equal(
        whole.targets, vtrace(**data | {"rewards": data["rewards"].double()}, gamma=0.97, backend=on[0]).targets
    )


def test_clips_and_gamma_as_0d_tensors(on):
    data = window(2, 30)
    options = {"gamma": 0.97, "rho_bar": 1.3, "c_bar": 0.9, "pg_rho_bar": 2.0}
    as_tensors = {k: torch.tensor(x, dtype=torch.float64, device=on[1]) for k, x in options.items()}
    for x, y in zip(call(on, data, **options), call(on, data, **as_tensors), strict=True):
        assert torch.equal(x, y)


def test_a_clip_beyond_the_dtype_is_none(on):
    data = window(2, 20)
    for x, y in zip(
        call(on, data, dtype=torch.float32, gamma=0.97, rho_bar=1e39),
        call(on, data, dtype=torch.float32, gamma=0.97, rho_bar=float("inf")),
        strict=True,
    ):
        assert torch.equal(x, y)


@pytest.mark.parametrize(("shape", "time_dim"), [((0, 5), -1), ((3, 0), -1), ((0, 0), 0), ((2, 0, 3), 1), ((0,), 0)])
def test_empty(on, shape, time_dim):
    x = torch.zeros(shape, device=on[1])
    last = torch.zeros(x.shape[: time_dim % x.ndim] + x.shape[time_dim % x.ndim + 1 :], device=on[1])
    result = vtrace(x, x, x, x, x.bool(), last_value=last, gamma=0.9, time_dim=time_dim, backend=on[0])
    assert result.targets.shape == result.advantages.shape == x.shape


def test_expanded_inputs_have_zero_strides(on):
    data = window(4, 20, continuation="next_values")
    wanted = call(on, {k: np.broadcast_to(x[:1], x.shape).copy() for k, x in data.items()}, gamma=0.97)
    expanded = {k: x[:1].expand(4, 20) for k, x in tensors(data, on[1]).items()}
    for actual, expected in zip(vtrace(**expanded, gamma=0.97, backend=on[0]), wanted, strict=True):
        assert_close(actual, expected.cpu().numpy())  # not to the bit: a scan may go another way over other strides


def test_no_output_is_left_unwritten(on, monkeypatch):
    """Outputs are NaN-poisoned before the kernel: what it does not write shows."""
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **kwargs: empty_like(x, **kwargs).fill_(float("nan")))
    for rows, T in [(1, 1), (3, 5), (7, 33), (33, 9)]:
        result = call(on, window(rows, T, masked=True), gamma=0.97)
        assert not any(torch.isnan(x).any() for x in result)


@pytest.mark.gpu
@pytest.mark.parametrize("time_dim", [0, 1])
def test_offsets_beyond_31_bits(time_dim):
    """A view whose second row starts 2**31 elements after the first."""
    on = ("triton", "cuda")
    data = tensors(window(2, 50), "cuda", torch.float16)
    far = torch.empty(2**31 + 50, dtype=torch.float16, device="cuda").as_strided((2, 50), (2**31, 1))
    far.copy_(data["values"])
    wanted = vtrace(**data, gamma=0.97, backend=on[0])
    moved = {k: x.movedim(1, time_dim) for k, x in (data | {"values": far}).items()}
    result = vtrace(**moved, gamma=0.97, time_dim=time_dim, backend=on[0])
    for x, y in zip(result, wanted, strict=True):
        torch.testing.assert_close(x.movedim(time_dim, 1), y)


@pytest.mark.gpu
def test_the_same_shape_in_other_clothes():
    """Compiled handles are reused by shape: alignment, strides, dtypes and absent arguments must tell them apart."""
    data = tensors(window(6, 40, masked=True), "cuda", torch.float32)
    wanted = vtrace(**data, gamma=0.97, backend="triton")

    def misaligned(x):
        larger = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)
        return larger.copy_(x)

    def time_major(x):
        return x.T.contiguous().T

    for dress in (misaligned, time_major, torch.clone, misaligned):
        for names in (data, ["values"], ["log_pi", "terminated"]):
            dressed = data | {k: dress(data[k]) for k in names}
            for _ in range(2):
                for x, y in zip(vtrace(**dressed, gamma=0.97, backend="triton"), wanted, strict=True):
                    torch.testing.assert_close(x, y, rtol=0, atol=2e-6)
    every = torch.ones_like(data["mask"])
    whole = {k: x for k, x in data.items() if k != "mask"}
    for x, y in zip(
        vtrace(**data | {"mask": every}, gamma=0.97, backend="triton"),
        vtrace(**whole, gamma=0.97, backend="triton"),
        strict=True,
    ):
        torch.testing.assert_close(x, y)
    halves = {k: x.half() if x.is_floating_point() else x for k, x in data.items()}
    assert vtrace(**halves, gamma=0.97, backend="triton").targets.dtype == torch.float16


def test_bitwise_the_same_from_run_to_run(on):
    data = window(5, 100)
    first, second = call(on, data, gamma=0.97), call(on, data, gamma=0.97)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
