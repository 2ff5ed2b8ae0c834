"""The launch of :mod:`adjoint_kernel`. Importing this imports triton."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vtrace_plugins._core import launch
from vtrace_plugins._core.adjoint_kernel import adjoint_kernel
from vtrace_plugins._core.inputs import Inputs
from vtrace_plugins._core.kernels import APPLY, SUMMARY, WHOLE
from vtrace_plugins._core.launch import CLIPS, CONTINUATIONS, fold
from vtrace_plugins._core.layout import compute_dtype, empty_gradients, folded_shape


def gradients(
    x: Inputs, targets: Tensor, grad_targets: Tensor | None, grad_advantages: Tensor | None, wanted: Sequence[str]
) -> list[Tensor]:
    """The loss's gradients by the inputs named, from those by the results (None: the loss does not depend on it).

    ``x`` has passed the checks and is not empty; ``wanted`` are floating inputs, the clips not among them.
    """
    shape, device, dtype = x.values.shape, x.values.device, compute_dtype(x)
    if targets.dtype is not dtype:  # they were rounded, and their distance from the values counts
        exact = x._replace(values=x.values.to(dtype))
        targets, _ = launch.prepare(exact)(exact)
    outer, time, inner = folded = folded_shape(shape, x.time_dim)
    rows = outer * inner
    results = empty_gradients(x, wanted)
    by = dict(zip(wanted, results, strict=True))
    continuation = next(name for name in CONTINUATIONS if getattr(x, name) is not None)

    def folded_or_none(name: str, t: Any) -> Tensor | None:
        return fold(name, t, shape, folded) if isinstance(t, Tensor) else None

    names = ("log_pi", "log_mu", "values", "rewards", "terminated", "truncated", continuation, "mask", "gamma")
    views = [folded_or_none(name, getattr(x, name)) for name in names]
    views += [folded_or_none("", t) for t in (targets, grad_targets, grad_advantages)]
    views += [folded_or_none(name, by.get(name)) for name in names if name not in ("terminated", "truncated", "mask")]

    time_is_contiguous = x.values.stride(x.time_dim) == 1 or time == 1
    plan = launch.choose(rows, time, time_is_contiguous, launch.multiprocessors(device))
    block_rows, block_time, warps, chunk_tiles, _ = plan
    chunks = triton.cdiv(triton.cdiv(time, block_time), chunk_tiles)
    summaries = torch.empty((2, chunks, rows), dtype=dtype, device=device) if chunks > 1 else (None, None)
    furthest = max(
        sum(size * stride for size, stride in zip(folded, t.stride(), strict=True)) for t in views if t is not None
    )
    clips = [getattr(x, name) for name in CLIPS]
    arguments = (
        *(None if t is None else (t, *t.stride()) for t in views),
        *(bar if isinstance(bar, Tensor) else None for bar in clips),
        *summaries,
        *(0.0 if isinstance(option, Tensor) else option for option in (x.gamma, *clips)),
        x.lam,
        *(rows, time, inner, chunk_tiles, chunks),
        CONTINUATIONS[continuation],
        x.lam == 1,
        x.weight_advantages,
        tl.float64 if dtype is torch.float64 else tl.float32,
        tl.int64 if furthest >= 2**31 else tl.int32,
        block_rows,
        block_time,
        max(8, triton.next_power_of_2(chunks)),
        4 if not time_is_contiguous and inner % 16 == 0 else 1,  # ROWS_TOGETHER
    )
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        for which in (WHOLE,) if chunks == 1 else (SUMMARY, APPLY):
            adjoint_kernel[(triton.cdiv(rows, block_rows), chunks, 1)](*arguments, which, num_warps=warps)
    return results
