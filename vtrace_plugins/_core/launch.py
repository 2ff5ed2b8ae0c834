"""Which tile, which grid, and the launch of :mod:`kernels`. Importing this imports triton."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vtrace_plugins._core.kernels import vtrace_kernel
from vtrace_plugins._core.layout import compute_dtype
from vtrace_plugins._core.ops import empty_results

INTERPRETED = not isinstance(vtrace_kernel, triton.JITFunction)  # TRITON_INTERPRET=1: runs on CPU tensors
_ELEMENTS_PER_PROGRAM = 2048


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


def launch(
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
    gamma_tensor: Tensor | None,
    rho_bar_tensor: Tensor | None,
    c_bar_tensor: Tensor | None,
    pg_rho_bar_tensor: Tensor | None,
    gamma: float,
    rho_bar: float,
    c_bar: float,
    pg_rho_bar: float,
    lam: float,
    weight_advantages: bool,
    time_dim: int,
) -> tuple[Tensor, Tensor]:
    """Run the kernel on non-empty data of any layout; the arguments are the operator's (:mod:`ops`)."""
    shape = values.shape
    outer, time, inner = math.prod(shape[:time_dim]), shape[time_dim], math.prod(shape[time_dim + 1 :])
    targets, advantages = empty_results(values, time_dim)
    furthest = 0

    def described(x: Tensor | None, steps: int = time) -> tuple[Tensor, int, int, int] | None:
        """x for the kernel: a view over [outer, time, inner] wherever its strides allow, else a copy."""
        nonlocal furthest
        if x is None:
            return None
        x = x.reshape(outer, steps, inner)
        stride_outer, stride_time, stride_inner = x.stride()
        furthest = max(furthest, (outer - 1) * stride_outer + steps * stride_time + (inner - 1) * stride_inner)
        return x, stride_outer, stride_time, stride_inner

    if last_value is not None:
        continuation = described(last_value, steps=1)  # read at t = T - 1 ...
        assert continuation is not None
        continuation = (*continuation[:2], 0, continuation[3])  # ... which is where its only entry must be
    else:
        continuation = described(bootstrap_values if next_values is None else next_values)
    inputs = tuple(described(x) for x in (log_pi, log_mu, values, rewards, terminated, truncated))
    options = (described(mask), described(gamma_tensor))
    outputs = (described(targets), described(advantages))

    rows = outer * inner
    compute = compute_dtype(log_pi, log_mu, values, rewards, bootstrap_values, last_value, next_values)
    block_rows, block_time = choose_tile(rows, time, time_is_contiguous=values.stride(time_dim) == 1 or time == 1)
    with torch.cuda.device_of(values):
        vtrace_kernel[(triton.cdiv(rows, block_rows),)](
            *inputs,
            continuation,
            *options,
            *outputs,
            rho_bar_tensor,
            c_bar_tensor,
            pg_rho_bar_tensor,
            gamma,
            rho_bar,
            c_bar,
            pg_rho_bar,
            lam,
            rows,
            time,
            inner,
            CONTINUATION_IS_NEXT=next_values is not None,
            LAMBDA_IS_ONE=lam == 1,
            WEIGHTED=weight_advantages,
            COMPUTE=tl.float64 if compute is torch.float64 else tl.float32,
            INDEX=tl.int64 if furthest >= 2**31 else tl.int32,
            BLOCK_ROWS=block_rows,
            BLOCK_TIME=block_time,
        )
    return targets, advantages
