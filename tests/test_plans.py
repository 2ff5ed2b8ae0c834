"""Every way the launcher may cut a window up, on the same data: whole and in chunks."""

import oracle
import pytest
import torch
from helpers import assert_close, call, rounded, tensors, window

from vtrace_plugins import vtrace

AS_NEEDED, IN_ORDER, AT_ONCE = 0, 1, 2  # the kernel's, which cannot be imported yet: triton may be missing
PLANS = {
    "one tile": (2, 32, 1, 1),
    "one tile, loads in order": (4, 32, 1, 1, 1, IN_ORDER),
    "one tile, loads at once": (4, 32, 1, 1, 1, AT_ONCE),
    "one tile, a step a thread": (1, 32, 1, 1, 1, AT_ONCE, 1),
    "tiles": (2, 8, 1, 100),
    "tiles, loads ahead": (4, 8, 1, 100, 3),
    "chunks": (2, 8, 1, 1),
    "chunks, loads in order": (16, 8, 1, 1, 1, IN_ORDER),
    "chunks that look back": (2, 8, 1, 1, 1, AS_NEEDED, 4, True),
    "chunks of two tiles": (4, 8, 1, 2),
    "chunks of two tiles, loads ahead": (16, 8, 1, 2, 2),
}


@pytest.fixture(params=PLANS.values(), ids=PLANS)
def plan(request, monkeypatch):
    from vtrace_plugins._core import launch, ops

    monkeypatch.setattr(launch, "choose", lambda *_: launch.Plan(*request.param))
    monkeypatch.setattr(ops, "_launches", {})


on = pytest.mark.parametrize(
    "on", [("triton", "cpu"), pytest.param(("triton", "cuda"), marks=pytest.mark.gpu)], ids=lambda on: on[1]
)


both = pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=["float32", "float64"]
)


@on
@both
@pytest.mark.parametrize(
    ("continuation", "masked"), [("bootstrap_values", True), ("last_value", False), ("next_values", False)]
)
@pytest.mark.parametrize("T", [pytest.param(1, marks=pytest.mark.slow), 21])
def test_the_oracle(on, plan, continuation, masked, T, dtype):
    data = rounded(window(3, T, continuation=continuation, masked=masked), dtype)
    options = {"gamma": 0.97, "lam": 0.9, "rho_bar": 1.3, "c_bar": 0.9, "pg_rho_bar": 2.0}
    for actual, expected in zip(call(on, data, dtype=dtype, **options), oracle.loop(**data, **options), strict=True):
        assert_close(actual, expected)


@on
@both
def test_a_nan_behind_a_cut_stays_there(on, plan, dtype):
    data = window(2, 21, boundaries=0.0)
    data["truncated"][:, 9] = True
    clean = call(on, data, dtype=dtype, gamma=0.97)
    for name in ("log_pi", "values", "rewards"):
        data[name] = data[name].copy()
        data[name][:, 10:] = float("nan")
    dirty = call(on, data, dtype=dtype, gamma=0.97)
    for before, after in zip(clean, dirty, strict=True):
        assert torch.equal(before[:, :10], after[:, :10])
        assert after[:, 10:].isnan().all()


@on
@both
def test_time_first_and_agents_inside(on, plan, dtype):
    data = tensors(window(4, 13), on[1], dtype)
    wanted = vtrace(**data, gamma=0.97, backend=on[0])
    for moved in (lambda x: x.T.contiguous(), lambda x: x.view(2, 2, 13).transpose(1, 2).contiguous()):
        shaped = {name: moved(x) for name, x in data.items()}
        found = vtrace(**shaped, gamma=0.97, time_dim=-2, backend=on[0])
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, moved(y))


@pytest.mark.gpu
@pytest.mark.parametrize("time_dim", [0, 1], ids=["[T,N]", "[N,T]"])
@pytest.mark.parametrize("size", [(8192, 256), (1024, 2048), (300, 4096), (512, 512), (40000, 64)], ids=str)
def test_every_input_at_once_fits_into_what_is_chosen(size, time_dim):
    """Tiles in flight take shared memory for each input: here all of them are given, gamma and mask as tensors."""
    torch.manual_seed(0)
    names = ("log_pi", "log_mu", "values", "rewards", "next_values", "gamma")
    data = {name: 0.5 * torch.randn(size, device="cuda") for name in names}
    data["gamma"] = data["gamma"].sigmoid()
    data |= {name: torch.rand(size, device="cuda") < 0.02 for name in ("terminated", "truncated")}
    data["mask"] = torch.rand(size, device="cuda") < 0.98
    wanted = vtrace(**data, lam=0.9, backend="torch")
    found = vtrace(**{k: x.movedim(1, time_dim).contiguous() for k, x in data.items()}, lam=0.9, time_dim=time_dim)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.movedim(time_dim, 1), y, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_a_profilers_hooks_hear_of_every_launch():
    """A repeated launch goes around triton's own, which calls them."""
    from triton import knobs

    data, heard = tensors(window(4, 13), "cuda"), []
    hook = lambda metadata: heard.append(metadata.get()["name"])  # noqa: E731
    vtrace(**data, gamma=0.97)
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        for _ in range(3):
            vtrace(**data, gamma=0.97)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    vtrace(**data, gamma=0.97)
    assert heard == ["vtrace_kernel"] * 3


