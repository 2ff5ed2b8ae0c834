"""Which tile, which grid, and the launch of :mod:`kernels`. Importing this imports triton."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vtrace_plugins._core.inputs import Inputs
from vtrace_plugins._core.kernels import vtrace_kernel
from vtrace_plugins._core.layout import compute_dtype, empty_results, folded_shape

INTERPRETED = not isinstance(vtrace_kernel, triton.JITFunction)  # TRITON_INTERPRET=1: runs on CPU tensors
_ELEMENTS_PER_PROGRAM = 2048
_POOL = (*Inputs._fields, "targets", "advantages")


def choose_tile(rows: int, time: int, time_is_contiguous: bool) -> tuple[int, int]:
    """(BLOCK_ROWS, BLOCK_TIME), both powers of two.

    Time-contiguous rows are read along time; otherwise neighbouring rows share cache lines, so a tile keeps at least 32
    of them. The scan never runs over fewer than 8 lanes (triton 3.6 fails to compile one over 2).
    """
    if time_is_contiguous:
        block_time = min(max(8, triton.next_power_of_2(time)), 1024)
        block_rows = max(1, min(_ELEMENTS_PER_PROGRAM // block_time // 2, triton.next_power_of_2(rows)))
    else:
        block_rows = min(32, max(1, triton.next_power_of_2(rows)))
        block_time = min(max(8, triton.next_power_of_2(time)), _ELEMENTS_PER_PROGRAM // block_rows)
    return block_rows, block_time


def prepare(x: Inputs) -> Callable[[Inputs], tuple[Tensor, Tensor]]:
    """The launch for non-empty data of x's signature: everything but the pointers is settled here, once.

    From its second call on it goes to the compiled kernel itself, past triton's binder, which would look at each of
    some fifty arguments anew. The compiled kernel is specialised to dtypes, to pointers' alignment and to integers that
    are 1 or divisible by 16; all of those are in the signature.
    """
    shape, time_dim, device = x.values.shape, x.time_dim, x.values.device
    outer, time, inner = folded = folded_shape(shape, time_dim)
    rows = outer * inner

    def fold(name: str, t: Tensor) -> Tensor:
        """t over [outer, time, inner]: a view wherever its strides allow, else a copy."""
        if name == "last_value":  # its only step is read at t = T - 1
            return t.reshape(outer, 1, inner).expand(folded)
        return t.expand(shape).reshape(folded)

    if x.last_value is not None:
        continuation = "last_value"
    else:
        continuation = "bootstrap_values" if x.next_values is None else "next_values"
    given: dict[str, Any] = dict(zip(_POOL, (*x, *empty_results(x.values, time_dim)), strict=True))
    # The kernel's arguments in its order: these as (pointer, strides), then the clips that are tensors as pointers.
    names = ["log_pi", "log_mu", "values", "rewards", "terminated", "truncated", continuation, "mask", "gamma"]
    names += ["targets", "advantages"]
    clips = ("rho_bar", "c_bar", "pg_rho_bar")
    views = {name: fold(name, given[name]) for name in names if isinstance(given[name], Tensor)}
    copied = {name for name, view in views.items() if view.data_ptr() != given[name].data_ptr()}
    strided = [(i, _POOL.index(n), n, views[n].stride()) for i, n in enumerate(names) if n in views]
    bare = [(i, _POOL.index(n)) for i, n in enumerate(clips, len(names)) if isinstance(given[n], Tensor)]

    furthest = max(sum(size * stride for size, stride in zip(folded, t.stride(), strict=True)) for t in views.values())
    block_rows, block_time = choose_tile(rows, time, x.values.stride(time_dim) == 1 or time == 1)
    grid = (triton.cdiv(rows, block_rows), 1, 1)
    template = [
        *[None] * (len(names) + len(clips)),
        *(0.0 if isinstance(given[n], Tensor) else given[n] for n in ("gamma", *clips, "lam")),
        rows,
        time,
        inner,
        x.next_values is not None,  # CONTINUATION_IS_NEXT and the rest
        x.lam == 1,
        x.weight_advantages,
        tl.float64 if compute_dtype(x) is torch.float64 else tl.float32,
        tl.int64 if furthest >= 2**31 else tl.int32,
        block_rows,
        block_time,
    ]
    compiled: Any = None

    def launch(x: Inputs) -> tuple[Tensor, Tensor]:
        nonlocal compiled
        results = empty_results(x.values, time_dim)
        pool: tuple[Any, ...] = (*x, *results)
        address: Any = Tensor.data_ptr if compiled else lambda t: t
        arguments: list[Any] = template.copy()
        copies = []  # alive until the launch
        for i, place, name, strides in strided:
            t = pool[place]
            if name in copied:
                t = fold(name, t)
                copies.append(t)
            arguments[i] = (address(t), *strides)
        for i, place in bare:
            arguments[i] = address(pool[place])
        elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
        with torch.cuda.device(device) if elsewhere else nullcontext():
            if compiled:
                compiled(*arguments)
            else:
                handle = vtrace_kernel[grid](*arguments)
                compiled = None if INTERPRETED else handle[grid]
        return results

    return launch
