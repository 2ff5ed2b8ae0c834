"""A TensorDictModule called without tensordict's wrapper, which takes longer than a small network does.

``written(module, called(module, inputs), state)`` comes to ``module(state)``, for ``inputs`` that are the state's.
"""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, skip_existing
from torch import Tensor
from torch.nn.modules import module as torch_module
from torchrl.modules import ValueOperator


def _is_plain(module: Any) -> bool:
    """Whether calling it comes to ``module.module`` on its inputs: no option, hook or patch is in between."""
    return (
        type(module) in (TensorDictModule, ValueOperator)
        and not isinstance(module.module, TensorDictModuleBase)
        and module.method is None
        and module._kwargs is None
        and module.inplace is True
        and module._compiled_call_impl is None
        and not (module.method_kwargs or module._get_kwargs or "forward" in vars(module) or skip_existing())
        and not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
        and not (module._backward_pre_hooks or torch_module._has_any_global_hook())
    )


def called(module: Any, inputs: list[Any]) -> Any:
    """``module.module`` of the inputs, or NotImplemented where that is not all that the module does with them."""
    plain = all(isinstance(x, Tensor) for x in inputs) and _is_plain(module)
    return module.module(*inputs) if plain else NotImplemented


def written(module: Any, found: Any, state: TensorDictBase) -> TensorDictBase:
    """The state, with what :func:`called` found; ``module(state)`` if that was nothing."""
    if found is NotImplemented:
        return module(state)
    outputs = found if isinstance(found, tuple) else (found,)
    if len(outputs) != len(module.out_keys) or not all(isinstance(x, Tensor) for x in outputs):
        return TensorDictModule(lambda *_: found, module.in_keys, module.out_keys)(state)  # its rules for such results
    for key, x in zip(module.out_keys, outputs, strict=True):
        if key != "_":
            state.set(key, x)
    return state
