"""Gradients: gradcheck in float64, ties at the clip, and NaN behind a cut."""

import pytest
import torch
from helpers import tensors, window

from vtrace_plugins import vtrace

FLOATS = ("log_pi", "log_mu", "values", "rewards", "bootstrap_values", "last_value", "next_values")


def leaves(data):
    return {k: x.clone().requires_grad_(k in FLOATS) for k, x in data.items()}


@pytest.mark.parametrize("continuation", ["bootstrap_values", "last_value", "next_values"])
@pytest.mark.parametrize("lam", [0.9, 1.0])
def test_gradcheck(on, continuation, lam):
    backend, device = on
    data = tensors(window(2, 6, continuation=continuation, masked=True, boundaries=0.2), device)
    names = [k for k in data if k in FLOATS]

    def function(*inputs):
        return tuple(
            vtrace(**data | dict(zip(names, inputs, strict=True)), gamma=0.9, c_bar=1.2, lam=lam, backend=backend)
        )

    fast = on == ("triton", "cpu")  # one random direction: the interpreter is slow, and test_adjoint has every entry
    assert torch.autograd.gradcheck(function, [data[k].requires_grad_() for k in names], fast_mode=fast)


def test_gradgradcheck(on):
    backend, device = on
    data = tensors(window(1, 4, boundaries=0.2), device)
    names = [k for k in data if k in FLOATS]

    def function(*inputs):
        return vtrace(**data | dict(zip(names, inputs, strict=True)), gamma=0.9, lam=0.9, backend=backend).targets

    fast = on == ("triton", "cpu")
    assert torch.autograd.gradgradcheck(function, [data[k].requires_grad_() for k in names], fast_mode=fast)


def test_per_step_gamma_has_a_gradient(on):
    backend, device = on
    data = tensors(window(2, 5), device)
    gamma = torch.full((2, 5), 0.9, dtype=torch.float64, device=device, requires_grad=True)
    fast = on == ("triton", "cpu")
    assert torch.autograd.gradcheck(lambda g: tuple(vtrace(**data, gamma=g, backend=backend)), [gamma], fast_mode=fast)


def test_at_the_clip_the_gradient_is_w_and_above_it_zero(on):
    """On-policy every ratio is a tie, w = bar = 1: as clamp_max, the gradient there is that of w."""
    backend, device = on
    one = torch.ones(1, 3, dtype=torch.float64, device=device)
    log_pi = torch.tensor([[0.0, 0.5, 1000.0]], dtype=torch.float64, device=device, requires_grad=True)
    result = vtrace(log_pi, 0 * one, one, 3 * one, one.bool(), last_value=one[:, 0], gamma=0.9, backend=backend)
    (grad,) = torch.autograd.grad(result.targets.sum(), log_pi)
    assert torch.equal(grad, torch.tensor([[2.0, 0.0, 0.0]], dtype=torch.float64, device=device))


def test_a_nan_behind_a_cut_reaches_no_gradient_before_it(on):
    backend, device = on
    data = tensors(window(1, 10, boundaries=0.0), device)
    data["truncated"][:, 4] = True
    clean = leaves(data)
    vtrace(**clean, gamma=0.9, backend=backend).targets[:, :5].sum().backward()
    for name in ("log_pi", "log_mu", "values", "rewards", "bootstrap_values"):
        data[name][:, 5:] = float("nan")
    dirty = leaves(data)
    vtrace(**dirty, gamma=0.9, backend=backend).targets[:, :5].sum().backward()
    for name in ("log_pi", "log_mu", "values", "rewards", "bootstrap_values"):
        assert torch.equal(clean[name].grad[:, :5], dirty[name].grad[:, :5]), name
        assert torch.isfinite(dirty[name].grad[:, :5]).all()


def test_nothing_is_kept_without_gradients(on):
    result = vtrace(**tensors(window(2, 5), on[1]), gamma=0.9, backend=on[0])
    assert result.targets.grad_fn is None and not result.advantages.requires_grad


def plain(device, **more):
    """A window that asks for a gradient by its values only."""
    data = tensors(window(2, 6), device, torch.float32) | more
    return data | {"values": data["values"].requires_grad_()}


def test_flags_have_no_gradient(on):
    backend, device = on
    data = plain(device, terminated=torch.zeros(2, 6, device=device, requires_grad=True))
    for _ in range(2):
        vtrace(**data, gamma=0.9, backend=backend).targets.sum().backward()
    assert data["terminated"].grad is None


