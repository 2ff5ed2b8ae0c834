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


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1, 2049), (100, 16384), (263, 5000), (7, 65536)], ids=str)
def test_every_call_and_every_replay_gives_the_same(size):
    """In a graph a launch has the same tag each time; calls on other streams run beside each other."""
    torch.manual_seed(0)
    data = tensors(window(*size), "cuda", torch.float32)
    first = vtrace(**data, gamma=0.99)
    for x, y in zip(first, vtrace(**data, gamma=0.99, backend="torch"), strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [vtrace(**data, gamma=0.99) for _ in range(3)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(100):
        for results in captured:
            for x in results:
                x.fill_(float("nan"))
        graph.replay()
        found = [*captured, vtrace(**data, gamma=0.99)]
        torch.cuda.synchronize()
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(vtrace(**data, gamma=0.99))
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for results in found for x, y in zip(results, first, strict=True))


@pytest.mark.gpu
def test_each_thread_waits_once(monkeypatch):
    """Triton may repeat small loads where that spares an exchange between threads; a wait must not be one of them."""
    from vtrace_plugins._core import launch, ops

    compiled, straight = [], launch.straight
    monkeypatch.setattr(launch, "straight", lambda handle, *rest: compiled.append(handle) or straight(handle, *rest))
    monkeypatch.setattr(ops, "_launches", {})
    for steps in (5000, 60000):
        vtrace(**tensors(window(3, steps), "cuda", torch.float32), gamma=0.97)
    assert len(compiled) == 2
    for handle in compiled:
        assert handle.asm["ptx"].count("ld.relaxed") == 1
        assert handle.asm["ptx"].count("ld.volatile") == 2
