"""Which tile, which grid, and the launch of :mod:`kernels`. Importing this imports triton."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import cycle
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vtrace_plugins._core.checks import VTraceError
from vtrace_plugins._core.inputs import CLIPS, CONTINUATIONS, Inputs
from vtrace_plugins._core.kernels import (
    APPLY,
    AS_NEEDED,
    AT_ONCE,
    BOOTSTRAP,
    IN_ORDER,
    LAST,
    LOOK_BACK,
    NEXT,
    SUMMARY,
    WHOLE,
    vtrace_kernel,
)
from vtrace_plugins._core.layout import compute_dtype, empty_results, folded_shape

INTERPRETED = not isinstance(vtrace_kernel, triton.JITFunction)  # TRITON_INTERPRET=1: runs on CPU tensors
_MOST_CHUNKS = 1024  # a program holds the maps of all later chunks of its rows at once
# Of launches that look back: NaNs whose upper half is one in 16 bits and differs from the lower, so that memory which
# was used for anything else is not full of one.
_tags = cycle(range(0x7FA10001, 0x7FA14001))
_HERE = nullcontext()  # made once, as each launch enters it
_gpus = cache(torch.cuda.device_count)
_KINDS = dict(zip(CONTINUATIONS, (BOOTSTRAP, LAST, NEXT), strict=True))
_POOL = (*Inputs._fields, "targets", "advantages")


class Plan(NamedTuple):
    """The tile (powers of two), how many tiles make a chunk, and how many tiles' loads are in flight.

    ``loads`` (of a chunk of one tile) and ``run`` (of steps, along time): see the kernel. ``look_back``: chunks of one
    tile, no more of them than a program has threads, take one launch, not two (float32, and no ROCm).
    """

    block_rows: int
    block_time: int
    warps: int
    chunk_tiles: int
    stages: int = 1
    loads: tl.constexpr = AS_NEEDED
    run: int = 4
    look_back: bool = False


def choose(rows: int, time: int, time_is_contiguous: bool, multiprocessors: int) -> Plan:
    """The plan for ``rows`` windows of ``time`` steps, from the sweep in ``benchmarks/tune.py``."""
    plan = _along_time if time_is_contiguous else _along_rows
    return plan(rows, time, multiprocessors)


def _along_time(rows: int, time: int, multiprocessors: int) -> Plan:
    """Whole rows in one tile if they fit, else tile by tile; few long rows in chunks. Mostly four steps a thread."""
    if 2048 < time <= 65536 and rows < 2 * multiprocessors:
        return Plan(1, 512, 4, 1, look_back=True) if time <= 16384 else Plan(1, 1024, 8, 1, look_back=True)
    if time > 2048 and rows < multiprocessors:
        block_time, warps = (512, 4) if time <= 512 * _MOST_CHUNKS else (2048, 8)
        return Plan(1, block_time, warps, triton.cdiv(triton.cdiv(time, block_time), _MOST_CHUNKS))
    if time > 2048:
        return Plan(1, 512, 4, triton.cdiv(time, 512), stages=3)
    block_time = max(8, triton.next_power_of_2(time))
    steps = rows * block_time / multiprocessors
    if steps <= 64 and block_time <= 32:
        return Plan(32 // block_time, block_time, 1, 1, loads=AT_ONCE, run=1)
    at_most = 2 ** (max(1, rows // multiprocessors).bit_length() - 1)  # rows, or some multiprocessors have none
    at_least = min(8, 256 // block_time)  # spare rows cost less than a program of a single warp
    block_rows = max(min(at_most, 32, 1024 // block_time), at_least) if block_time <= 256 else 1
    loads = AT_ONCE if steps <= 64 else IN_ORDER if steps <= 512 else AS_NEEDED
    return Plan(block_rows, block_time, max(1, block_rows * block_time // 128), 1, loads=loads)


def _along_rows(rows: int, time: int, multiprocessors: int) -> Plan:
    """Rows share cache lines, so a tile holds at least 8. The more rows, the longer a program goes on alone."""
    each = rows // multiprocessors
    if each >= 192 and time > 16:
        block_time = 8 if time <= 64 else 16
        return Plan(32, block_time, 1, triton.cdiv(time, block_time), stages=2)
    if time <= 128:
        whole = max(8, triton.next_power_of_2(time))
        if each >= 192:
            return Plan(32, whole, max(1, whole // 8), 1, loads=IN_ORDER)
        return Plan(16 if each >= 16 or whole == 8 else 8, whole, max(1, whole // 16), 1, loads=IN_ORDER)
    if each >= 32:
        return Plan(32, 64, 4, triton.cdiv(time, 64), stages=3)
    if each >= 16:
        return Plan(16, 64, 4, triton.cdiv(time, 64), stages=3)
    if each >= 4:
        return Plan(16, 16, 1, max(4, triton.cdiv(time, 16 * 64)), stages=2)
    if each >= 3 and 1024 < time <= 2048:
        return Plan(16, 32, 2, 2)
    if each >= 1 and time <= 2048:
        return Plan(16, 64, 8, 1, loads=IN_ORDER if time <= 1024 else AS_NEEDED)
    if each >= 1:
        return Plan(16, 32, 1, triton.cdiv(time, 32 * 32), stages=2)
    if time <= 2048:
        return Plan(8, 128, 8, 1, loads=IN_ORDER)
    if rows <= 8:
        return Plan(8, 128, 8, triton.cdiv(time, 128 * 128))
    return Plan(16, 128, 8, triton.cdiv(time, 128 * 64))


def fold(name: str, t: Tensor, shape: torch.Size, folded: tuple[int, int, int]) -> Tensor:
    """t over [outer, time, inner]: a view wherever its strides allow, else a copy."""
    if name == "last_value":  # its only step is read at t = T - 1
        return t.reshape(folded[0], 1, folded[2]).expand(folded)
    return t.expand(shape).reshape(folded)


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _starts_dependents_early(device: torch.device) -> bool:
    """Whether a kernel can be launched before the one it depends on has ended (programmatic dependent launch)."""
    return (
        device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)
    )


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Within it, kernels go to ``device``."""
    elsewhere = device.type == "cuda" and _gpus() > 1 and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else _HERE