def test_the_gradient_at_and_above_a_clip_under_vmap(on):
    backend, device = on
    if backend == "triton":
        pytest.skip("takes no batch of clips")
    one = torch.ones(1, 3, dtype=torch.float64, device=device)
    log_pi = torch.tensor([[[0.0, 0.5, 1000.0]]], dtype=torch.float64, device=device, requires_grad=True)

    def targets(log_pi, bar):
        options = {"last_value": one[:, 0], "gamma": 0.9, "rho_bar": bar, "c_bar": bar, "backend": backend}
        return vtrace(log_pi, 0 * one, one, 3 * one, one.bool(), **options).targets

    for bars in (torch.ones(1, dtype=torch.float64, device=device), None):
        bar = 1.0 if bars is None else bars
        result = torch.func.vmap(targets, in_dims=(0, None if bars is None else 0))(log_pi, bar)
        (grad,) = torch.autograd.grad(result.sum(), log_pi)
        assert grad.flatten().tolist() == [2.0, 0.0, 0.0]


def test_no_tangent_is_dropped_under_a_compiler(on):
    """Forward mode is right, or says that it is not there."""
    backend, device = on
    data = tensors(window(2, 6), device, torch.float32)
    values = data.pop("values")

    def tangent(values, backend):
        call = lambda values: tuple(vtrace(values=values, **data, gamma=0.9, backend=backend))  # noqa: E731
        return torch.func.jvp(call, (values,), (torch.ones_like(values),))[1]

    try:
        found = torch.compile(lambda values: tangent(values, backend), backend="eager")(values)
    except NotImplementedError:
        assert backend == "triton"
    else:
        torch.testing.assert_close(found, tangent(values, "reference"))


def test_checkpointed(on):
    """The recomputation, a later call of its kind, must save what the first one saved."""
    from torch.utils.checkpoint import checkpoint

    backend, device = on
    data = plain(device, gamma=torch.tensor(0.9, device=device))
    result = checkpoint(lambda: vtrace(**data, backend=backend).targets, use_reentrant=False)
    (grad,) = torch.autograd.grad(result.sum(), data["values"])
    (wanted,) = torch.autograd.grad(vtrace(**data, backend=backend).targets.sum(), data["values"])
    assert torch.equal(grad, wanted)


def test_data_made_in_inference_mode(on):
    backend, device = on
    usual = torch.arange(6.0, device=device).expand(2, 6)  # whose copy has other strides
    with torch.inference_mode():
        inferred = usual.clone()[:1].expand(2, 6)
    found = []
    for rewards in (usual, inferred, inferred):
        data = plain(device, rewards=rewards)
        result = vtrace(**data, gamma=0.9, backend=backend)
        found.append((*result, *torch.autograd.grad(sum(x.sum() for x in result), data["values"])))
    for later in found[1:]:
        for x, wanted in zip(later, found[0], strict=True):
            torch.testing.assert_close(x, wanted)


def test_no_data_has_a_gradient_too(on):
    backend, device = on
    log_pi = torch.zeros(0, 6, device=device, requires_grad=True)
    none = torch.zeros(0, 6, device=device)
    result = vtrace(log_pi, none, none, none, none.bool(), next_values=none, gamma=0.9, backend=backend)
    result.targets.sum().backward()
    assert log_pi.grad.shape == (0, 6)


@pytest.mark.parametrize("lam", [0.9, 1.0])
@pytest.mark.parametrize("continuation", ["bootstrap_values", "next_values"])
def test_nothing_in_the_padding_reaches_a_result_or_a_gradient(on, continuation, lam):
    """NaN in every input there, gamma included: the numbers of clean padding, and gradients of 0 in it. Padding lies
    behind a window, before one and between two."""
    backend, device = on
    data = tensors(window(3, 8, continuation=continuation, boundaries=0.0), device)
    data["gamma"] = torch.full((3, 8), 0.9, dtype=torch.float64, device=device)
    mask = [[1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0, 0, 1]]
    data["mask"] = torch.tensor(mask, dtype=torch.bool, device=device)
    padding = ~data["mask"]
    found = []
    for poison in (0.5, float("nan")):
        filled = {k: x.masked_fill(padding, poison) if x.is_floating_point() else x for k, x in data.items()}
        given = {k: x.requires_grad_(x.is_floating_point()) for k, x in filled.items()}
        result = vtrace(**given, lam=lam, backend=backend)
        names = [k for k, x in given.items() if x.requires_grad]
        grads = torch.autograd.grad(sum(x.square().sum() for x in result), [given[k] for k in names])
        assert all((x[padding] == 0).all() for x in (*result, *grads))
        found.append((*result, *grads))
    for clean, poisoned in zip(*found, strict=True):
        assert torch.equal(clean, poisoned)
