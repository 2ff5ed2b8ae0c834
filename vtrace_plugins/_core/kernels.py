"""The Triton kernel: log-probs in, targets and advantages out, one launch.

The recurrence ``Delta_t = alpha_t + beta_t Delta_{t+1}`` is a scan over elements (a, b) = (alpha, beta), run against
time. A step that ends its episode or the window is *cut*: it starts from its own alpha, whatever lies behind it. The
cut rides in b: beta is never negative, so b = -1 says "cut", and a selection (never a product) keeps a NaN behind it
out.

Every tensor is a tuple ``(pointer, stride_outer, stride_time, stride_inner)`` over ``[outer, time, inner]``; an absent
one is None, which removes its branch at compile time.
"""

import triton
import triton.language as tl


@triton.jit
def combine(a_later, b_later, a, b):
    """(a, b) lies earlier in time and is read last: the associative operator, Delta over both spans."""
    cut = b < 0
    return tl.where(cut, a, a + b * a_later), tl.where(cut | (b_later < 0), -1.0, b * b_later)


@triton.jit
def clip(w, bar, bar_pointer, COMPUTE: tl.constexpr):
    """min(bar, w), written so that NaN stays NaN. ``bar_pointer`` (a 0-d tensor) goes before the number ``bar``."""
    if bar_pointer is None:
        limit = tl.full([], bar, COMPUTE)
    else:
        limit = tl.load(bar_pointer).to(COMPUTE)
    return tl.where(w > limit, limit, w)


@triton.jit
def at(x, outer, t, inner):
    return x[0] + (outer * x[1] + t * x[2] + inner * x[3])


@triton.jit
def read(x, outer, t, inner, where, COMPUTE: tl.constexpr):
    """x at [outer, t, inner] in the compute dtype; 0, unread, outside ``where``."""
    return tl.load(at(x, outer, t, inner), mask=where, other=0).to(COMPUTE)


@triton.jit
def is_set(x, outer, t, inner, where):
    """A flag of any dtype; False, unread, outside ``where``."""
    return (tl.load(at(x, outer, t, inner), mask=where, other=0) != 0) & where


@triton.jit
def vtrace_kernel(
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
    advantages,
    rho_bar_pointer,
    c_bar_pointer,
    pg_rho_bar_pointer,
    # Python floats reach a kernel as float32 unless annotated; float64 data needs all of gamma.
    gamma: tl.float64,
    rho_bar: tl.float64,
    c_bar: tl.float64,
    pg_rho_bar: tl.float64,
    lam: tl.float64,
    rows,
    T,
    inner_size,
    CONTINUATION_IS_NEXT: tl.constexpr,  # next_values (read at every step), not bootstrap_values or last_value
    LAMBDA_IS_ONE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TIME: tl.constexpr,
):
    """One program: BLOCK_ROWS rows, all of time in tiles of BLOCK_TIME, from the window's end to its start."""
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None].to(INDEX)
    row_exists = row < rows
    outer = row // inner_size
    inner = row % inner_size

    i = tl.arange(0, BLOCK_TIME)[None, :]  # scan order: i = 0 is the last step of the tile
    carry = tl.zeros([BLOCK_ROWS, 1], COMPUTE)  # Delta at the first step of the tile after this one in time
    for tile in range(tl.cdiv(T, BLOCK_TIME)):
        t = (T - 1 - tile * BLOCK_TIME - i).to(INDEX)
        real = row_exists & (t >= 0)
        has_next = real & (t + 1 < T)
        if mask is not None:
            real = is_set(mask, outer, t, inner, real)
            has_next = is_set(mask, outer, t + 1, inner, has_next) & real

        # Where not real, everything below is read as 0 and the step is cut: both results come out as 0.
        term = is_set(terminated, outer, t, inner, real)
        bootstraps = ~has_next & ~term  # at the end of the window, or before padding
        if truncated is not None:
            bootstraps = bootstraps | is_set(truncated, outer, t, inner, real & ~term)
        cut = term | bootstraps
        bootstraps = bootstraps & real

        value = read(values, outer, t, inner, real, COMPUTE)
        reward = read(rewards, outer, t, inner, real, COMPUTE)
        w = tl.exp(read(log_pi, outer, t, inner, real, COMPUTE) - read(log_mu, outer, t, inner, real, COMPUTE))
        if step_gamma is None:
            discount = tl.full([BLOCK_ROWS, BLOCK_TIME], gamma, COMPUTE)
        else:
            discount = read(step_gamma, outer, t, inner, real, COMPUTE)

        value_ahead = read(values, outer, t + 1, inner, ~cut, COMPUTE)
        if CONTINUATION_IS_NEXT:
            next_value = read(continuation, outer, t, inner, real & ~term, COMPUTE)
        else:
            next_value = tl.where(cut, read(continuation, outer, t, inner, bootstraps, COMPUTE), value_ahead)

        rho = clip(w, rho_bar, rho_bar_pointer, COMPUTE)
        c = clip(w, c_bar, c_bar_pointer, COMPUTE)
        if not LAMBDA_IS_ONE:
            mix = tl.full([], lam, COMPUTE)
            c = mix * c
        alpha = rho * (reward + discount * next_value - value)
        a, b = tl.associative_scan((alpha, tl.where(cut, -1.0, discount * c)), 1, combine)
        delta = tl.where(b < 0, a, a + b * carry)
        tl.store(
            at(targets, outer, t, inner), (value + delta).to(targets[0].dtype.element_ty), mask=row_exists & (t >= 0)
        )

        # v_{t+1} needs the neighbour's Delta, which lives in another lane (or came with the carry).
        before = tl.broadcast_to(tl.maximum(i - 1, 0), [BLOCK_ROWS, BLOCK_TIME])
        delta_ahead = tl.where(i == 0, carry, tl.gather(delta, before, 1))
        target_ahead = value_ahead + delta_ahead
        if not LAMBDA_IS_ONE:
            target_ahead = next_value + mix * (target_ahead - next_value)
        advantage = reward + discount * tl.where(cut, next_value, target_ahead) - value
        if WEIGHTED:
            advantage = clip(w, pg_rho_bar, pg_rho_bar_pointer, COMPUTE) * advantage
        tl.store(
            at(advantages, outer, t, inner), advantage.to(advantages[0].dtype.element_ty), mask=row_exists & (t >= 0)
        )

        carry = tl.sum(tl.where(i == BLOCK_TIME - 1, delta, 0.0), 1, keep_dims=True)
