"""The fused gradient against autograd through the torch backend, which gradcheck holds."""

import pytest
import torch
from helpers import TOLERANCE, tensors, window

from vtrace_plugins import vtrace

on = pytest.mark.parametrize(
    "on", [("triton", "cpu"), pytest.param(("triton", "cuda"), marks=pytest.mark.gpu)], ids=lambda on: on[1]
)
PLANS = {
    "one tile": (2, 32, 1, 1),
    "tiles": (4, 8, 1, 100),
    "chunks": (4, 8, 1, 1),
    "chunks of two": pytest.param((4, 8, 1, 2), marks=pytest.mark.slow),
}
CLIPS = {"rho_bar": 1.3, "c_bar": 0.9, "pg_rho_bar": 2.0}


@pytest.fixture(params=PLANS.values(), ids=PLANS)
def plan(request, monkeypatch):
    from vtrace_plugins._core import launch, ops

    monkeypatch.setattr(launch, "choose", lambda *_: launch.Plan(*request.param))
    monkeypatch.setattr(ops, "_launches", {})


def gradients(backend, data, only=("targets", "advantages"), **options):
    """Of a loss with random weights, by every floating input; of a second call, which takes the short way."""
    options = {"gamma": 0.97, **options}
    if "gamma" in data:
        del options["gamma"]
    leaves = {k: x.detach().requires_grad_(x.is_floating_point()) for k, x in data.items()}
    for _ in range(2 if backend == "triton" else 1):
        result = vtrace(**leaves, **options, backend=backend)
    torch.manual_seed(0)
    weights = torch.randn(result.targets.shape, dtype=torch.float64).to(result.targets)
    loss = sum((getattr(result, name) * weights).sum() for name in only)
    wanted = [x for x in leaves.values() if x.requires_grad]
    found = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    return dict(zip((k for k, x in leaves.items() if x.requires_grad), found, strict=True))


def assert_same(actual, expected, tolerance=None):
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        y = expected[name].double()
        assert x.isfinite().all(), name
        error = (x.double() - y).abs() / y.abs().max().clamp(min=1.0)
        assert error.max() <= (tolerance or 4 * TOLERANCE[x.dtype]), (name, error.max().item())


@on
@pytest.mark.parametrize("lam", [0.9, pytest.param(1.0, marks=pytest.mark.slow)])  # 1 in the tests below
@pytest.mark.parametrize(
    ("continuation", "masked"), [("bootstrap_values", True), ("last_value", False), ("next_values", True)]
)
def test_all_inputs(on, plan, continuation, masked, lam):
    data = tensors(window(3, 21, continuation=continuation, masked=masked), on[1])
    for weighted, by_step in ((True, True), (False, False)):
        if by_step:
            data["gamma"] = torch.rand(3, 21, dtype=torch.float64, device=on[1])
        options = CLIPS | {"lam": lam, "weight_advantages": weighted}
        assert_same(gradients("triton", data, **options), gradients("torch", data, **options))


@on
@pytest.mark.parametrize("only", ["targets", "advantages"])
def test_a_loss_on_one_of_the_results(on, plan, only):
    data = tensors(window(3, 21), on[1])
    assert_same(gradients("triton", data, (only,)), gradients("torch", data, (only,)))


@on
def test_on_policy_every_ratio_is_at_its_clip(on, plan):
    data = tensors(window(3, 21, off_policy=0.0), on[1])
    found = gradients("triton", data)
    assert found["log_pi"].abs().max() > 0.1
    assert_same(found, gradients("torch", data))


@on
@pytest.mark.parametrize("time_dim", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_layouts(on, plan, time_dim):
    """Agents inside, time first or last, each input with strides of its own."""
    data = {k: x.view(2, 3, 21).movedim(2, time_dim) for k, x in tensors(window(6, 21), on[1]).items()}
    data["rewards"] = data["rewards"].clone(memory_format=torch.contiguous_format)
    data["log_mu"] = data["log_mu"].select(time_dim, 0).unsqueeze(time_dim).expand_as(data["rewards"])
    found, wanted = (gradients(backend, data, time_dim=time_dim) for backend in ("triton", "torch"))
    assert_same(found, wanted)


@on
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)
def test_dtypes(on, plan, dtype):
    data = tensors(window(3, 21), on[1], dtype)
    exact = gradients("torch", {k: x.double() if x.is_floating_point() else x for k, x in data.items()})
    found = gradients("triton", data)
    assert all(x.dtype == dtype for x in found.values())
    assert_same(found, exact)


@on
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_large_values_in_half_precision(on, dtype):
    """What the trace carries is small beside them: not to be taken from rounded targets."""
    data = tensors(window(2, 32, continuation="last_value"), on[1], torch.float32)
    data["values"] = (data["values"] + 1000).to(dtype)
    data["rewards"], data["last_value"] = data["rewards"] + 10, data["last_value"] + 1000
    found, wanted = (gradients(backend, data, lam=0.95, c_bar=2.0, rho_bar=2.0) for backend in ("triton", "torch"))
    for name in ("log_pi", "log_mu"):
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-3, atol=1e-3 * wanted[name].abs().max().item())


