"""gamma and the clips keep their precision, whatever is done to the module that holds them."""

import copy
import pickle

import pytest
import torch
from rollouts import ACTORS, critic, rollout
from torch import nn
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import VTrace

from vtrace_plugins.torchrl import TritonVTrace

NUMBERS = {"gamma": 0.99, "rho_thresh": 1.1, "c_thresh": 0.9, "pg_rho_thresh": 2.3}


def make(**numbers):
    return TritonVTrace(actor_network=ACTORS["Categorical"](), value_network=critic(), **NUMBERS | numbers)


def through_a_state_dict(estimator):
    other = make(gamma=0.5, rho_thresh=9.0, c_thresh=0.1)  # pg_rho_thresh is upstream's no more than ours
    other.load_state_dict(estimator.half().state_dict())
    return other


THROUGH = {
    "to(bfloat16)": lambda x: x.to(torch.bfloat16),
    "to(cpu, float16)": lambda x: x.to("cpu", torch.float16),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "float": lambda x: x.float(),
    "double": lambda x: x.double(),
    "there and back": lambda x: x.half().double().bfloat16().float(),
    "deepcopy": lambda x: copy.deepcopy(x.half()),
    "pickle": lambda x: pickle.loads(pickle.dumps(x.half())),
    "state dict": through_a_state_dict,
    "to(meta) and to_empty": lambda x: copy.deepcopy(x).to_empty(device="cpu"),
}


def assert_exact(estimator):
    for name, wanted in NUMBERS.items():
        number = getattr(estimator, name)
        assert number.item() == wanted and number.shape == (), name
        assert name in dict(estimator.named_buffers())


@pytest.mark.parametrize("how", THROUGH)
def test_through(how):
    assert_exact(THROUGH[how](make()))


@pytest.mark.parametrize("how", [how for how in THROUGH if how != "state dict"])
def test_inside_another_module(how):
    outer = THROUGH[how](nn.ModuleList([nn.ModuleList([make()]), nn.Linear(2, 2)]))
    assert_exact(outer[0][0])


@pytest.mark.parametrize("functional", [True, False], ids=["functional", "stateful"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_inside_a_loss(functional, dtype):
    loss = ClipPPOLoss(ACTORS["Categorical"](), critic(), functional=functional)
    loss.make_value_estimator(TritonVTrace.for_loss(loss, **NUMBERS))
    loss.to(dtype)
    assert_exact(loss.value_estimator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_under_another_default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert_exact(make())
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)], ids=str)
def test_on_a_device_by_name(device):
    estimator = make(device=device)
    assert estimator.gamma.device.type == str(device)
    assert_exact(estimator)


def test_tensors_stay_what_they_are():
    estimator = make(gamma=torch.tensor(0.99), rho_thresh=torch.tensor(1.1, dtype=torch.float64)).half()
    assert estimator.gamma.dtype == torch.float32 and estimator.gamma == torch.tensor(0.99)
    assert estimator.rho_thresh.dtype == torch.float64 and estimator.rho_thresh.item() == 1.1


def test_a_parameter_becomes_a_buffer():
    estimator = make(gamma=nn.Parameter(torch.tensor(0.99)))
    assert "gamma" in dict(estimator.named_buffers()) and "gamma" not in dict(estimator.named_parameters())
    assert estimator(rollout(ACTORS["Categorical"](), 2, 5))["advantage"].isfinite().all()


def test_the_horizon_of_a_bfloat16_pipeline():
    """Ratios of 1, reward 1 at each of 2000 steps, V = 0: the first target is 100, which bfloat16 holds."""
    actor, value = ACTORS["Categorical"](), critic()
    for p in value.parameters():
        nn.init.zeros_(p)
    loss = ClipPPOLoss(actor, value, functional=False)
    loss.make_value_estimator(TritonVTrace.for_loss(loss, gamma=0.99))
    loss.to(torch.bfloat16)
    data = rollout(ACTORS["Categorical"](), 1, 2000, boundaries=0.0)
    data = data.apply(lambda x: x.bfloat16() if x.is_floating_point() else x)
    data["next", "reward"].fill_(1.0)
    data["action_log_prob"] = loss.value_estimator._log_pi(data, data["observation"].device)
    assert loss.value_estimator(data)["value_target"][0, 0].item() == 100


def test_float64_data_has_the_discount_that_was_written():
    """Upstream's is rounded to float32 on the way."""
    actor, value = ACTORS["Normal"]().double(), critic().double()
    data = rollout(ACTORS["Normal"](), 2, 30).apply(lambda x: x.double() if x.is_floating_point() else x)
    found = TritonVTrace(gamma=0.97, actor_network=actor, value_network=value, weight_advantages=True)(data.clone())
    as_tensor = torch.tensor(0.97, dtype=torch.float64)
    wanted = TritonVTrace(gamma=as_tensor, actor_network=actor, value_network=value, weight_advantages=True)(
        data.clone()
    )
    assert torch.equal(found["value_target"], wanted["value_target"])


def test_upstreams_checkpoint_fits_and_ours_fits_upstream():
    networks = {"actor_network": ACTORS["Categorical"](), "value_network": critic()}
    upstream = VTrace(gamma=0.99, rho_thresh=1.1, c_thresh=0.9, **networks)
    ours = make(gamma=0.5, rho_thresh=9.0, c_thresh=0.1)
    ours.load_state_dict(upstream.state_dict())
    for name in ("gamma", "rho_thresh", "c_thresh"):
        assert getattr(ours, name).float() == getattr(upstream, name)
    upstream.load_state_dict(make().state_dict())


@pytest.mark.gpu
def test_to_a_gpu_and_back():
    estimator = make().half().to("cuda")
    assert estimator.gamma.is_cuda
    assert_exact(estimator.cpu())
