"""The buffers with their rows on a GPU: the same numbers as on the CPU, and nothing comes back but what SB3 logs."""

import copy

import numpy as np
import pytest
import torch
from worlds import ALGORITHMS, RECURRENT, collect, envs, move

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_a_refresh_is_that_of_the_cpu(algorithm):
    model = algorithm.make(envs(limit=4), device="cuda", rollout_buffer_kwargs={"replay": 1})
    buffer = collect(model, 2)
    move(model)
    on_cpu = copy.copy(model)
    on_cpu.policy = copy.deepcopy(model.policy).cpu()
    on_cpu.device = torch.device("cpu")
    twin = copy.deepcopy(buffer)
    twin.device = torch.device("cpu")
    for rollout in twin.replayed:
        rollout.rows = {
            name: {k: v.cpu() for k, v in x.items()} if isinstance(x, dict) else x.cpu()
            for name, x in rollout.rows.items()
        }
    twin.bind(on_cpu)
    for each in (buffer, twin):
        (batch,) = each.get(None)
        assert batch.returns.device.type == batch.actions.device.type == torch.device(each.device).type
    np.testing.assert_allclose(buffer.returns, twin.returns, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(buffer.advantages, twin.advantages, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(buffer.replayed, twin.replayed, strict=True):
        torch.testing.assert_close(ours.results["returns"].cpu(), theirs.results["returns"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a is not RECURRENT], ids=str)
def test_handing_out_minibatches_waits_for_nothing(algorithm):
    model = algorithm.make(envs(), device="cuda")
    buffer = collect(model)
    minibatches = buffer.get(16)
    next(minibatches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        list(minibatches)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_it_trains():
    for algorithm in ALGORITHMS:
        model = algorithm.make(envs(limit=4), device="cuda", rollout_buffer_kwargs={"replay": 1}).learn(48 * 3)
        assert all(torch.isfinite(p).all() for p in model.policy.parameters())
