"""torch.compile, torch.func.vmap, threads, processes and CUDA graphs."""

from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from helpers import tensors, window
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx

from vtrace_plugins import VTraceError, vtrace
from vtrace_plugins.diagnostics import importance

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled there, where the tensors must be")


def inputs(on, rows=3, T=None, dtype=torch.float32, **kwargs):
    """Few steps for the reference, whose loop a compiler unrolls."""
    T = T or (3 if on[0] == "reference" else 12)
    return tensors(window(rows, T, **kwargs), on[1], dtype)


@pytest.mark.parametrize(
    ("masked", "dynamic"),
    [
        (True, True),
        (False, False),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compile_fullgraph(on, masked, dynamic):
    torch.compiler.reset()  # the lambda counts as one function however often it is compiled
    data = inputs(on, masked=masked)
    compiled = torch.compile(
        lambda data: vtrace(**data, gamma=0.97, backend=on[0]), fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    for x, y in zip(compiled(data), vtrace(**data, gamma=0.97, backend=on[0]), strict=True):
        torch.testing.assert_close(x, y)


ANNEALED = (0.95, 0.9, 0.8, 0.7)
WINDOW = tensors(window(2, 3, continuation="last_value"), dtype=torch.float32)
COMPILED = {
    "every number of vtrace": lambda x, backend: vtrace(
        **WINDOW, gamma=x, lam=x, rho_bar=x, c_bar=x, pg_rho_bar=x, backend=backend
    ),
    "one clip, and the caller's own arithmetic": lambda x, backend: [
        x * y for y in vtrace(**WINDOW, gamma=0.9, rho_bar=1 + x, backend=backend)
    ],
    "importance": lambda x, backend: importance(WINDOW["log_pi"], WINDOW["log_mu"], rho_bar=x, c_bar=x, lam=x),
    "importance, one clip": lambda x, backend: importance(WINDOW["log_pi"], WINDOW["log_mu"], c_bar=x),
}


@pytest.mark.parametrize(
    ("what", "backend"),
    [
        ("every number of vtrace", "torch"),
        pytest.param("every number of vtrace", "reference", marks=pytest.mark.slow),
        pytest.param("every number of vtrace", "triton", marks=interpreted),
        ("one clip, and the caller's own arithmetic", "torch"),
        ("importance", None),
        pytest.param("importance, one clip", None, marks=pytest.mark.slow),
    ],
)
def test_numbers_that_change_from_call_to_call(what, backend, monkeypatch, tmp_path):
    """Inductor (not aot_eager) kept a changing clip at its second value, silently: pytorch#194976. With its caches, in
    a folder of their own: without them it does not, and the usual ones carry what was wrong into later processes."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    compiled = torch.compile(COMPILED[what])
    for x in ANNEALED:
        torch.testing.assert_close(
            torch.stack(tuple(compiled(x, backend))), torch.stack(tuple(COMPILED[what](x, backend)))
        )


def test_compiled_gradients(on):
    data = inputs(on)
    data["values"].requires_grad_()
    data["log_pi"].requires_grad_()

    def loss(data):
        result = vtrace(**data, gamma=0.97, backend=on[0])
        return result.targets.square().sum() + result.advantages.sum()

    wanted = torch.autograd.grad(loss(data), [data["values"], data["log_pi"]])
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for x, y in zip(torch.autograd.grad(compiled(data), [data["values"], data["log_pi"]]), wanted, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("time_dim", [0, 1, -1])
def test_vmap(on, time_dim):
    data = {k: x.view(4, 3, 12) for k, x in inputs(on, rows=12, T=12).items()}
    data["mask"] = torch.ones(3, 12, dtype=torch.bool, device=on[1])  # shared by the whole batch
    dims = {k: None if k == "mask" else 0 for k in data}
    moved = {k: x.movedim(-1, x.ndim - 2 + time_dim % 2) for k, x in data.items()}
    result = torch.func.vmap(
        lambda data: tuple(vtrace(**data, gamma=0.97, time_dim=time_dim, backend=on[0])), in_dims=(dims,)
    )(moved)
    whole = {k: x.expand(4, 3, 12) for k, x in data.items()}
    for x, y in zip(result, vtrace(**whole, gamma=0.97, backend=on[0]), strict=True):
        torch.testing.assert_close(x.movedim(1 + time_dim % 2, -1), y)


def test_vmapped_flags_alone(on):
    """Only a flag is batched: what is shared must still be expanded over the batch."""
    data = inputs(on, rows=1, T=12, continuation="next_values")
    flags = torch.rand(5, 1, 12, device=on[1]) < 0.3
    shared = {k: x for k, x in data.items() if k != "truncated"}
    result = torch.func.vmap(lambda f: vtrace(**shared, truncated=f, gamma=0.97, backend=on[0]).targets)(flags)
    for row, flag in zip(result, flags, strict=True):
        torch.testing.assert_close(row, vtrace(**shared, truncated=flag, gamma=0.97, backend=on[0]).targets)


@pytest.mark.parametrize("transform", ["grad", "jacrev", "vmap of grad"])
def test_torch_func(on, transform):
    data = inputs(on, dtype=torch.float64)

    def loss(values, rewards=data["rewards"]):
        return vtrace(**data | {"values": values, "rewards": rewards}, gamma=0.97, backend=on[0]).targets.square().sum()

    values = data["values"].clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(values), values)
    if transform == "vmap of grad":
        rewards = torch.stack([data["rewards"], 2 * data["rewards"]])
        result = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(data["values"], rewards)[0]
    else:
        result = getattr(torch.func, transform)(loss)(data["values"])
    torch.testing.assert_close(result, wanted)


def test_forward_mode_is_right_or_refused(on):
    """Never silently zero: the reference differentiates forward, the others say that they do not."""
    data = inputs(on, dtype=torch.float64)

    def targets(rewards):
        return vtrace(**data | {"rewards": rewards}, gamma=0.97, backend=on[0]).targets

    direction = torch.ones_like(data["rewards"])
    if on[0] != "reference":
        with pytest.raises(NotImplementedError, match="jvp"):
            torch.func.jvp(targets, (data["rewards"],), (direction,))
        return
    _, tangent = torch.func.jvp(targets, (data["rewards"],), (direction,))
    torch.testing.assert_close(tangent, targets(data["rewards"] + direction) - targets(data["rewards"]))


def test_results_may_be_edited_in_place(on):
    data = inputs(on, continuation="last_value")
    data = {k: x if k == "last_value" else x.T.contiguous().T for k, x in data.items()}
    data["values"].requires_grad_()
    result = vtrace(**data, gamma=0.97, backend=on[0])
    advantages = result.advantages
    advantages -= advantages.mean()
    advantages.square().sum().backward()
    assert torch.isfinite(data["values"].grad).all()


def test_the_operator_passes_opcheck(on):
    backend, _ = on
    if backend != "triton":
        pytest.skip("the operator is the triton backend's")
    data = inputs(on)
    arguments = (
        *(data[k] for k in ("log_pi", "log_mu", "values", "rewards", "terminated", "truncated", "bootstrap_values")),
        *(None,) * 7,
        *(0.97, 1.0, 1.0, 1.0, 1.0, True, 1),
    )
    torch.library.opcheck(torch.ops.vtrace_plugins.vtrace.default, arguments)
    wanted = [data[k].requires_grad_() for k in ("log_pi", "values", "rewards")]
    torch.library.opcheck(torch.ops.vtrace_plugins.vtrace.default, arguments)
    assert all(x.requires_grad for x in wanted)


def test_compiled_over_memory_that_is_no_view_of_rows(on):
    x = torch.randn(5, 3, 2, device=on[1]).transpose(1, 2)

    def targets(x):
        return vtrace(x, x, x, x, x > 9, bootstrap_values=x, gamma=0.9, time_dim=0, backend=on[0]).targets

    torch.testing.assert_close(torch.compile(targets, backend="eager")(x), targets(x))


def test_dispatch_modes_see_the_call(on):
    """Fake tensors, flop counters and tracers work at any call, not only under torch.compile."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    data = inputs(on)
    with FakeTensorMode() as mode:
        fake = {k: mode.from_tensor(x) for k, x in data.items()}
        result = vtrace(**fake, gamma=0.97, backend=on[0])
    assert result.targets.shape == data["values"].shape and result.targets.device == data["values"].device


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_one_compilation_serves_all_shapes(backend, device):
    on = (backend, device)
    counter = CompileCounter()

    def loss(data):
        result = vtrace(**data, gamma=0.97, backend=on[0])
        return result.targets.square().sum() + result.advantages.sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=counter)
    for rows, T in ((3, 12), (4, 13), (5, 40), (2, 9), (2, 50)):
        data = inputs(on, rows, T, dtype=torch.float64)
        torch.testing.assert_close(compiled(data), loss(data))
        data["values"].requires_grad_()
        wanted = torch.autograd.grad(loss(data), data["values"])
        torch.testing.assert_close(torch.autograd.grad(compiled(data), data["values"]), wanted)
    assert counter.frame_count == 2  # with and without a gradient


def test_the_torch_backends_scan_passes_opcheck():
    a, b, cut = torch.randn(12, 3), torch.rand(12, 3), torch.rand(12, 3) < 0.2
    cut[-1] = True
    operator = torch.ops.vtrace_plugins.linear_scan.default
    torch.library.opcheck(operator, (a, b, cut))
    torch.library.opcheck(operator, tuple(x.t().contiguous().t() for x in (a, b, cut)))


def test_vmap_under_a_compiler():
    data = {k: x.view(4, 3, 12) for k, x in inputs(("torch", "cpu"), rows=12).items()}
    data["log_mu"] = data["log_mu"][0]  # not batched

    def function(data):
        dims = {k: None if k == "log_mu" else 0 for k in data}
        return torch.func.vmap(lambda data: tuple(vtrace(**data, gamma=0.97)), in_dims=(dims,))(data)

    for x, y in zip(torch.compile(function, fullgraph=True, backend="aot_eager")(data), function(data), strict=True):
        torch.testing.assert_close(x, y)


def test_autocast_changes_nothing(on):
    data = inputs(on)
    wanted = vtrace(**data, gamma=0.97, backend=on[0])
    with torch.autocast(on[1], dtype=torch.bfloat16):
        found = vtrace(**data, gamma=0.97, backend=on[0])
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_deterministic_algorithms(on):
    """Nothing in here needs an algorithm that torch cannot promise, in either direction."""
    data = inputs(on)
    data["values"].requires_grad_()
    wanted = vtrace(**data, gamma=0.97, backend=on[0])
    torch.use_deterministic_algorithms(True)
    try:
        result = vtrace(**data, gamma=0.97, backend=on[0])
        result.advantages.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(result, wanted, strict=True))


@pytest.mark.parametrize("on", [("torch", "cpu"), pytest.param(("triton", "cuda"), marks=pytest.mark.gpu)])
def test_threads(on):
    """Many shapes at once, each again and again: prepared launches and their compilation are shared."""
    shapes = [(rows, T) for rows in (1, 3, 16) for T in (1, 7, 50)]
    wanted = {shape: vtrace(**inputs(on, *shape), gamma=0.97, backend=on[0]) for shape in shapes}

    def run(shape):
        for _ in range(20):
            result = vtrace(**inputs(on, *shape), gamma=0.97, backend=on[0])
            if not all(torch.equal(x, y) for x, y in zip(result, wanted[shape], strict=True)):
                return False
        return True

    with ThreadPoolExecutor(9) as pool:
        assert all(pool.map(run, shapes))


def _sum_of_targets(_):
    torch.set_num_threads(1)
    return vtrace(**inputs(("torch", "cpu")), gamma=0.97, backend="torch").targets.sum().item()


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes(start):
    """As collectors start them; a forked one inherits what is prepared already."""
    wanted = vtrace(**inputs(("torch", "cpu")), gamma=0.97, backend="torch").targets.sum().item()
    with get_context(start).Pool(2) as pool:
        assert pool.map(_sum_of_targets, range(4)) == pytest.approx([wanted] * 4)


triton_only = pytest.mark.parametrize(
    "on", [("triton", "cpu"), pytest.param(("triton", "cuda"), marks=pytest.mark.gpu)]
)


class TestThePreparedLaunch:
    """A call like an earlier one skips checks and dispatcher: never one that is not like it."""

    @triton_only
    def test_time_dim_as_a_tensor(self, on):
        data = inputs(on, 6, 6)
        for time_dim in (0, 1, 0):
            found = vtrace(**data, gamma=0.97, time_dim=torch.tensor(time_dim), backend=on[0])
            wanted = vtrace(**data, gamma=0.97, time_dim=time_dim, backend="reference")
            torch.testing.assert_close(found, wanted)
        with pytest.raises(VTraceError, match="time_dim: expected a dimension"):
            vtrace(**data, gamma=0.97, time_dim=torch.tensor(9), backend=on[0])

    @triton_only
    def test_tensors_whose_memory_is_not_their_numbers(self, on):
        data = inputs(on)
        wanted = vtrace(**data, gamma=0.97, backend="reference")
        negated = torch.complex(torch.zeros_like(data["values"]), -data["values"]).conj().imag
        assert negated.is_neg()
        zeros = torch._efficientzerotensor(data["rewards"].shape, device=on[1])
        no_rewards = vtrace(**data | {"rewards": torch.zeros_like(zeros)}, gamma=0.97, backend="reference")
        for _ in range(2):
            torch.testing.assert_close(vtrace(**data | {"values": negated}, gamma=0.97, backend=on[0]), wanted)
            torch.testing.assert_close(vtrace(**data | {"rewards": zeros}, gamma=0.97, backend=on[0]), no_rewards)
            torch.testing.assert_close(vtrace(**data, gamma=0.97, backend=on[0]), wanted)

    @triton_only
    @pytest.mark.filterwarnings("ignore")
    def test_tracers_record_the_operator(self, on):
        data = inputs(on)
        vtrace(**data, gamma=0.97, backend=on[0])

        def call(values):
            return vtrace(**data | {"values": values}, gamma=0.97, backend=on[0]).targets

        traced = torch.jit.trace(call, data["values"], check_trace=False)
        assert "vtrace_plugins::vtrace" in str(traced.graph)
        torch.testing.assert_close(traced(2 * data["values"]), call(2 * data["values"]))
        graph = make_fx(call, pre_dispatch=True)(data["values"])
        assert "vtrace_plugins" in graph.code
        torch.testing.assert_close(graph(2 * data["values"]), call(2 * data["values"]))

    @triton_only
    def test_function_modes_see_the_call(self, on):
        from torch.overrides import TorchFunctionMode

        seen = []

        class Mode(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                seen.append(str(function))
                return function(*args, **kwargs or {})

        data = inputs(on)
        vtrace(**data, gamma=0.97, backend=on[0])
        with Mode():
            vtrace(**data, gamma=0.97, backend=on[0])
        assert any("vtrace_plugins" in name for name in seen)

    @triton_only
    def test_the_operator_itself_prepares_nothing_for_the_function(self, on):
        data = inputs(on)
        names = ("log_pi", "log_mu", "values", "rewards", "terminated", "truncated", "bootstrap_values")
        given = (*(data[k] for k in names), *(None,) * 7, *(7.0, 1.0, 1.0, 1.0, 1.0, True, 1))
        torch.ops.vtrace_plugins.vtrace.default(*given)
        with pytest.raises(VTraceError, match="gamma: expected"):
            vtrace(**data, gamma=7.0, rho_bar=1.0, c_bar=1.0, pg_rho_bar=1.0, time_dim=1, backend=on[0])


def test_batched_gradients(on):
    data = inputs(on, dtype=torch.float64)
    data["values"].requires_grad_()
    targets = vtrace(**data, gamma=0.97, backend=on[0]).targets
    directions = torch.eye(targets.numel(), device=on[1], dtype=torch.float64).view(-1, *targets.shape)[:5]
    batched = torch.autograd.grad(targets, data["values"], directions, is_grads_batched=True, retain_graph=True)[0]
    for direction, found in zip(directions, batched, strict=True):
        (wanted,) = torch.autograd.grad(targets, data["values"], direction, retain_graph=True)
        torch.testing.assert_close(found, wanted)


@pytest.mark.gpu
def test_another_stream():
    data = inputs(("triton", "cuda"), rows=64, T=100)
    wanted = vtrace(**data, gamma=0.97)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        result = vtrace(**data, gamma=0.97)
    stream.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(result, wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("T", [100, 5000])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_cuda_graph(backend, T):
    data = inputs((backend, "cuda"), rows=64, T=T)
    vtrace(**data, gamma=0.97, backend=backend)  # compiles outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = vtrace(**data, gamma=0.97, backend=backend)
    data["rewards"].normal_()
    graph.replay()
    for x, y in zip(result, vtrace(**data, gamma=0.97, backend=backend), strict=True):
        assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [100, 5000])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_compiled_into_cuda_graphs(backend, T):
    data = inputs((backend, "cuda"), rows=64, T=T)
    compiled = torch.compile(
        lambda data: tuple(vtrace(**data, gamma=0.97, backend=backend)), fullgraph=True, mode="reduce-overhead"
    )
    for _ in range(3):  # warm-up, capture, replay
        torch.compiler.cudagraph_mark_step_begin()
        found = [x.clone() for x in compiled(data)]
    for x, y in zip(found, vtrace(**data, gamma=0.97, backend=backend), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_nothing_waits_for_the_gpu(backend):
    data = inputs(("", "cuda"), rows=64, T=100, masked=True)
    options = {k: torch.tensor(x, device="cuda") for k, x in {"gamma": 0.97, "rho_bar": 1.0, "c_bar": 1.0}.items()}
    vtrace(**data, **options, backend=backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        vtrace(**data, **options, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "name", ["gamma", "rho_bar", "c_bar", "pg_rho_bar", "log_pi", "values", "rewards", "terminated"]
)
def test_a_second_call_of_the_same_kind_has_its_own_data(on, name):
    """Nothing of the first call is kept in what is prepared for its kind: no tensor, be it an option's or data."""
    data = inputs(on, T=7, boundaries=0.3) | {"gamma": torch.tensor(0.9, device=on[1])}
    data |= {bar: torch.tensor(1.0, device=on[1]) for bar in ("rho_bar", "c_bar", "pg_rho_bar")}
    vtrace(**data, backend=on[0])
    x = data[name]
    other = ~x if x.dtype == torch.bool else 0.5 * x
    result = vtrace(**data | {name: other}, backend=on[0])
    wanted = vtrace(**data | {name: other}, backend="reference")
    before = vtrace(**data, backend="reference")
    torch.testing.assert_close(tuple(result), tuple(wanted))
    assert not all(torch.equal(x, y) for x, y in zip(wanted, before, strict=True)), "data that cannot tell"


@pytest.mark.parametrize(
    ("option", "good", "wrong"),
    [
        ("weight_advantages", True, 1),
        ("weight_advantages", False, 0),
        ("lam", 1.0, True),
        ("gamma", 1.0, True),
        ("rho_bar", 1.0, True),
        ("c_bar", 1, True),
        ("pg_rho_bar", 1.0, True),
        ("time_dim", 1, True),
    ],
)
def test_a_wrong_option_that_equals_a_right_one(on, option, good, wrong):
    """1 == True to Python, and to a dict of the calls that were right before."""
    data = inputs(on, T=5)
    for _ in range(2):
        vtrace(**{"gamma": 0.9} | data | {option: good}, backend=on[0])
        with pytest.raises(VTraceError, match=f"^{option}: expected"):
            vtrace(**{"gamma": 0.9} | data | {option: wrong}, backend=on[0])
