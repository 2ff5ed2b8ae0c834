"""Actors, critics and tensordicts as TorchRL's collectors make them."""

import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    NormalParamExtractor,
    TensorDictModule,
    set_interaction_type,
)
from torch import distributions as d
from torch import nn
from torchrl.modules import MaskedCategorical, OneHotCategorical, ProbabilisticActor, TanhNormal, ValueOperator

OBSERVATIONS, ACTIONS = 4, 3


def _net(outputs, *more):
    return nn.Sequential(nn.Linear(OBSERVATIONS, 16), nn.Tanh(), nn.Linear(16, outputs), *more)


def _logits(distribution):
    module = TensorDictModule(_net(ACTIONS), ["observation"], ["logits"])
    return ProbabilisticActor(module, ["logits"], distribution_class=distribution, return_log_prob=True)


def _gaussian(distribution):
    module = TensorDictModule(_net(2 * ACTIONS, NormalParamExtractor()), ["observation"], ["loc", "scale"])
    return ProbabilisticActor(module, ["loc", "scale"], distribution_class=distribution, return_log_prob=True)


def _masked():
    """Beside the logits of its net, the distribution takes an entry of the data: which actions there are."""
    module = TensorDictModule(_net(ACTIONS), ["observation"], ["logits"])
    in_keys = {"logits": "logits", "mask": "action_mask"}
    return ProbabilisticActor(module, in_keys, distribution_class=MaskedCategorical, return_log_prob=True)


class IndependentNormal(d.Independent):
    def __init__(self, loc, scale):
        super().__init__(d.Normal(loc, scale), 1)


def _composite():
    """A discrete and a continuous action at once."""
    keys = [("params", "discrete", "logits"), ("params", "continuous", "loc"), ("params", "continuous", "scale")]

    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.logits, self.normal = _net(ACTIONS), _net(2 * ACTIONS, NormalParamExtractor())

        def forward(self, x):
            return self.logits(x), *self.normal(x)

    return ProbabilisticActor(
        TensorDictModule(Split(), ["observation"], keys),
        in_keys=["params"],
        out_keys=[("action", "discrete"), ("action", "continuous")],
        distribution_class=CompositeDistribution,
        distribution_kwargs={
            "distribution_map": {"discrete": d.Categorical, "continuous": IndependentNormal},
            "name_map": {"discrete": ("action", "discrete"), "continuous": ("action", "continuous")},
        },
        return_log_prob=True,
    )


ACTORS = {
    "Categorical": lambda: _logits(d.Categorical),
    "MaskedCategorical": _masked,
    "OneHotCategorical": lambda: _logits(OneHotCategorical),
    "Normal": lambda: _gaussian(IndependentNormal),
    "TanhNormal": lambda: _gaussian(TanhNormal),
    "composite": _composite,
}


def critic(values=1):
    return ValueOperator(_net(values), in_keys=["observation"])


def rollout(actor, *batch, device="cpu", seed=0, boundaries=0.2, features=1, value_dtype=torch.float32):
    """A tensordict ``[*batch]`` (time last) whose actions and log-probs the actor itself has drawn."""
    torch.manual_seed(seed)
    data = TensorDict({"observation": torch.randn(*batch, OBSERVATIONS)}, batch_size=batch)
    if "action_mask" in actor.in_keys:
        data["action_mask"] = torch.arange(ACTIONS) != torch.randint(ACTIONS, (*batch, 1))
    with torch.no_grad(), set_interaction_type(InteractionType.RANDOM):
        data = actor(data)
    terminated = torch.rand(*batch, features) < boundaries
    truncated = ~terminated & (torch.rand(*batch, features) < boundaries)
    data["next"] = TensorDict(
        {
            "observation": torch.randn(*batch, OBSERVATIONS),
            "reward": torch.randn(*batch, features, dtype=value_dtype),
            "done": terminated | truncated,
            "terminated": terminated,
            "truncated": truncated,
        },
        batch_size=batch,
    )
    return data.to(device)


def moved(actor, by=0.3):
    """The actor some updates later."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in actor.parameters():
            p.add_(by * torch.randn_like(p))
    return actor