@on
@pytest.mark.parametrize("only", ["targets", "advantages"])
def test_infinite_ratios_and_next_values_where_they_do_not_count(on, only):
    data = tensors(window(2, 9, continuation="next_values", boundaries=0.0), on[1])
    if only == "targets":
        data["log_pi"][:, 4] = 1000.0
    else:
        data["next_values"][:, 0] = float("inf")
        data["log_pi"][:, 0] = data["log_mu"][:, 0] + 0.5  # above rho_bar, below pg_rho_bar
    options = {"rho_bar": 0.5, "c_bar": 0.5, "pg_rho_bar": float("inf") if only == "targets" else 2.0}
    found, wanted = (gradients(backend, data, (only,), **options) for backend in ("triton", "torch"))
    for name in found:
        torch.testing.assert_close(found[name], wanted[name])


@on
def test_mixed_dtypes(on):
    data = tensors(window(3, 21), on[1], torch.float32)
    data["values"], data["rewards"] = data["values"].half(), data["rewards"].double()
    found = gradients("triton", data)
    assert all(found[name].dtype == data[name].dtype for name in found)
    assert_same(found, gradients("torch", data), 4 * TOLERANCE[torch.float16])


@on
def test_a_nan_in_one_episode_changes_no_gradient_of_another(on, plan):
    data = tensors(window(2, 21, boundaries=0.0), on[1])
    data["truncated"][:, 9] = True
    clean = gradients("triton", data)
    for there in (slice(0, 10), slice(10, 21)):
        other = slice(10, 21) if there.start == 0 else slice(0, 10)
        dirty = {k: x.clone() for k, x in data.items()}
        for name in ("log_pi", "log_mu", "values", "rewards", "bootstrap_values"):
            dirty[name][0, there] = float("nan")
        for name, x in gradients("triton", dirty).items():
            assert torch.equal(x[0, other], clean[name][0, other]), name
            assert torch.equal(x[1], clean[name][1]), name


@on
def test_no_gradient_is_left_unwritten(on, plan, monkeypatch):
    """They are NaN-poisoned before the kernel: what it does not write shows."""
    empty, empty_strided = torch.empty, torch.empty_strided

    def poisoned(function):
        def allocate(*args, **kwargs):
            x = function(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() and not x.is_meta else x

        return allocate

    cases = [tensors(window(rows, T, masked=True), on[1]) for rows, T in [(1, 1), (3, 11)]]
    cases.append(tensors(window(3, 9, continuation="last_value"), on[1]))
    monkeypatch.setattr(torch, "empty", poisoned(empty))
    monkeypatch.setattr(torch, "empty_strided", poisoned(empty_strided))
    for data in cases:
        assert all(x.isfinite().all() for x in gradients("triton", data).values())


@on
def test_nothing_but_what_is_wanted_is_computed(on, monkeypatch):
    from vtrace_plugins._core import adjoint_launch

    seen = []
    real = adjoint_launch.gradients
    monkeypatch.setattr(adjoint_launch, "gradients", lambda *args: seen.append(args[-1]) or real(*args))
    data = tensors(window(3, 21), on[1])
    vtrace(**data, gamma=0.97, backend="triton")
    data["values"].requires_grad_()
    vtrace(**data, gamma=0.97, backend="triton").targets.sum().backward()
    assert seen == [["values"]]


@on
def test_a_0d_gamma(on):
    """Its gradient is summed, also in a call that passes by the checks."""
    data = tensors(window(3, 21), on[1])
    data["gamma"] = torch.tensor(0.9, dtype=torch.float64, device=on[1])
    found = gradients("triton", data)
    assert found["gamma"].shape == ()
    assert_same(found, gradients("torch", data))


@on
def test_the_operator_passes_opcheck(on):
    data = tensors(window(3, 12), on[1])
    targets = vtrace(**data, gamma=0.97, backend="triton").targets
    names = ("log_pi", "log_mu", "values", "rewards", "terminated", "truncated", "bootstrap_values")
    given = (*(data[name] for name in names), *(None,) * 7, *(0.97, 1.0, 1.0, 1.0, 1.0, True, 1))
    backward = torch.ops.vtrace_plugins.vtrace_backward.default
    torch.library.opcheck(backward, (targets, None, targets, [0, 2, 6], *given))
    torch.library.opcheck(backward, (targets, targets, targets, [], *given))


@pytest.mark.gpu
@pytest.mark.parametrize("time_first", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (70, 33), (5, 2049), (2, 70_001), (1000, 130), (300, 700)], ids=str)
def test_the_plans_chosen(shape, time_first):
    data = tensors(window(*shape, boundaries=0.01, masked=True), "cuda", torch.float32)
    if time_first:
        data = {k: x.t().contiguous() for k, x in data.items()}
    time_dim = 0 if time_first else 1
    exact = gradients(
        "torch", {k: x.double() if x.is_floating_point() else x for k, x in data.items()}, time_dim=time_dim
    )
    found = gradients("triton", data, time_dim=time_dim)
    assert_same(found, exact, 1e-5)
    for name, x in gradients("triton", data, time_dim=time_dim).items():
        assert torch.equal(x, found[name]), "not the same from run to run"


@pytest.mark.gpu
def test_a_captured_backward():
    data = tensors(window(64, 100), "cuda", torch.float32)
    data["values"].requires_grad_()
    weights = torch.randn(64, 100, device="cuda")

    def step():
        result = vtrace(**data, gamma=0.97)
        return torch.autograd.grad(result.targets, data["values"], weights)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        data["rewards"].normal_()
        data["log_pi"].normal_()
    graph.replay()
    assert torch.equal(found, step())
