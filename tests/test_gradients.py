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

    assert torch.autograd.gradcheck(function, [data[k].requires_grad_() for k in names])


def test_gradgradcheck(on):
    backend, device = on
    data = tensors(window(1, 4, boundaries=0.2), device)
    names = [k for k in data if k in FLOATS]

    def function(*inputs):
        return vtrace(**data | dict(zip(names, inputs, strict=True)), gamma=0.9, lam=0.9, backend=backend).targets

    assert torch.autograd.gradgradcheck(function, [data[k].requires_grad_() for k in names])


def test_per_step_gamma_has_a_gradient(on):
    backend, device = on
    data = tensors(window(2, 5), device)
    gamma = torch.full((2, 5), 0.9, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda g: tuple(vtrace(**data, gamma=g, backend=backend)), [gamma])


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
