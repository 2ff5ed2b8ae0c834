"""The Triton kernels: log-probs in, targets and advantages out.

The recurrence ``Delta_t = alpha_t + beta_t Delta_{t+1}`` is a scan against time over maps ``x -> a + b x``. A step that
ends its episode or the window is *cut*: it starts from its own alpha, whatever lies behind it. The cut rides in b: beta
is never negative, so b = -1 says "cut", and a selection (never a product) keeps a NaN behind it out.

A program scans tiles ``[rows, time]`` from the end of its time to the start, the next tiles' loads in flight
(``num_stages``). A thread holds runs of four steps, so a tile is ``[rows, runs, steps]`` and the scan goes over runs:
their steps are composed in registers, before and after. Where a row's steps lie side by side in memory a run is one
load, where rows do (ROWS_FIRST) it is four. In a few short windows a run is one step: less code for each thread.

A long window of few rows is cut into chunks, over the grid's second dimension: the ``SUMMARY`` pass writes each chunk's
map, and the ``APPLY`` pass composes the later chunks' into what enters its own. Where chunks are few, one ``LOOK_BACK``
pass does both: its programs publish their maps and wait for those of later chunks. Without chunks there is one
``WHOLE`` pass.

Every tensor is a tuple ``(pointer, stride_outer, stride_time, stride_inner)`` over ``[outer, time, inner]``, or only
``(pointer,)`` if it lies as ``values`` does; an absent one is None, which removes its branch at compile time.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vtrace_plugins._core.mailbox import receive, send

WHOLE, SUMMARY, APPLY, LOOK_BACK = (tl.constexpr(x) for x in range(4))  # passes
BOOTSTRAP, LAST, NEXT = (tl.constexpr(x) for x in range(3))  # bootstrap_values, last_value, next_values

# How a tile is loaded. AS_NEEDED: as the compiler orders it, which puts off what it wants last, behind a wait for what
# it wants first; other tiles hide that. IN_ORDER: volatile, so that nothing is put off. AT_ONCE: volatile too, and
# nothing waits for the flags, so that the continuation is read where it does not count as well.
AS_NEEDED, IN_ORDER, AT_ONCE = (tl.constexpr(x) for x in range(3))


@triton.jit
def then(a, b, a_later, b_later):
    """The map of a span of time, followed by that of a later span."""
    cut = b < 0
    return tl.where(cut, a, a + b * a_later), tl.where(cut | (b_later < 0), -1.0, b * b_later)


@triton.jit
def combine(a_later, b_later, a, b):
    """The associative operator of the scan, which runs against time: what it has gathered is later."""
    return then(a, b, a_later, b_later)


@triton.jit
def combine_with_rest(a_later, b_later, c_later, d_later, a, b, c, d):
    """Beside the map (a, b) of a span of time, that of the span without its first step, (c, d).

    Their scan gives Delta_t and Delta_{t+1} at once: the advantage needs the latter, which lives in another lane.
    """
    whole_a, whole_b = then(a, b, a_later, b_later)
    rest_a, rest_b = then(c, d, a_later, b_later)
    return whole_a, whole_b, rest_a, rest_b


@triton.jit
def limit(bar, bar_pointer, COMPUTE: tl.constexpr):
    """A clip's bar: ``bar_pointer`` (a 0-d tensor) goes before the number ``bar``."""
    if bar_pointer is None:
        result = tl.full([], bar, COMPUTE)
    else:
        result = tl.load(bar_pointer).to(COMPUTE)
    return result


@triton.jit
def is_clipped(w, bar, bar_pointer, COMPUTE: tl.constexpr):
    """Where w has no gradient. It has one at the bar, where every ratio is on-policy; NaN is not clipped."""
    return w > limit(bar, bar_pointer, COMPUTE)


@triton.jit
def clip(w, bar, bar_pointer, COMPUTE: tl.constexpr):
    """min(bar, w)"""
    return tl.where(is_clipped(w, bar, bar_pointer, COMPUTE), limit(bar, bar_pointer, COMPUTE), w)


