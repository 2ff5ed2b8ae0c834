"""Chunks in one launch: its programs send each other their maps through memory that nobody cleared."""

import oracle
import pytest
import torch
from helpers import assert_close, call, rounded, tensors, window

from vtrace_plugins import vtrace

on = pytest.mark.parametrize(
    "on", [("triton", "cpu"), pytest.param(("triton", "cuda"), marks=pytest.mark.gpu)], ids=lambda on: on[1]
)
CHUNKS = 3


@pytest.fixture
def words(monkeypatch):
    """The workspaces of all calls, which begin full of maps with the tags of other launches."""
    from vtrace_plugins._core import launch, ops

    plan = launch.Plan(2, 8, 1, 1, look_back=True)
    monkeypatch.setattr(launch, "choose", lambda *_: plan)
    monkeypatch.setattr(ops, "_launches", {})
    found, new_empty = [], torch.Tensor.new_empty

    def stale(t, size, dtype=None, **options):
        words = new_empty(t, size, dtype=dtype, **options)
        if dtype is torch.int64:
            words.copy_((next(launch._tags) << 32) + torch.arange(words.numel(), device=words.device).view(size))
            found.append(words)
        return words

    monkeypatch.setattr(torch.Tensor, "new_empty", stale)
    return found


@on
def test_what_lies_in_memory_is_not_taken_and_no_tag_stays(on, words):
    data = rounded(window(3, 8 * CHUNKS), torch.float32)
    wanted = oracle.loop(**data, gamma=0.97)
    for _ in range(2):  # the second call takes the short way
        for actual, expected in zip(call(on, data, dtype=torch.float32, gamma=0.97), wanted, strict=True):
            assert_close(actual, expected)
    assert len(words) == 2
    for each in words:
        pairs = each.reshape(3, CHUNKS, CHUNKS, 2).cpu()  # row, receiver, sender from the end
        for chunk in range(CHUNKS):
            later = CHUNKS - 1 - chunk
            assert (pairs[:, chunk, :later] == 0).all(), "read and cleared"
            assert (pairs[:, chunk, later:] != 0).all(), "nobody's"


@on
def test_float64_takes_two_launches(on, words):
    data = tensors(window(3, 8 * CHUNKS), on[1])
    found = vtrace(**data, gamma=0.97, backend=on[0])
    wanted = vtrace(**data, gamma=0.97, backend="torch")
    assert not words
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)


def data_that_looks_back(rows, steps, dtype=torch.float32):
    """On the GPU; of as many rows as look back there at all, if ``rows`` is None."""
    from vtrace_plugins._core import launch

    multiprocessors = launch.multiprocessors(torch.device("cuda"))
    rows = 2 * multiprocessors - 1 if rows is None else min(rows, 2 * multiprocessors - 1)
    assert launch.choose(rows, steps, True, multiprocessors).look_back
    return tensors(window(rows, steps), "cuda", dtype)


def assert_same(found, wanted):
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "steps", "dtype"),
    [
        (1, 2049, torch.float32),
        (100, 16384, torch.float32),
        (None, 5000, torch.float32),
        (7, 65536, torch.float32),
        (64, 3000, torch.bfloat16),
    ],
)
def test_every_call_and_every_replay_gives_the_same(rows, steps, dtype):
    """In a graph a launch has the same tag each time."""
    data = data_that_looks_back(rows, steps, dtype)
    first = vtrace(**data, gamma=0.99)
    close = 1e-4 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(first, vtrace(**data, gamma=0.99, backend="torch"), atol=close, rtol=close)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [vtrace(**data, gamma=0.99) for _ in range(3)]
    for _ in range(50):
        for x in (x for results in captured for x in results):
            x.fill_(float("nan"))
        graph.replay()
        for results in (*captured, vtrace(**data, gamma=0.99)):
            assert_same(results, first)


@pytest.mark.gpu
def test_beside_each_other_and_a_busy_gpu():
    """Graphs on streams of their own, and a kernel that takes most multiprocessors: a program waits for others only."""
    data = data_that_looks_back(100, 16384)
    first = vtrace(**data, gamma=0.99)
    graphs = [torch.cuda.CUDAGraph() for _ in range(3)]
    captured = []
    for graph in graphs:
        with torch.cuda.graph(graph):
            captured += [vtrace(**data, gamma=0.99) for _ in range(10)]
    streams = [torch.cuda.Stream() for _ in graphs]
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    for _ in range(20):
        busy @ busy
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for results in captured:
        assert_same(results, first)


@pytest.mark.gpu
def test_each_thread_waits_once(monkeypatch):
    """Triton may repeat small loads where that spares an exchange between threads; a wait must not be one of them."""
    from vtrace_plugins._core import launch, ops

    compiled, straight = [], launch.straight
    monkeypatch.setattr(launch, "straight", lambda handle, *rest: compiled.append(handle) or straight(handle, *rest))
    monkeypatch.setattr(ops, "_launches", {})
    for dtype in (torch.float32, torch.bfloat16):
        for rows, steps in ((1, 5000), (3, 5000), (64, 16384), (3, 60000)):
            data = data_that_looks_back(rows, steps, dtype)
            vtrace(**data, gamma=0.97)
            vtrace(**data, gamma=0.97, mask=torch.ones_like(data["terminated"]))
    assert len(compiled) == 16
    for handle in compiled:
        assert handle.asm["ptx"].count("ld.relaxed") == 1
        assert handle.asm["ptx"].count("st.relaxed") == 1
