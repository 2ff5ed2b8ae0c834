"""The Triton kernel as a PyTorch operator, ``torch.ops.vtrace_plugins.vtrace``: eager, fake, autograd and vmap.

Registering it imports no triton; the first call does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from vtrace_plugins._core.inputs import Inputs
from vtrace_plugins._core.layout import empty_results, on_time_first
from vtrace_plugins._core.torch_scan import vtrace_torch

_library = torch.library.Library("vtrace_plugins", "DEF")
_library.define(
    "vtrace(Tensor log_pi, Tensor log_mu, Tensor values, Tensor rewards, Tensor terminated, Tensor? truncated, "
    "Tensor? bootstrap_values, Tensor? last_value, Tensor? next_values, Tensor? mask, "
    # Each of these is a tensor, or None and the number below counts.
    "Tensor? gamma_tensor, Tensor? rho_bar_tensor, Tensor? c_bar_tensor, Tensor? pg_rho_bar_tensor, "
    "float gamma, float rho_bar, float c_bar, float pg_rho_bar, "
    "float lam, bool weight_advantages, int time_dim) -> (Tensor, Tensor)"
)
_DATA = Inputs._fields.index("gamma")  # how many of Inputs are tensors or None ...
_TENSORS = _DATA + 4  # ... and with gamma and the three clips, as tensors
_CLIPS = range(_DATA + 1, _TENSORS)
_PLAIN_TYPES = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _flat(x: Inputs) -> tuple[Any, ...]:
    """Inputs in the operator's schema."""
    data, options, rest = x[:_DATA], x[_DATA:_TENSORS], x[_TENSORS:]
    tensors = (t if isinstance(t, Tensor) else None for t in options)
    numbers = (0.0 if isinstance(t, Tensor) else t for t in options)
    return (*data, *tensors, *numbers, *rest)


def _inputs(*arguments: Any) -> Inputs:
    """The operator's arguments as Inputs again."""
    data, options, numbers, rest = (
        arguments[:_DATA],
        arguments[_DATA:_TENSORS],
        arguments[_TENSORS : _TENSORS + 4],
        arguments[_TENSORS + 4 :],
    )
    return Inputs(*data, *(n if t is None else t for t, n in zip(options, numbers, strict=True)), *rest)


def vtrace_triton(x: Inputs) -> tuple[Tensor, Tensor]:
    """The backend: the kernel itself for plain eager tensors without gradients, else the operator around it."""
    result: tuple[Tensor, Tensor]
    if torch.compiler.is_compiling():
        result = torch.ops.vtrace_plugins.vtrace.default(*_flat(x))
    elif torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        result = _Transformable.apply(*_flat(x))
    elif _plain(x):
        from vtrace_plugins._core.launch import launch

        result = launch(x)
    else:
        result = torch.ops.vtrace_plugins.vtrace.default(*_flat(x))
    return result


def _plain(x: Inputs) -> bool:
    """Whether torch's dispatcher has nothing to do: no gradient, no subclass, no mode that wants to see the call."""
    if torch._C._len_torch_dispatch_stack() > 0:
        return False
    grad = torch.is_grad_enabled()
    return all(type(t) in _PLAIN_TYPES and not (grad and t.requires_grad) for t in x if isinstance(t, Tensor))


def _run(*arguments: Any) -> tuple[Tensor, Tensor]:
    from vtrace_plugins._core.launch import launch

    return launch(_inputs(*arguments))


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    x = _inputs(*arguments)
    return empty_results(x.values, x.time_dim)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS])
    ctx.options = inputs[_TENSORS:]


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient, by running the differentiable torch backend on the saved inputs: twice differentiable as well."""
    tensors = list(ctx.saved_tensors)
    wanted = [i for i, needed in enumerate(ctx.needs_input_grad[:_TENSORS]) if needed]

    def function(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        for i, leaf in zip(wanted, leaves, strict=True):
            tensors[i] = leaf
        return on_time_first(vtrace_torch, _inputs(*tensors, *ctx.options))

    vjp = torch.func.vjp(function, *(tensors[i] for i in wanted))[1]
    result: list[Tensor | None] = [None] * (_TENSORS + len(ctx.options))
    for i, grad in zip(wanted, vjp(grads), strict=True):
        result[i] = grad
    return tuple(result)


def _vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """One more batch dimension in front; what is not batched is expanded over it (a view)."""

    def batched(i: int, x: Any) -> Any:
        if i >= _TENSORS or x is None:
            return x
        if i in _CLIPS:
            if in_dims[i] is not None:
                raise NotImplementedError("vtrace under vmap: the triton backend takes no batch of clips; use 'torch'")
            return x
        return x.expand(info.batch_size, *x.shape) if in_dims[i] is None else x.movedim(in_dims[i], 0)

    *rest, time_dim = (batched(i, x) for i, x in enumerate(arguments))
    return torch.ops.vtrace_plugins.vtrace.default(*rest, time_dim + 1), (0, 0)


class _Transformable(torch.autograd.Function):
    """The operator for torch.func: register_autograd's own function does not go through its transforms.

    It has no jvp, so forward-mode AD raises here, where the bare operator would silently drop the tangents.
    """

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = torch.ops.vtrace_plugins.vtrace.default(*arguments)
        return result

    setup_context = staticmethod(_save)
    backward = staticmethod(_backward)
    vmap = staticmethod(_vmap)


for _device in ("CUDA", "CPU"):  # on CPU tensors: triton's interpreter
    _library.impl("vtrace", _run, _device)
_NAME = "vtrace_plugins::vtrace"
torch.library.register_fake(_NAME, _fake, lib=_library)
torch.library.register_autograd(_NAME, _backward, setup_context=_save, lib=_library)
torch.library.register_vmap(_NAME, _vmap, lib=_library)
