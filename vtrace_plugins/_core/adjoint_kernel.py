"""The Triton kernel of the gradient: what :mod:`kernels` computes, run backwards, so forwards in time.

Let ``G_t`` be the gradient of the loss by ``Delta_t`` and ``q_t`` that by the advantage before its weight. Delta_t
reaches the loss through its own target, through the step before's advantage and through the step before's Delta:

    G_t = dL/dv_t + lambda gamma_{t-1} q_{t-1} + beta_{t-1} G_{t-1},        only dL/dv_t where step t-1 is cut.

That is the forward's recurrence the other way round, and the same scan (``combine``, cuts as b = -1, chunks in two
passes) solves it. A step needs G_t and G_{t-1}, which the scan gives at once; ``Delta_{t+1}`` is target less value.
Step t-1's inputs are read once more: the cache has them.
"""

import triton
import triton.language as tl

from vtrace_plugins._core.kernels import (
    APPLY,
    LAST,
    NEXT,
    SUMMARY,
    at,
    clip,
    combine,
    combine_with_rest,
    entering,
    slope_times,
    then,
)


@triton.jit
def read(x, outer, t, inner, where):
    """x, 0 outside ``where`` and where there is none."""
    if x is None:
        result = tl.zeros(where.shape, tl.float32)
    else:
        result = tl.load(at(x, outer, t, inner), mask=where, other=0)
    return result


@triton.jit
def flags(x, outer, t, inner, where):
    if x is None:
        result = where & ~where
    else:
        result = tl.load(at(x, outer, t, inner), mask=where, other=0) != 0
    return result


@triton.jit
def ratio(log_pi, log_mu, outer, t, inner, where, COMPUTE: tl.constexpr):
    pi, mu = read(log_pi, outer, t, inner, where), read(log_mu, outer, t, inner, where)
    return tl.exp(pi.to(COMPUTE) - mu.to(COMPUTE))


@triton.jit
def discounts(step_gamma, gamma, outer, t, inner, where, COMPUTE: tl.constexpr):
    if step_gamma is None:
        result = tl.full(where.shape, gamma, COMPUTE)
    else:
        result = tl.load(at(step_gamma, outer, t, inner), mask=where, other=0).to(COMPUTE)
    return result


@triton.jit
def write(x, outer, t, inner, exists, value):
    if x is not None:
        tl.store(at(x, outer, t, inner), value.to(x[0].dtype.element_ty), mask=exists)


