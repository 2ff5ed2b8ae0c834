"""From a call to its launch.

A plain eager call like an earlier one goes straight to the launch that was prepared for that one (``known_launch``).
All else (a compiler, a transform, a mode, a subclass) takes the PyTorch operators ``torch.ops.vtrace_plugins.vtrace``
and ``vtrace_backward``, with fake, autograd and vmap. Registering them imports no triton; the first call does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from vtrace_plugins._core.checks import check_inputs
from vtrace_plugins._core.inputs import FLAGS, Inputs
from vtrace_plugins._core.layout import empty_gradients, empty_results, on_time_first
from vtrace_plugins._core.torch_scan import vtrace_torch

_library = torch.library.Library("vtrace_plugins", "DEF")
_ARGUMENTS = (
    "Tensor log_pi, Tensor log_mu, Tensor values, Tensor rewards, Tensor terminated, Tensor? truncated, "
    "Tensor? bootstrap_values, Tensor? last_value, Tensor? next_values, Tensor? mask, "
    # Each of these is a tensor, or None and the number below counts.
    "Tensor? gamma_tensor, Tensor? rho_bar_tensor, Tensor? c_bar_tensor, Tensor? pg_rho_bar_tensor, "
    "float gamma, float rho_bar, float c_bar, float pg_rho_bar, "
    "float lam, bool weight_advantages, int time_dim"
)
_library.define(f"vtrace({_ARGUMENTS}) -> (Tensor, Tensor)")
_library.define(  # ``wanted``: by which of the arguments
    f"vtrace_backward(Tensor? grad_targets, Tensor? grad_advantages, Tensor targets, int[] wanted, {_ARGUMENTS})"
    " -> Tensor[]"
)
_DATA = Inputs._fields.index("gamma")  # how many of Inputs are tensors or None ...
_TENSORS = _DATA + 4  # ... and with gamma and the three clips, as tensors
_CLIPS = range(_DATA + 1, _TENSORS)
_FLAGS = frozenset(Inputs._fields.index(name) for name in FLAGS)  # have no gradient
_PLAIN_TENSORS = frozenset((Tensor, torch.nn.Parameter, torch.nn.Buffer))
_NUMBERS = frozenset((float, int, bool))

Launch = Callable[[Inputs], tuple[Tensor, Tensor]]
_launches: dict[Hashable, Launch] = {}  # by signature
_MOST_LAUNCHES = 1024


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


def signature(x: Inputs) -> tuple[Hashable, ...] | None:
    """What decides a launch but the data: dtypes, devices, shapes, strides, alignments, options; first of all the
    indices of the inputs by which a gradient is asked for.

    None where that is not all: a tensor whose memory does not hold its numbers (sparse, negated, all zeros and never
    stored), or an option that is no plain number.
    """
    parts: list[Hashable] = [()]
    wanted: tuple[int, ...] = ()
    gradients = torch.is_grad_enabled()
    t: Any
    for i, t in enumerate(x[:_TENSORS]):
        kind = type(t)
        if kind in _PLAIN_TENSORS:
            try:
                address = t.data_ptr()
                parts.append((t.dtype, t.device, t.shape, t.stride(), address % 16))
            except RuntimeError:
                return None
            if address == 0 or t.is_neg():
                return None
            if gradients and t.requires_grad and i not in _FLAGS:
                wanted += (i,)
        elif t is None or kind in _NUMBERS:
            parts.append((kind, t))
        else:
            return None
    for option in x[_TENSORS:]:
        if type(option) not in _NUMBERS:
            return None
        parts.append((type(option), option))
    parts[0] = wanted
    return tuple(parts)


def torch_must_see() -> bool:
    """Whether a transform, a compiler, a tracer or a mode is at work, which has to see each operation."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def known_launch(x: Inputs) -> tuple[tuple[Hashable, ...] | None, Launch | None]:
    """x's signature, and the launch that a call like this one prepared; (None, None) where torch must see the call:
    a transform, a compiler, a mode or a subclass of Tensor is at work."""
    if torch_must_see():
        return None, None
    known = signature(x)
    return known, _launches.get(known)


def vtrace_triton(x: Inputs, given: Inputs, known: tuple[Hashable, ...] | None = None) -> tuple[Tensor, Tensor]:
    """The backend: the kernel itself for plain eager tensors (``known`` by their signature), else the operator.

    ``x`` is what the checks made of ``given``.
    """
    if known is not None:  # launched with what the next such call will be launched with
        return _prepared(x, known, wanted=known[0])(given)
    forward_mode = forward_ad._current_level >= 0
    if torch.compiler.is_compiling():
        if forward_mode:  # the operator would drop the tangent
            raise NotImplementedError("vtrace: no forward-mode differentiation on the triton backend")
    elif forward_mode or torch._C._are_functorch_transforms_active():
        transformed: tuple[Tensor, Tensor] = _Transformable.apply(*_flat(x))
        return transformed
    result: tuple[Tensor, Tensor] = torch.ops.vtrace_plugins.vtrace.default(*_flat(x))
    return result


def _prepared(x: Inputs, known: Hashable, wanted: Any = ()) -> Launch:
    launch = None if known is None else _launches.get(known)
    if launch is None:
        from vtrace_plugins._core.launch import prepare

        launch = prepare(x)
        if wanted:
            launch = Recorded(launch, wanted, x)
        if len(_launches) >= _MOST_LAUNCHES:
            _launches.clear()  # triton keeps the compiled code; only the short way to it is forgotten
        if known is not None:
            _launches[known] = launch
    return launch