@triton.jit
def slope_times(w, bar, bar_pointer, x, COMPUTE: tl.constexpr):
    """The derivative of ``clip`` by log w, times x: exactly 0 where w is clipped, whatever x is there."""
    return tl.where(is_clipped(w, bar, bar_pointer, COMPUTE), 0.0, w * x)


@triton.jit
def quarters(x):
    """The first, second, third and fourth steps of runs of 4, ``[rows, runs, 4]``, each ``[rows, runs]``."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def together(x0, x1, x2, x3):
    """The inverse of ``quarters``."""
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), [x0.shape[0], x0.shape[1], 4])


@triton.jit
def at(x, outer, t, inner):
    return x[0] + (outer * x[1] + t * x[2] + inner * x[3])


@triton.jit
def like(x, y):
    """x, with y's strides if it has none: the offsets are y's as well then, and computed once."""
    if len(x) == 1:
        result = (x[0], y[1], y[2], y[3])
    else:
        result = x
    return result


@triton.jit
def load(x, outer, t, inner, exists, where, LOADS: tl.constexpr = AS_NEEDED):
    """x of a tile; 0, unread, outside ``where``; that None means where it exists.

    ``t`` and ``exists`` are each step's; or each run's first step's and a tuple over the steps of a run, read apart.
    """
    VOLATILE: tl.constexpr = LOADS != AS_NEEDED
    if len(t.shape) == 3:
        result = tl.load(at(x, outer, t, inner), mask=exists if where is None else where, other=0, volatile=VOLATILE)
    else:
        w0, w1, w2, w3 = exists if where is None else quarters(where)
        result = together(
            tl.load(at(x, outer, t, inner), mask=w0, other=0, volatile=VOLATILE),
            tl.load(at(x, outer, t + 1, inner), mask=w1, other=0, volatile=VOLATILE),
            tl.load(at(x, outer, t + 2, inner), mask=w2, other=0, volatile=VOLATILE),
            tl.load(at(x, outer, t + 3, inner), mask=w3, other=0, volatile=VOLATILE),
        )
    return result


@triton.jit
def write(x, outer, t, inner, exists, value):
    value = value.to(x[0].dtype.element_ty)
    if len(t.shape) == 3:
        tl.store(at(x, outer, t, inner), value, mask=exists)
    else:
        x0, x1, x2, x3 = quarters(value)
        tl.store(at(x, outer, t, inner), x0, mask=exists[0])
        tl.store(at(x, outer, t + 1, inner), x1, mask=exists[1])
        tl.store(at(x, outer, t + 2, inner), x2, mask=exists[2])
        tl.store(at(x, outer, t + 3, inner), x3, mask=exists[3])


@triton.jit
def first_of(run_a, run_b, last):
    """Of scanned runs, the first in time: the map of them all, ``[BLOCK_ROWS, 1]``."""
    a = tl.sum(tl.where(last, run_a, 0.0), 1, keep_dims=True)
    b = tl.sum(tl.where(last, run_b, 0.0), 1, keep_dims=True)
    return a, b


@triton.jit
def composed(a, b, j):
    """Delta at the first step after the chunk, ``[BLOCK_ROWS, 1]``, from later chunks' maps; j counts from the end."""
    a, b = tl.associative_scan((a, b), 1, combine)
    return tl.sum(tl.where(j == j.shape[1] - 1, a, 0.0), 1, keep_dims=True)


@triton.jit
def entering(summary_a, summary_b, row, rows, chunk, chunks, BLOCK_CHUNKS: tl.constexpr, OVERLAP: tl.constexpr):
    """Delta at the first step after the chunk, from the summaries."""
    if OVERLAP:
        gdc_wait()
    j = tl.arange(0, BLOCK_CHUNKS)[None, :]  # from the window's end, as they lie
    later = (row < rows) & (j < chunks - 1 - chunk)
    a = tl.load(summary_a + (j * rows + row), mask=later, other=0)
    b = tl.load(summary_b + (j * rows + row), mask=later, other=1)  # the map of no step at all is x -> 0 + 1 x
    return composed(a, b, j)


