"""Which tile, which grid, and the launch of :mod:`kernels`. Importing this imports triton."""

from __future__ import annotations

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
_MOST_HANDLES = 1024


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


def launch(x: Inputs) -> tuple[Tensor, Tensor]:
    """Run the kernel on non-empty data of any layout."""
    outer, time, inner = folded_shape(x.values.shape, x.time_dim)
    targets, advantages = empty_results(x.values, x.time_dim)
    contiguous = (time * inner, inner, 1)
    furthest = x.values.numel()

    def described(t: Tensor | None) -> tuple[Tensor, int, int, int] | None:
        """t for the kernel: a view over [outer, time, inner] wherever its strides allow, else a copy."""
        nonlocal furthest
        if t is None:
            return None
        if t.is_contiguous():
            return t, *contiguous
        t = t.reshape(outer, time, inner)
        stride_outer, stride_time, stride_inner = t.stride()
        furthest = max(furthest, (outer - 1) * stride_outer + time * stride_time + (inner - 1) * stride_inner)
        return t, stride_outer, stride_time, stride_inner

    if x.last_value is not None:
        last_value = x.last_value.contiguous()  # [outer, inner]; its only step is read at t = T - 1, at offset 0
        continuation: tuple[Tensor, int, int, int] | None = (last_value, inner, 0, 1)
    else:
        continuation = described(x.bootstrap_values if x.next_values is None else x.next_values)
    per_step_gamma = x.gamma if isinstance(x.gamma, Tensor) else None
    clips = (x.rho_bar, x.c_bar, x.pg_rho_bar)

    rows = outer * inner
    block_rows, block_time = choose_tile(rows, time, x.values.stride(x.time_dim) == 1 or time == 1)
    tensors = [described(t) for t in (x.log_pi, x.log_mu, x.values, x.rewards, x.terminated, x.truncated)]
    tensors += [continuation, described(x.mask), described(per_step_gamma), described(targets), described(advantages)]
    _run(
        x.values.device,
        triton.cdiv(rows, block_rows),
        tensors,
        [bar if isinstance(bar, Tensor) else None for bar in clips],
        [0.0 if isinstance(number, Tensor) else number for number in (x.gamma, *clips, x.lam)],
        (
            rows,
            time,
            inner,
            x.next_values is not None,  # CONTINUATION_IS_NEXT and the rest, in the kernel's order
            x.lam == 1,
            x.weight_advantages,
            tl.float64 if compute_dtype(x) is torch.float64 else tl.float32,
            tl.int64 if furthest >= 2**31 else tl.int32,
            block_rows,
            block_time,
        ),
    )
    return targets, advantages


_handles: dict[Any, Any] = {}


def _run(
    device: torch.device,
    programs: int,
    tensors: list[tuple[Tensor, int, int, int] | None],
    clips: list[Tensor | None],
    numbers: list[float],
    constants: tuple[Any, ...],
) -> None:
    """Launch the kernel, by its compiled handle if these very shapes were launched before.

    The handle spares triton's binder, which looks at each of some fifty arguments anew. It is specialised to dtypes,
    to pointers' alignment and to integers that are 1 or divisible by 16, so all of those are in the key.
    """
    arguments = (*tensors, *clips, *numbers, *constants)
    key = (
        device.index,
        constants,
        tuple(None if t is None else (t[0].dtype, t[0].data_ptr() % 16 == 0, *t[1:]) for t in tensors),
        tuple(None if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in clips),
    )
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        handle = _handles.get(key)
        if handle is not None:
            handle[(programs, 1, 1)](*arguments)
            return
        handle = vtrace_kernel[(programs,)](*arguments)
    if not INTERPRETED:
        if len(_handles) >= _MOST_HANDLES:
            _handles.clear()  # triton keeps the compiled code; only the short way to it is forgotten
        _handles[key] = handle
