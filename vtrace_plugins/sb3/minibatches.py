"""Minibatches of rows in random order: gathered many at once, handed out as slices."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vtrace_plugins.sb3.observations import each

_ROWS_AT_ONCE = 16384  # gathered together: enough to make the calls cheap, little beside the rollout


def edges(total: int, batch_size: int | None, merge_single: bool) -> list[int]:
    """Where minibatches of ``total`` rows start, and the end. A last one of a single row may join the one before."""
    cuts = [*range(0, total, batch_size or total), total]
    if merge_single and len(cuts) > 2 and cuts[-1] - cuts[-2] == 1:
        del cuts[-2]
    return cuts


def minibatches(
    sample_type: Callable[..., Any], columns: Sequence[Any], batch_size: int | None, merge_single: bool
) -> Generator[Any, None, None]:
    """``sample_type(*columns)`` for batches of rows; a column is a tensor or a dict of them. NumPy's generator draws,
    as in SB3, so that the same seed gives the same batches."""
    first = next(iter(columns[0].values())) if isinstance(columns[0], dict) else columns[0]
    total = len(first)
    order = torch.from_numpy(np.random.permutation(total)).to(first.device)
    cuts = edges(total, batch_size, merge_single)
    together = max(1, _ROWS_AT_ONCE // (batch_size or total))
    for i in range(0, len(cuts) - 1, together):
        some = cuts[i : i + together + 1]
        index = order[some[0] : some[-1]]
        sizes = [end - start for start, end in pairwise(some)]
        yield from map(sample_type, *(_split(column, index, sizes) for column in columns))


def _split(column: Any, index: Tensor, sizes: list[int]) -> Sequence[Any]:
    if isinstance(column, dict):
        parts = each(lambda x: x[index].split(sizes), column)
        return [dict(zip(parts, batch, strict=True)) for batch in zip(*parts.values(), strict=True)]
    rows: Sequence[Tensor] = column[index].split(sizes)
    return rows