def _run(*arguments: Any) -> tuple[Tensor, Tensor]:
    x = _inputs(*arguments)
    known = signature(x)
    # Apart from those of the public function, which have passed its checks.
    return _prepared(x, known and ("operator", known))(x)


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    x = _inputs(*arguments)
    return empty_results(x.values, x.time_dim)


def _run_backward(
    grad_targets: Tensor | None, grad_advantages: Tensor | None, targets: Tensor, wanted: list[int], *arguments: Any
) -> list[Tensor]:
    from vtrace_plugins._core.adjoint_launch import gradients

    names = [Inputs._fields[i] for i in wanted]
    return gradients(_inputs(*arguments), targets, grad_targets, grad_advantages, names)


def _fake_backward(
    grad_targets: Tensor | None, grad_advantages: Tensor | None, targets: Tensor, wanted: list[int], *arguments: Any
) -> list[Tensor]:
    return empty_gradients(_inputs(*arguments), [Inputs._fields[i] for i in wanted])


def _gradients(x: Inputs, targets: Tensor, grads: tuple[Tensor | None, ...], wanted: Sequence[int]) -> list[Tensor]:
    """By the inputs of these indices: the kernel's, unless a clip is among them, the gradients must be differentiable
    themselves, or they are many at once (vmap, is_grads_batched)."""
    again = torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
    again = again or any(g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in grads)
    if not again and not any(i in _CLIPS for i in wanted):
        found: list[Tensor] = torch.ops.vtrace_plugins.vtrace_backward.default(*grads, targets, wanted, *_flat(x))
        return found

    def function(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        given: dict[str, Any] = {Inputs._fields[i]: leaf for i, leaf in zip(wanted, leaves, strict=True)}
        return on_time_first(vtrace_torch, x._replace(**given))

    vjp = torch.func.vjp(function, *(x[i] for i in wanted))[1]
    return list(vjp(tuple(torch.zeros_like(targets) if grad is None else grad for grad in grads)))


def _savable(t: Tensor | None) -> Tensor | None:
    """Data made in inference mode is copied: autograd does not save it."""
    return t if t is None or not t.is_inference() else t.clone()


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*map(_savable, inputs[:_TENSORS]), output[0])
    ctx.options = inputs[_TENSORS:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, targets = ctx.saved_tensors
    wanted = [i for i, needed in enumerate(ctx.needs_input_grad[:_TENSORS]) if needed and i not in _FLAGS]
    result: list[Tensor | None] = [None] * (_TENSORS + len(ctx.options))
    for i, grad in zip(wanted, _gradients(_inputs(*tensors, *ctx.options), targets, grads, wanted), strict=True):
        result[i] = grad
    return tuple(result)


class _Differentiable(torch.autograd.Function):
    """A prepared launch for plain eager tensors, recorded by autograd: what an operator adds to a call is left out."""

    @staticmethod
    def forward(ctx: Any, launch: Recorded, x: Inputs, data: Sequence[Tensor], *_: Tensor) -> tuple[Tensor, Tensor]:
        results = launch.launch(x)
        ctx.save_for_backward(*data, results[0])
        ctx.launch = launch
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *data, targets = ctx.saved_tensors
        given = ctx.launch.given(data)
        asked = ctx.launch.wanted
        wanted = [i for i, needed in zip(asked, ctx.needs_input_grad[3:], strict=True) if needed]
        found = dict(zip(wanted, _gradients(check_inputs(given), targets, grads, wanted), strict=True))
        # gamma was expanded
        by = (found[i].sum_to_size(given[i].shape) if i in found else None for i in asked)
        return None, None, None, *by


class Recorded:
    """A prepared launch whose results have gradients by the inputs of the indices ``wanted``."""

    def __init__(self, launch: Launch, wanted: tuple[int, ...], like: Inputs) -> None:
        self.launch, self.wanted = launch, wanted
        places = [i for i, t in enumerate(like) if isinstance(t, Tensor)]
        self.data: Callable[[Inputs], tuple[Tensor, ...]] = itemgetter(*places)
        self._places, self._options = places, [None if isinstance(t, Tensor) else t for t in like]

    def given(self, data: Sequence[Tensor]) -> Any:
        """The inputs again, whose tensors are ``data``."""
        given: list[Any] = self._options.copy()
        for i, t in zip(self._places, data, strict=True):
            given[i] = t
        return Inputs(*given)

    def __call__(self, x: Inputs) -> tuple[Tensor, Tensor]:
        data, leaves = self.data(x), [x[i] for i in self.wanted]
        results: tuple[Tensor, Tensor]
        try:
            results = _Differentiable.apply(self, x, data, *leaves)
        except RuntimeError as error:  # to ask each tensor beforehand takes longer
            if "Inference tensors cannot be saved" not in str(error):
                raise
            results = _Differentiable.apply(self, x, [_savable(t) for t in data], *leaves)
        return results


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
    _library.impl("vtrace_backward", _run_backward, _device)
_NAME = "vtrace_plugins::vtrace"
torch.library.register_fake(_NAME, _fake, lib=_library)
torch.library.register_fake(f"{_NAME}_backward", _fake_backward, lib=_library)
torch.library.register_autograd(_NAME, _backward, setup_context=_save, lib=_library)
torch.library.register_vmap(_NAME, _vmap, lib=_library)