@triton.jit
def adjoint_kernel(
    log_pi,
    log_mu,
    values,
    rewards,
    terminated,
    truncated,
    continuation,
    mask,
    step_gamma,
    targets,
    grad_targets,
    grad_advantages,
    # Gradients by the inputs; None where none is wanted.
    grad_log_pi,
    grad_log_mu,
    grad_values,
    grad_rewards,
    grad_continuation,
    grad_gamma,
    rho_bar_pointer,
    c_bar_pointer,
    pg_rho_bar_pointer,
    summary_a,
    summary_b,
    gamma: tl.float64,
    rho_bar: tl.float64,
    c_bar: tl.float64,
    pg_rho_bar: tl.float64,
    lam: tl.float64,
    rows,
    T,
    inner_size,
    chunk_tiles,
    chunks,
    CONTINUATION: tl.constexpr,
    LAMBDA_IS_ONE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TIME: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    ROWS_TOGETHER: tl.constexpr,
    PASS: tl.constexpr,
):
    """One program: BLOCK_ROWS rows of one chunk, in tiles of BLOCK_TIME steps, from its start to its end."""
    row = (tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    i = tl.arange(0, BLOCK_TIME)[None, :]
    outer = row // inner_size
    inner = tl.max_contiguous(tl.multiple_of(row % inner_size, [ROWS_TOGETHER, 1]), [ROWS_TOGETHER, 1])
    chunk = tl.program_id(1)
    first = chunk * chunk_tiles
    lambda_ = tl.full([], lam, COMPUTE)

    carry_a = tl.zeros([BLOCK_ROWS, 1], COMPUTE)
    carry_b = tl.full([BLOCK_ROWS, 1], 1 if PASS == SUMMARY else -1, COMPUTE)
    if PASS == APPLY:
        carry_a = entering(summary_a, summary_b, row, rows, chunks - 1 - chunk, chunks, BLOCK_CHUNKS, False)

    for tile in tl.range(tl.minimum(chunk_tiles, tl.cdiv(T, BLOCK_TIME) - first)):
        t = ((first + tile) * BLOCK_TIME + i).to(INDEX)
        exists = (row < rows) & (t < T)
        real, has_next, has_before = exists, exists & (t + 1 < T), exists & (t > 0)
        if mask is not None:
            real = flags(mask, outer, t, inner, exists)
            has_next = real & flags(mask, outer, t + 1, inner, has_next)
            has_before = real & flags(mask, outer, t - 1, inner, has_before)

        # Of the step before: what it hands on, unless it is cut. Behind a cut nothing is used, though it may be read.
        cut_before = ~has_before | flags(terminated, outer, t - 1, inner, has_before)
        cut_before = cut_before | flags(truncated, outer, t - 1, inner, has_before)
        w_before = ratio(log_pi, log_mu, outer, t - 1, inner, has_before, COMPUTE)
        q_before = read(grad_advantages, outer, t - 1, inner, has_before).to(COMPUTE)
        if WEIGHTED and grad_advantages is not None:  # else 0, however large the weight
            q_before = q_before * clip(w_before, pg_rho_bar, pg_rho_bar_pointer, COMPUTE)
        discount_before = discounts(step_gamma, gamma, outer, t - 1, inner, has_before, COMPUTE)
        c_before = lambda_ * clip(w_before, c_bar, c_bar_pointer, COMPUTE)
        by_target = read(grad_targets, outer, t, inner, real).to(COMPUTE)
        by_target += tl.where(cut_before, 0.0, lambda_ * discount_before * q_before)
        a, b = by_target, tl.where(cut_before, -1.0, discount_before * c_before)

        if PASS == SUMMARY:
            a, b = tl.associative_scan((a, b), 1, combine)
        else:
            none = tl.zeros(a.shape, COMPUTE)
            a, b, a_before, b_before = tl.associative_scan((a, b, none, none + 1), 1, combine_with_rest)
            g, _ = then(a, b, carry_a, carry_b)
            g_before, _ = then(a_before, b_before, carry_a, carry_b)

            term = flags(terminated, outer, t, inner, real)
            bootstraps = (~has_next | flags(truncated, outer, t, inner, real)) & ~term
            cut = term | bootstraps
            goes_on = real & ~cut
            counts = real & (~term if CONTINUATION == NEXT else bootstraps)
            value = read(values, outer, t, inner, real).to(COMPUTE)
            reward = read(rewards, outer, t, inner, real).to(COMPUTE)
            w = ratio(log_pi, log_mu, outer, t, inner, real, COMPUTE)
            discount = discounts(step_gamma, gamma, outer, t, inner, real, COMPUTE)
            value_ahead = read(values, outer, t + 1, inner, goes_on).to(COMPUTE)
            target_ahead = read(targets, outer, t + 1, inner, goes_on).to(COMPUTE)
            next_value = read(continuation, outer, t, inner, counts).to(COMPUTE)
            if CONTINUATION != NEXT:
                next_value = tl.where(cut, next_value, value_ahead)
            delta_ahead = target_ahead - value_ahead  # 0 where cut
            priced = target_ahead if LAMBDA_IS_ONE else next_value + lambda_ * (target_ahead - next_value)
            priced = tl.where(cut, next_value, priced)

            rho = clip(w, rho_bar, rho_bar_pointer, COMPUTE)
            by_advantage = read(grad_advantages, outer, t, inner, real).to(COMPUTE)
            q = by_advantage
            difference = reward + discount * next_value - value
            by_log_ratio = slope_times(w, rho_bar, rho_bar_pointer, g * difference, COMPUTE)
            traced = slope_times(w, c_bar, c_bar_pointer, lambda_ * discount * g * delta_ahead, COMPUTE)
            by_log_ratio += tl.where(goes_on, traced, 0.0)
            if WEIGHTED and grad_advantages is not None:
                q = q * clip(w, pg_rho_bar, pg_rho_bar_pointer, COMPUTE)
                unweighted = reward + discount * priced - value
                by_log_ratio += slope_times(w, pg_rho_bar, pg_rho_bar_pointer, by_advantage * unweighted, COMPUTE)
            by_reward = rho * g + q
            by_value = by_target - by_reward
            if CONTINUATION != NEXT:  # this value is also what the step before calls its next one
                by_next_before = clip(w_before, rho_bar, rho_bar_pointer, COMPUTE) * g_before
                if not LAMBDA_IS_ONE:
                    by_next_before += (1 - lambda_) * q_before
                by_value += tl.where(cut_before, 0.0, discount_before * by_next_before)
            by_next = discount * (rho * g + tl.where(cut, q, 0.0 if LAMBDA_IS_ONE else (1 - lambda_) * q))

            write(grad_log_pi, outer, t, inner, exists, by_log_ratio)
            write(grad_log_mu, outer, t, inner, exists, -by_log_ratio)
            write(grad_values, outer, t, inner, exists, by_value)
            write(grad_rewards, outer, t, inner, exists, by_reward)
            written = exists & (t == T - 1) if CONTINUATION == LAST else exists
            write(grad_continuation, outer, t, inner, written, tl.where(counts, by_next, 0.0))
            if grad_gamma is not None:
                c = lambda_ * clip(w, c_bar, c_bar_pointer, COMPUTE)
                by_gamma = rho * next_value * g + priced * q + tl.where(cut, 0.0, c * g * delta_ahead)
                write(grad_gamma, outer, t, inner, exists, by_gamma)

        end = i == BLOCK_TIME - 1
        tile_a = tl.sum(tl.where(end, a, 0.0), 1, keep_dims=True)
        tile_b = tl.sum(tl.where(end, b, 0.0), 1, keep_dims=True)
        carry_a, carry_b = then(tile_a, tile_b, carry_a, carry_b)
    if PASS == SUMMARY:
        tl.store(summary_a + (chunk * rows + row), carry_a, mask=row < rows)
        tl.store(summary_b + (chunk * rows + row), carry_b, mask=row < rows)