@pytest.mark.parametrize("time_is_contiguous", [True, False], ids=["[N,T]", "[T,N]"])
@pytest.mark.parametrize("multiprocessors", [1, 20, 132])
def test_what_is_chosen(time_is_contiguous, multiprocessors):
    """Any size gets a plan that covers it and fits, and all sizes together get few kernels to compile."""
    from vtrace_plugins._core.launch import choose

    variants = set()
    for rows in (1, 2, 3, 7, 64, 100, 200, 263, 264, 1000, 4096, 30000, 2**20):
        for time in (1, 2, 5, 16, 33, 100, 128, 129, 500, 2048, 2049, 16384, 16385, 65536, 65537, 2**20):
            plan = choose(rows, time, time_is_contiguous, multiprocessors)
            tiles = -(-time // plan.block_time)
            chunks = -(-tiles // plan.chunk_tiles)
            chunk_maps = 1 << (chunks - 1).bit_length()
            assert all(x.bit_count() == 1 for x in plan[:3]), "powers of two"
            assert plan.block_time >= 8, "runs of four steps"
            assert plan.block_time > 8 or plan.warps <= 4, "triton 3.6 fails to compile a scan over 2 with 8 warps"
            assert plan.block_rows * plan.block_time <= 4096
            assert plan.block_rows * chunk_maps <= 1024 or chunks == 1, "held at once as a program enters its chunk"
            assert not plan.look_back or chunks <= 32 * plan.warps, "a place of the mail for each thread"
            assert not plan.look_back or plan.chunk_tiles == 1
            kernel = (*plan[:3], plan.stages, plan.loads.value, plan.run, plan.look_back, plan.chunk_tiles == 1)
            variants.add((*kernel, 32 * plan.warps if plan.look_back else max(8, chunk_maps)))
    assert len(variants) <= 64


@pytest.mark.parametrize(
    ("T", "passes"),
    [(21, ["WHOLE"]), (5000, ["LOOK_BACK"]), (70000, ["SUMMARY", "APPLY"])],
    ids=["one tile", "chunks", "more chunks"],
)
def test_arguments_meet_their_parameters(monkeypatch, T, passes):
    """They are handed over by position, some sixty of them."""
    from vtrace_plugins._core import launch, ops

    if not launch.INTERPRETED:
        pytest.skip("what is recorded is launched nowhere")
    calls, kernel = [], launch.vtrace_kernel
    names = kernel.arg_names

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args, **options: calls.append(dict(zip(names, args, strict=True)))

    monkeypatch.setattr(launch, "vtrace_kernel", Recorder())
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(ops, "_launches", {})
    data = tensors(window(3, T), dtype=torch.float32)
    vtrace(**data, gamma=0.97, lam=0.9, rho_bar=1.1, c_bar=1.2, pg_rho_bar=1.3, backend="triton")
    plan = launch.choose(3, T, True, 132)
    wanted = {"gamma": 0.97, "lam": 0.9, "rho_bar": 1.1, "c_bar": 1.2, "pg_rho_bar": 1.3, "rows": 3, "T": T}
    wanted |= {"inner_size": 1, "chunk_tiles": plan.chunk_tiles, "BLOCK_ROWS": plan.block_rows, "LAMBDA_IS_ONE": False}
    wanted |= {"BLOCK_TIME": plan.block_time, "STAGES": plan.stages, "RUN": plan.run, "WEIGHTED": True}
    wanted |= {"ONE_TILE": plan.chunk_tiles == 1, "ROWS_FIRST": False, "mask": None, "step_gamma": None}
    for given in calls:
        assert {name: given[name] for name in wanted} == wanted
        assert 0x7FA1 << 16 < given["tag"] < 0x7FA2 << 16 if given["PASS"] == launch.LOOK_BACK else given["tag"] == 0
        assert given["LOADS"] == plan.loads and given["CONTINUATION"] == launch.BOOTSTRAP
        for name in ("log_pi", "log_mu", "values", "rewards", "terminated", "truncated"):
            assert given[name][0].data_ptr() == data[name].data_ptr(), name
        assert given["continuation"][0].data_ptr() == data["bootstrap_values"].data_ptr()
    assert [given["PASS"] for given in calls] == [getattr(launch, name) for name in passes]


def test_what_a_straight_launch_hands_to_triton():
    """``launch.straight`` calls what ``handle[grid]`` calls, with the same first arguments."""
    import inspect

    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler.compiler import CompiledKernel

    assert list(inspect.signature(CudaLauncher.__call__).parameters)[1:6] == [
        "gridX",
        "gridY",
        "gridZ",
        "stream",
        "function",
    ]
    source = " ".join(inspect.getsource(CompiledKernel.__getitem__).split())
    order = "stream, self.function, self.packed_metadata, launch_metadata, knobs.runtime.launch_enter_hook, "
    assert f"self.run(grid[0], grid[1], grid[2], {order}knobs.runtime.launch_exit_hook, *args)" in source
