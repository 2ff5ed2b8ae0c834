"""Steps of several episodes in one row whose ends no flag marks: an error, or a finding of ``validate``."""

import pytest
import torch
from rollouts import ACTORS, critic, rollout
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler, TensorDictReplayBuffer

from vtrace_plugins import VTraceError
from vtrace_plugins.torchrl import TritonVTrace

KEYS = {"trajectory ids": ("collector", "traj_ids"), "ids at the root": "traj_ids", "is_init": "is_init"}


def estimator(actor, value=None, **kwargs):
    return TritonVTrace(
        gamma=0.97, actor_network=actor, value_network=value or critic(), weight_advantages=True, **kwargs
    )


def marked(rows=2, T=20, key=("collector", "traj_ids")):
    """Data whose flags and ids agree: an episode ends after every fifth step."""
    actor = ACTORS["Categorical"]()
    data = rollout(actor, rows, T, boundaries=0.0)
    episode = torch.arange(T).expand(rows, T) // 5
    end = (torch.arange(T).expand(rows, T) % 5 == 4)[..., None]
    for name in ("done", "terminated"):
        data["next", name] = end.clone()
    if key == "is_init":
        data[key] = (torch.arange(T).expand(rows, T) % 5 == 0)[..., None]
    else:
        data[key] = episode + 10 * torch.arange(rows)[:, None]
    return actor, data


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("time_dim", [0, 1])
def test_flags_that_are_missing(key, time_dim):
    actor, data = marked(key=key)
    data = data if time_dim == 1 else data.transpose(0, 1).contiguous()
    advantage = estimator(actor, time_dim=time_dim)
    advantage(data.clone())
    assert advantage.validate(data), str(advantage.validate(data))
    for name in ("done", "terminated"):
        data["next", name][1 if time_dim == 1 else 4, 4 if time_dim == 1 else 1] = False
    with pytest.raises(VTraceError, match=r"expected one episode wherever .*done.*, got another episode after 1 steps"):
        advantage(data.clone())
    (found,) = [found for found in advantage.validate(data).findings if "another episode" in found.message]
    assert found.severity == "error" and found.argument == str(key)


def test_padding_is_of_no_episode():
    actor, data = marked()
    data["next", "done"][:, 14] = data["next", "terminated"][:, 14] = False
    mask = (torch.arange(20) < 15).expand(2, 20)
    data["collector", "mask"] = mask
    estimator(actor)(data)


def test_a_truncation_is_an_end():
    actor, data = marked()
    data["next", "truncated"] = data["next", "done"].clone()
    data["next", "terminated"].zero_()
    estimator(actor)(data)


def test_environments_flattened_into_one_row():
    """As a collector of several workers does with ``cat_results=0`` and environments that have no batch."""
    actor, data = marked(rows=3, T=7)
    with pytest.raises(VTraceError, match="traj_ids"):
        estimator(actor)(data.reshape(21))


def test_steps_in_random_order():
    """A loss that finds no advantage calls its estimator on whatever minibatch it is given."""
    actor, data = marked()
    with pytest.raises(VTraceError, match="call the estimator before anything is shuffled"):
        estimator(actor)(data[:, torch.randperm(20)])


def test_memory_mapped_steps_in_random_order(tmp_path):
    actor, data = marked()
    with pytest.raises(VTraceError, match="traj_ids"):
        estimator(actor)(data[:, torch.randperm(20)].memmap(tmp_path))


def test_under_a_transform_nothing_is_read():
    """There is no data to look at; the results are those of the whole batch."""
    actor, data = marked(rows=3)
    advantage = estimator(actor)
    wanted = advantage(data.clone())["advantage"]
    torch.testing.assert_close(torch.vmap(lambda td: advantage(td)["advantage"])(data.clone()), wanted)


def test_nothing_is_written_and_other_findings_keep_their_entries():
    actor, data = marked()
    data["next", "reward"][0, 3] = torch.nan
    before = data.clone()
    report = estimator(actor).validate(data)
    assert set(data.keys(True, True)) == set(before.keys(True, True))
    assert [found.argument for found in report.findings if found.severity == "error"] == ["('next', 'reward')"]


def nested(nest):
    """An actor, a critic and a stored stream of ten-step episodes whose done entries are under ``nest``."""
    net = TensorDictModule(nn.Linear(4, 3), ["observation"], ["logits"])
    actor = ACTORS["Categorical"]()
    actor.module[0].module = net.module
    T = 60
    data = TensorDict({"observation": torch.randn(T, 4)}, [T])
    with torch.no_grad():
        actor(data)
    end = (torch.arange(T) % 10 == 9)[:, None]
    data["next"] = TensorDict({"observation": torch.randn(T, 4), "reward": torch.randn(T, 1)}, [T])
    for name, flag in (("done", end), ("terminated", end), ("truncated", torch.zeros_like(end))):
        data.set(("next", *nest, name), flag.clone())
    data["collector", "traj_ids"] = torch.arange(T) // 10
    data["is_init"] = (torch.arange(T) % 10 == 0)[:, None]
    return actor, data


def sample(data, buffer=TensorDictReplayBuffer, **options):
    sampler = SliceSampler(slice_len=4, traj_key=("collector", "traj_ids"), **options)
    replay = buffer(storage=LazyTensorStorage(len(data)), sampler=sampler, batch_size=24)
    replay.extend(data)
    found = replay.sample()
    return found[0] if isinstance(found, tuple) else found


def test_slices_whose_ends_the_sampler_marks():
    torch.manual_seed(0)
    actor, data = nested(())
    advantage = estimator(actor)
    for _ in range(5):
        batch = sample(data)
        advantage(batch.clone())
        assert advantage.validate(batch), str(advantage.validate(batch))


def test_slices_under_nested_done_keys_need_the_samplers_option():
    torch.manual_seed(0)
    actor, data = nested(("agents",))
    advantage = estimator(actor)
    advantage.set_keys(done=("agents", "done"), terminated=("agents", "terminated"))
    with pytest.raises(VTraceError, match="SliceSampler's truncated_key"):
        advantage(sample(data))
    advantage(sample(data, truncated_key=("next", "agents", "truncated")))


def test_slices_of_a_plain_replay_buffer():
    """It hands out data without the marks: they are beside it, in the information of the sample."""
    torch.manual_seed(0)
    actor, data = nested(())
    with pytest.raises(VTraceError, match="Mark the ends of slices"):
        estimator(actor)(sample(data, ReplayBuffer))


@pytest.mark.gpu
def test_on_a_gpu_forward_does_not_wait_and_validate_finds_it():
    actor, data = marked()
    data["next", "done"][:, 4] = data["next", "terminated"][:, 4] = False
    advantage, data = estimator(actor.cuda(), critic().cuda()), data.cuda()
    advantage(data.clone())
    torch.cuda.set_sync_debug_mode("error")
    try:
        advantage(data.clone())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert "another episode after 2 steps" in str(advantage.validate(data))