@triton.jit
def publish(words, row, rows, chunk, chunks, a, b, tag, BLOCK_CHUNKS: tl.constexpr):
    """The chunk's map to each earlier chunk."""
    k = tl.arange(0, BLOCK_CHUNKS)[None, :]
    place = (row * chunks + k) * chunks + (chunks - 1 - chunk)
    send(words, place, (row < rows) & (k < chunk), a, b, tag)


@triton.jit
def look_back(words, row, rows, chunk, chunks, tag, BLOCK_CHUNKS: tl.constexpr):
    """Delta at the first step after the chunk, from maps that are being published.

    Later chunks have lower ids, and programs are taken to start in the order of their ids (as every single-pass scan
    takes them to): whoever is waited for has started.
    """
    j = tl.arange(0, BLOCK_CHUNKS)[None, :]  # from the window's end
    later = (row < rows) & (j < chunks - 1 - chunk)
    a, b = receive(words, (row * chunks + chunk) * chunks + j, later, tag)
    return composed(a, tl.where(later, b, 1.0), j)


@triton.jit(do_not_specialize=["tag"])
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
    summary_a,  # the mailbox's words, if LOOK_BACK
    summary_b,
    tag,
    # Python floats reach a kernel as float32 unless annotated; float64 data needs all of gamma.
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
    CONTINUATION: tl.constexpr,  # which of the three it is
    LAMBDA_IS_ONE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TIME: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,  # as many as threads, if LOOK_BACK
    ONE_TILE: tl.constexpr,  # a chunk is one tile
    ROWS_FIRST: tl.constexpr,  # rows lie side by side in memory, rather than the steps of a row
    ROWS_TOGETHER: tl.constexpr,  # how many of them a thread takes, if ROWS_FIRST; divides inner_size
    STAGES: tl.constexpr,  # tiles whose loads are in flight
    LOADS: tl.constexpr,  # of a tile, if it is the only one: AS_NEEDED, IN_ORDER or AT_ONCE
    RUN: tl.constexpr,  # steps in a run: 4; or 1, unless ROWS_FIRST
    OVERLAP: tl.constexpr,  # APPLY is launched as SUMMARY begins, and waits for it where it needs it
    PASS: tl.constexpr,
):
    """One program: BLOCK_ROWS rows of one chunk, in tiles of BLOCK_TIME steps, from its end to its start."""
    log_pi, log_mu, rewards = like(log_pi, values), like(log_mu, values), like(rewards, values)
    terminated, targets, advantages = like(terminated, values), like(targets, values), like(advantages, values)
    continuation = like(continuation, values)
    if truncated is not None:
        truncated = like(truncated, values)
    if mask is not None:
        mask = like(mask, values)
    if step_gamma is not None:
        step_gamma = like(step_gamma, values)

    # A thread takes runs of steps, and a run is one element of the scan: a tile is [rows, runs, steps]. Runs descend in
    # time, since a scan with reverse=True goes through shuffles first.
    RUNS: tl.constexpr = BLOCK_TIME // RUN
    row = (tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    i = (RUNS - 1 - tl.arange(0, RUNS))[None, :] * RUN
    last = i == 0
    row_exists, outer, inner = row < rows, row // inner_size, row % inner_size
    if CONTINUATION == LAST:  # one a row
        last_value = tl.load(at(continuation, outer, 0, inner), mask=row_exists, other=0).to(COMPUTE)[:, :, None]
    if ROWS_FIRST:  # neighbours in memory are different rows' steps: the steps of a run are read apart
        # Else the byte-sized flags' 16 to a thread become everyone's, and the scan goes over lanes more than it must.
        inner = tl.max_contiguous(tl.multiple_of(inner, [ROWS_TOGETHER, 1]), [ROWS_TOGETHER, 1])
    else:
        row_exists, outer, inner = row_exists[:, :, None], outer[:, :, None], inner[:, :, None]
        step = tl.arange(0, RUN)[None, None, :]
        # Runs do not lie as the middle 2 says; it sorts the axes: a warp takes more runs before it takes more rows. The
        # steps stay the innermost axis, and only along it are loads made wider.
        i = tl.max_contiguous(i[:, :, None] + step, [1, 2, RUN])
    chunk = tl.program_id(1)
    # From the end: LOOK_BACK waits for later chunks, which must have started before (else it could wait for ever), and
    # APPLY begins with what SUMMARY read last, and finds it in the cache.
    if PASS != WHOLE and PASS != APPLY:
        chunk = chunks - 1 - chunk
    first = chunk * chunk_tiles
    tiles = 1 if ONE_TILE else tl.minimum(chunk_tiles, tl.cdiv(T, BLOCK_TIME) - first)

    # The map of all that was scanned so far, which comes later in time. All but a summary know what x is: b = -1.
    carry_a = tl.zeros([BLOCK_ROWS, 1], COMPUTE)
    carry_b = tl.full([BLOCK_ROWS, 1], 1 if PASS == SUMMARY else -1, COMPUTE)
    if PASS == SUMMARY and OVERLAP:
        gdc_launch_dependents()
    if PASS == APPLY and not ONE_TILE:
        carry_a = entering(summary_a, summary_b, row, rows, chunk, chunks, BLOCK_CHUNKS, OVERLAP)

    for tile in tl.range(tiles, num_stages=STAGES):
        t = ((first + tiles - 1 - tile) * BLOCK_TIME + i).to(INDEX)
        if ROWS_FIRST:
            e0, e1 = row_exists & (t < T), row_exists & (t + 1 < T)
            e2, e3, e4 = row_exists & (t + 2 < T), row_exists & (t + 3 < T), row_exists & (t + 4 < T)
            exists = (e0, e1, e2, e3)
            real, has_next = together(e0, e1, e2, e3), together(e1, e2, e3, e4)
        else:
            exists = row_exists & (t < T)
            real = exists
            has_next = row_exists & (t + 1 < T)
        where = None
        if mask is not None:
            real = load(mask, outer, t, inner, exists, None, LOADS) != 0
            has_next = real & (load(mask, outer, t + 1, inner, exists, has_next, LOADS) != 0)
            where = real

        # Reads that wait for no other come first; what is behind a cut is read here and there, and never used.
        term = load(terminated, outer, t, inner, exists, where, LOADS) != 0
        trunc = real & ~real
        if truncated is not None:
            trunc = load(truncated, outer, t, inner, exists, where, LOADS) != 0
        value = load(values, outer, t, inner, exists, where, LOADS).to(COMPUTE)
        reward = load(rewards, outer, t, inner, exists, where, LOADS).to(COMPUTE)
        w = tl.exp(
            load(log_pi, outer, t, inner, exists, where, LOADS).to(COMPUTE)
            - load(log_mu, outer, t, inner, exists, where, LOADS).to(COMPUTE)
        )
        if step_gamma is None:
            discount = tl.full(value.shape, gamma, COMPUTE)
        else:
            discount = load(step_gamma, outer, t, inner, exists, where, LOADS).to(COMPUTE)
        # The value ahead is unused, and whatever it may be, where there is no next step.
        if RUN == 1:
            value_ahead = load(values, outer, t + 1, inner, exists, has_next, LOADS).to(COMPUTE)
        elif ROWS_FIRST:
            _, v1, v2, v3 = quarters(value)
            after = tl.load(at(values, outer, t + 4, inner), mask=e4, other=0, volatile=LOADS != AS_NEEDED).to(COMPUTE)
            value_ahead = together(v1, v2, v3, after)
        else:
            v0, v1, v2, v3 = quarters(value)
            after = load(values, outer, t + 1, inner, exists, has_next & (step == RUN - 1), LOADS).to(COMPUTE)
            value_ahead = tl.where(step == RUN - 1, after, together(v1, v2, v3, v0))

        if CONTINUATION != LAST and LOADS == AT_ONCE:
            continued = load(continuation, outer, t, inner, exists, where, LOADS).to(COMPUTE)

        # A cut step that is not real reads nothing, and both its results are 0.
        bootstraps = (~has_next | trunc) & ~term
        cut = term | bootstraps
        counts = real & ~term if CONTINUATION == NEXT else real & bootstraps
        if CONTINUATION == LAST:
            continued = tl.where(counts, last_value, 0.0)
        elif LOADS == AT_ONCE:
            continued = tl.where(counts, continued, 0.0)
        else:
            continued = load(continuation, outer, t, inner, exists, counts, LOADS).to(COMPUTE)
        next_value = tl.where(cut | (CONTINUATION == NEXT), continued, value_ahead)  # 0 where terminated

        rho = clip(w, rho_bar, rho_bar_pointer, COMPUTE)
        c = clip(w, c_bar, c_bar_pointer, COMPUTE)
        if not LAMBDA_IS_ONE:
            c = tl.full([], lam, COMPUTE) * c
        alpha = rho * (reward + discount * next_value - value)
        beta = tl.where(cut, -1.0, discount * c)

        # Runs to maps, their scan, and back: later_a is Delta at the first step after the run.
        if RUN == 1:
            run_a, run_b = tl.reshape(alpha, [BLOCK_ROWS, RUNS]), tl.reshape(beta, [BLOCK_ROWS, RUNS])
        else:
            a0, a1, a2, a3 = quarters(alpha)
            b0, b1, b2, b3 = quarters(beta)
            run_a, run_b = then(a2, b2, a3, b3)
            run_a, run_b = then(a1, b1, run_a, run_b)
            run_a, run_b = then(a0, b0, run_a, run_b)
        later_a = tl.zeros([BLOCK_ROWS, RUNS], COMPUTE)
        later_b = later_a + 1
        if RUNS > 1:
            if PASS == SUMMARY:
                run_a, run_b = tl.associative_scan((run_a, run_b), 1, combine)
            else:
                run_a, run_b, later_a, later_b = tl.associative_scan(
                    (run_a, run_b, later_a, later_b), 1, combine_with_rest
                )
        if PASS != SUMMARY:
            if PASS == APPLY and ONE_TILE:  # as late as can be: the summaries may not be there yet
                carry_a = entering(summary_a, summary_b, row, rows, chunk, chunks, BLOCK_CHUNKS, OVERLAP)
            if PASS == LOOK_BACK:
                tile_a, tile_b = first_of(run_a, run_b, last)
                publish(summary_a, row, rows, chunk, chunks, tile_a, tile_b, tag, BLOCK_CHUNKS)
                carry_a = look_back(summary_a, row, rows, chunk, chunks, tag, BLOCK_CHUNKS)
            if PASS != WHOLE or not ONE_TILE:
                later_a, _ = then(later_a, later_b, carry_a, carry_b)
            if RUN == 1:
                first_a, _ = then(run_a, run_b, carry_a, carry_b)
                delta, delta_ahead = first_a[:, :, None], later_a[:, :, None]
            else:
                a3, _ = then(a3, b3, later_a, later_b)
                a2, _ = then(a2, b2, a3, b3)
                a1, _ = then(a1, b1, a2, b2)
                a0, _ = then(a0, b0, a1, b1)
                delta, delta_ahead = together(a0, a1, a2, a3), together(a1, a2, a3, later_a)
            write(targets, outer, t, inner, exists, value + delta)
            target_ahead = value_ahead + delta_ahead
            if not LAMBDA_IS_ONE:
                target_ahead = next_value + tl.full([], lam, COMPUTE) * (target_ahead - next_value)
            advantage = reward + discount * tl.where(cut, next_value, target_ahead) - value
            if WEIGHTED:
                advantage = clip(w, pg_rho_bar, pg_rho_bar_pointer, COMPUTE) * advantage
            write(advantages, outer, t, inner, exists, advantage)
        if not ONE_TILE or PASS == SUMMARY:
            tile_a, tile_b = first_of(run_a, run_b, last)
            carry_a, carry_b = then(tile_a, tile_b, carry_a, carry_b)
    if PASS == SUMMARY:
        place = (chunks - 1 - chunk) * rows + row
        tl.store(summary_a + place, carry_a, mask=row < rows)
        tl.store(summary_b + place, carry_b, mask=row < rows)
