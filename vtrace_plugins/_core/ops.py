"""The Triton kernel as a PyTorch operator, ``torch.ops.vtrace_plugins.vtrace``: eager, fake, autograd and vmap.

Registering it imports no triton; the first call does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vtrace_plugins._core.layout import on_time_first
from vtrace_plugins._core.torch_scan import vtrace_torch

_library = torch.library.Library("vtrace_plugins", "DEF")
_library.define(
    "vtrace(Tensor log_pi, Tensor log_mu, Tensor values, Tensor rewards, Tensor terminated, Tensor? truncated, "
    "Tensor? bootstrap_values, Tensor? last_value, Tensor? next_values, Tensor? mask, "
    # Each of these is a number or a tensor (then the number beside it is not read); gamma's has the data's shape.
    "Tensor? gamma_tensor, Tensor? rho_bar_tensor, Tensor? c_bar_tensor, Tensor? pg_rho_bar_tensor, "
    "float gamma, float rho_bar, float c_bar, float pg_rho_bar, "
    "float lam, bool weight_advantages, int time_dim) -> (Tensor, Tensor)"
)
_TENSORS = 14  # the first so many arguments are tensors or None
_SCALARS = range(11, 14)  # 0-d tensors among them


def vtrace_triton(
    log_pi: Tensor,
    log_mu: Tensor,
    values: Tensor,
    rewards: Tensor,
    terminated: Tensor,
    truncated: Tensor | None,
    bootstrap_values: Tensor | None,
    last_value: Tensor | None,
    next_values: Tensor | None,
    mask: Tensor | None,
    gamma: float | Tensor,
    rho_bar: float | Tensor,
    c_bar: float | Tensor,
    pg_rho_bar: float | Tensor,
    lam: float,
    weight_advantages: bool,
    time_dim: int,
) -> tuple[Tensor, Tensor]:
    """The operator's Python face, with the arguments of the other backends."""
    options = (gamma, rho_bar, c_bar, pg_rho_bar)
    result: tuple[Tensor, Tensor] = torch.ops.vtrace_plugins.vtrace.default(
        *(log_pi, log_mu, values, rewards, terminated, truncated),
        *(bootstrap_values, last_value, next_values, mask),
        *(x if isinstance(x, Tensor) else None for x in options),
        *(0.0 if isinstance(x, Tensor) else float(x) for x in options),
        *(float(lam), weight_advantages, time_dim),
    )
    return result


def _run(*arguments: Any) -> tuple[Tensor, Tensor]:
    from vtrace_plugins._core.launch import launch

    return launch(*arguments)


def empty_results(values: Tensor, time_dim: int) -> tuple[Tensor, Tensor]:
    """Uninitialised outputs in the layout of ``values``, as ``[outer, time, inner]`` views it where it can."""
    shape = values.shape
    folded = values.reshape(math.prod(shape[:time_dim]), shape[time_dim], math.prod(shape[time_dim + 1 :]))
    return torch.empty_like(folded).view(shape), torch.empty_like(folded).view(shape)


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    return empty_results(arguments[2], arguments[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS])
    ctx.options = inputs[_TENSORS:]


def _backward(ctx: Any, grad_targets: Tensor, grad_advantages: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient, by running the differentiable torch backend on the saved inputs: twice differentiable as well."""
    tensors, (*numbers, lam, weight_advantages, time_dim) = ctx.saved_tensors, ctx.options
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        options = [number if x is None else x for x, number in zip(tensors[10:], numbers, strict=True)]
        arguments: tuple[Any, ...] = (*tensors[:10], *options, lam, weight_advantages, time_dim)
        results = on_time_first(vtrace_torch, *arguments)
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[:_TENSORS]) if needed]
        found = torch.autograd.grad(
            results,
            [tensors[i] for i in wanted],
            (grad_targets, grad_advantages),
            create_graph=create_graph,
            allow_unused=True,
        )
    grads: list[Tensor | None] = [None] * (_TENSORS + len(ctx.options))
    for i, grad in zip(wanted, found, strict=True):
        grads[i] = grad
    return tuple(grads)


def _vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """One more batch dimension in front; what is not batched is expanded over it (a view)."""

    def batched(i: int, x: Any) -> Any:
        if x is None or i >= _TENSORS:
            return x
        if in_dims[i] is not None:
            if i in _SCALARS:
                raise NotImplementedError("vtrace under vmap: rho_bar, c_bar and pg_rho_bar cannot be batched")
            return x.movedim(in_dims[i], 0)
        return x if i in _SCALARS else x.expand(info.batch_size, *x.shape)

    *rest, time_dim = (batched(i, x) for i, x in enumerate(arguments))
    return torch.ops.vtrace_plugins.vtrace.default(*rest, time_dim + 1), (0, 0)


for _device in ("CUDA", "CPU"):  # on CPU tensors: triton's interpreter
    _library.impl("vtrace", _run, _device)
_NAME = "vtrace_plugins::vtrace"
torch.library.register_fake(_NAME, _fake, lib=_library)
torch.library.register_autograd(_NAME, _backward, setup_context=_save, lib=_library)
torch.library.register_vmap(_NAME, _vmap, lib=_library)
