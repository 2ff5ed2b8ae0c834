"""The launch of :mod:`adjoint_kernel`. Importing this imports triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vtrace_plugins._core import launch
from vtrace_plugins._core.adjoint_kernel import adjoint_kernel
from vtrace_plugins._core.inputs import CLIPS, FLAGS, Inputs
from vtrace_plugins._core.kernels import APPLY, SUMMARY, WHOLE
from vtrace_plugins._core.layout import compute_dtype, empty_gradients


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
    where = launch.geometry(x, shortest_run=4)  # a thread's share of a tile, though this kernel has no runs
    folded, time_is_contiguous, plan, chunks, grid = where
    outer, _, inner = folded
    results = empty_gradients(x, wanted)
    by = dict(zip(wanted, results, strict=True))

    def folded_or_none(name: str, t: Any) -> Tensor | None:
        return launch.fold(name, t, shape, folded) if isinstance(t, Tensor) else None

    names = launch.input_names(x)
    views = [folded_or_none(name, getattr(x, name)) for name in names]
    views += [folded_or_none("", t) for t in (targets, grad_targets, grad_advantages)]
    views += [folded_or_none(name, by.get(name)) for name in names if name not in FLAGS]

    bars = (getattr(x, name) for name in CLIPS)
    arguments = (
        *(None if t is None else (t, *t.stride()) for t in views),
        *(bar if isinstance(bar, Tensor) else None for bar in bars),
        *(torch.empty((2, chunks, outer * inner), dtype=dtype, device=device) if chunks > 1 else (None, None)),
        *launch.settled(x, where, (t for t in views if t is not None)),
        4 if not time_is_contiguous and inner % 16 == 0 else 1,  # ROWS_TOGETHER
    )
    with launch.current(device):
        for which in (WHOLE,) if chunks == 1 else (SUMMARY, APPLY):
            adjoint_kernel[grid](*arguments, which, num_warps=plan.warps)
    return results