class Geometry(NamedTuple):
    """How a kernel goes over the windows, forward or backward."""

    folded: tuple[int, int, int]
    time_is_contiguous: bool
    plan: Plan
    chunks: int
    grid: tuple[int, int, int]


def geometry(x: Inputs, shortest_run: int = 1) -> Geometry:
    """``shortest_run``: of steps, that the kernel's threads take."""
    outer, time, inner = folded = folded_shape(x.values.shape, x.time_dim)
    time_is_contiguous = x.values.stride(x.time_dim) == 1 or time == 1
    plan = choose(outer * inner, time, time_is_contiguous, multiprocessors(x.values.device))
    run = max(plan.run, shortest_run if time_is_contiguous else 4)
    plan = plan._replace(block_rows=plan.block_rows * run // plan.run, run=run)  # for as many threads
    chunks = triton.cdiv(triton.cdiv(time, plan.block_time), plan.chunk_tiles)
    return Geometry(folded, time_is_contiguous, plan, chunks, (triton.cdiv(outer * inner, plan.block_rows), chunks, 1))


def input_names(x: Inputs) -> list[str]:
    """The inputs that both kernels begin with, in their order; the continuation is the one that was given."""
    return ["log_pi", "log_mu", "values", "rewards", "terminated", "truncated", x.continuation, "mask", "gamma"]


def settled(x: Inputs, where: Geometry, views: Iterable[Tensor], block_chunks: int | None = None) -> list[Any]:
    """The kernels' common arguments from ``gamma`` to ``BLOCK_CHUNKS``. ``views``: all that they address."""
    (outer, time, inner), _, plan, chunks, _ = where
    furthest = max(sum(size * stride for size, stride in zip(where.folded, t.stride(), strict=True)) for t in views)
    numbers = (x.gamma, *(getattr(x, name) for name in CLIPS), x.lam)
    return [
        *(0.0 if isinstance(number, Tensor) else number for number in numbers),
        *(outer * inner, time, inner, plan.chunk_tiles, chunks),
        _KINDS[x.continuation],
        x.lam == 1,
        x.weight_advantages,
        tl.float64 if compute_dtype(x) is torch.float64 else tl.float32,
        tl.int64 if furthest >= 2**31 else tl.int32,
        plan.block_rows,
        plan.block_time,
        block_chunks or max(8, triton.next_power_of_2(chunks)),
    ]


@contextmanager
def _a_compiler_wanted() -> Iterator[None]:
    """Triton's own message about a missing C compiler says what to set, not what to do."""
    try:
        yield
    except RuntimeError as error:
        if "C compiler" not in str(error):
            raise
        wanted = "a C compiler for 'triton', which builds its launcher (install gcc, set CC, or pass backend='torch')"
        raise VTraceError("backend", wanted, "none") from error


def straight(handle: Any, grid: tuple[int, int, int], device: torch.device) -> Callable[[list[Any]], None]:
    """``handle[grid]``, which launches a compiled kernel, without what it does for a profiler when there is none.

    That takes as long as the launch itself. ``torch.compile`` launches triton's kernels in the same way.
    """
    usual = handle[grid]  # it loads the kernel: then there is a function
    run, function, metadata = handle.run, handle.function, handle.packed_metadata
    knobs, stream, index = triton.knobs.runtime, triton.runtime.driver.active.get_current_stream, device.index
    x, y, z = grid

    def wanted(hook: Any) -> Any:
        return hook is not None and getattr(hook, "calls", True)  # a chain of none is none

    def launch(arguments: list[Any]) -> None:
        if wanted(knobs.launch_enter_hook) or wanted(knobs.launch_exit_hook):
            usual(*arguments)
        else:
            run(x, y, z, stream(index), function, metadata, None, None, None, *arguments)

    return launch


def prepare(x: Inputs) -> Callable[[Inputs], tuple[Tensor, Tensor]]:
    """The launch for non-empty data of x's signature: everything but the pointers is settled here, once.

    From its second call on it goes to the compiled kernel itself, past triton's binder, which would look at each of
    some fifty arguments anew. The compiled kernel is specialised to dtypes, to pointers' alignment and to integers that
    are 1 or divisible by 16; all of those are in the signature.
    """
    shape, time_dim, device = x.values.shape, x.time_dim, x.values.device
    where = geometry(x)
    (outer, time, inner), time_is_contiguous, plan, chunks, grid = where
    rows, folded, dtype = outer * inner, where.folded, compute_dtype(x)

    results = empty_results(torch.empty_strided(shape, x.values.stride(), device="meta"), time_dim)
    given: dict[str, Any] = dict(zip(_POOL, (*x, *results), strict=True))
    # The kernel's arguments in its order: these as (pointer, strides), then the clips that are tensors as pointers.
    names = [*input_names(x), "targets", "advantages"]
    views = {name: fold(name, given[name], shape, folded) for name in names if isinstance(given[name], Tensor)}
    copied = [(_POOL.index(n), n) for n, view in views.items() if view.data_ptr() != given[n].data_ptr()]
    strides: dict[str, tuple[int, ...]] = {n: view.stride() for n, view in views.items()}
    if time_is_contiguous:  # one offset for all that lie alike; over rows it was measured slower
        strides |= {n: () for n, s in strides.items() if n != "values" and s == strides["values"]}
    strided = [(i, _POOL.index(n), strides[n]) for i, n in enumerate(names) if n in views]
    bare = [(i, _POOL.index(n)) for i, n in enumerate(CLIPS, len(names)) if isinstance(given[n], Tensor)]

    looks_back = plan.look_back and dtype is torch.float32 and torch.version.hip is None
    looks_back &= plan.chunk_tiles == 1 < chunks <= 32 * plan.warps  # a thread waits for a chunk
    summary_places = len(names) + len(CLIPS)
    template = [
        *[None] * (summary_places + 2),
        0,  # tag
        *settled(x, where, views.values(), 32 * plan.warps if looks_back else None),
        plan.chunk_tiles == 1,
        not time_is_contiguous,
        4 if inner % 16 == 0 else 1,  # ROWS_TOGETHER
        1 if dtype is torch.float64 else plan.stages,  # whose tiles ahead need not fit into shared memory
        plan.loads if plan.chunk_tiles == 1 else AS_NEEDED,
        plan.run,
        overlap := chunks > 1 and not looks_back and _starts_dependents_early(device),
    ]
    early: dict[str, bool] = {"launch_pdl": True} if overlap else {}
    if chunks == 1:
        passes: tuple[tuple[tl.constexpr, dict[str, bool]], ...] = ((WHOLE, {}),)
    else:
        passes = ((LOOK_BACK, {}),) if looks_back else ((SUMMARY, {}), (APPLY, early))
    # A chunk's map is two numbers; or two words, for every chunk that looks back at it.
    size, number = (2 * rows * chunks * chunks, torch.int64) if looks_back else (2 * rows * chunks, dtype)
    compiled: list[Any] = []

    def launch(x: Inputs) -> tuple[Tensor, Tensor]:
        try:
            results = empty_results(x.values, time_dim)
            workspace = x.values.new_empty(size, dtype=number) if chunks > 1 else None
            pool: list[Any] = [*x, *results]
            for place, name in copied:
                pool[place] = fold(name, pool[place], shape, folded)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"vtrace: its results and workspace, {rows} windows of {time} steps, do not fit on {device}; "
                "free memory or pass fewer windows at once"
            ) from error
        launches = tuple(compiled)  # once: another thread may fill it meanwhile
        address: Any = Tensor.data_ptr if launches else lambda t: t
        arguments: list[Any] = template.copy()
        for i, place, strides in strided:
            arguments[i] = (address(pool[place]), *strides)
        for i, place in bare:
            arguments[i] = address(pool[place])
        if looks_back:
            arguments[summary_places] = address(workspace)
            arguments[summary_places + 2] = next(_tags)
        elif workspace is not None:
            first = workspace.data_ptr()
            halves = (first, first + workspace.nbytes // 2) if launches else workspace.chunk(2)
            arguments[summary_places : summary_places + 2] = halves
        with current(device):
            if launches:
                for one, (which, _) in zip(launches, passes, strict=True):
                    one([*arguments, which])
            else:
                with _a_compiler_wanted():
                    handles = [
                        vtrace_kernel[grid](*arguments, which, num_warps=plan.warps, **early) for which, early in passes
                    ]
                compiled[:] = [] if INTERPRETED else [straight(handle, grid, device) for handle in handles]
        return results

    return launch
