"""What the IMPALA examples share: CartPole-v1, an actor and a critic, and the learner. Not run by itself."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import BaseCollector
from torchrl.envs import EnvBase, GymEnv, RewardSum, SerialEnv, TransformedEnv
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss, LossModule
from torchrl.objectives.value import VTrace
from tqdm import tqdm

from vtrace_plugins.torchrl import TritonVTrace

GAMMA = 0.99
ENVS, STEPS = 8, 32  # of each asynchronous actor


def environments(number: int) -> EnvBase:
    return TransformedEnv(
        SerialEnv(number, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True)), RewardSum()
    )


def network(outputs: int, gain: float) -> nn.Sequential:
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    for layer, scale in zip(layers[::2], (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def make_actor() -> ProbabilisticActor:
    return ProbabilisticActor(
        TensorDictModule(network(2, 0.01), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )


class Learner:
    """``make_loss`` (A2C) on whatever the actors send, ``passes`` times each batch, corrected by ``estimator``."""

    def __init__(
        self,
        actor: ProbabilisticActor,
        estimator: type[VTrace] = TritonVTrace,
        make_loss: Callable[..., LossModule] = A2CLoss,
        passes: int = 1,
    ) -> None:
        self.actor, self.passes = actor, passes
        critic = ValueOperator(network(1, 1.0), in_keys=["observation"])
        self.loss = make_loss(
            actor, critic, entropy_coeff=0.01, critic_coeff=0.5, loss_critic_type="l2", functional=False
        )
        self.advantage = estimator.for_loss(self.loss, gamma=GAMMA)  # the one line that differs
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=1e-3)
        self.updates = self.frames = 0
        self.returns: deque[float] = deque(maxlen=20)
        self.ratios: deque[torch.Tensor] = deque(maxlen=50)
        self.history: list[tuple[int, float]] = []

    def update(self, data: TensorDictBase) -> None:
        with torch.no_grad():
            dist = self.actor.get_dist(data.select(*self.actor.in_keys))
            self.ratios.append((dist.log_prob(data["action"]) - data["action_log_prob"]).exp())
        for _ in range(self.passes):
            self.advantage(data)  # anew at each pass, for the policy and the values that there are by now
            losses = self.loss(data)
            self.optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
            nn.utils.clip_grad_norm_(self.loss.parameters(), 0.5)
            self.optimizer.step()
        self.updates += 1
        self.frames += data.numel()
        self.returns.extend(data["next", "episode_reward"][data["next", "done"]].tolist())
        self.history.append((self.frames, self.mean_return))

    @property
    def mean_return(self) -> float:
        """Over the last 20 episodes."""
        return sum(self.returns) / max(1, len(self.returns))

    def reached(self, wanted: float) -> bool:
        return len(self.returns) == self.returns.maxlen and self.mean_return >= wanted

    def summary(self) -> str:
        lines = [f"\n{'frames':>10}  mean return of the last 20 episodes"]
        for at, value in self.history[:: max(1, len(self.history) // 10)] + self.history[-1:]:
            lines.append(f"{at:>10}  {value:6.1f}  {'#' * round(value / 10)}")
        ratio = torch.cat([x.flatten() for x in self.ratios])
        lines.append(
            f"\nimportance ratio pi/mu over the last {len(self.ratios)} updates: mean {ratio.mean():.3f} "
            f"(1 in expectation, at any lag), deviation {ratio.std():.3f}, clipped {(ratio > 1).float().mean():.0%}"
        )
        verdict = "solved" if self.mean_return >= 450 else "not solved"
        return "\n".join([*lines, f"mean return {self.mean_return:.1f} over the last 20 episodes, {verdict}"])


def asynchronous_arguments(description: str | None, **also: str) -> argparse.Namespace:
    """``also``: more options, each with its help."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frames", type=int, default=1_000_000, help="stop after this many environment steps")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--every", type=int, default=4, help="send weights every so many updates")
    parser.add_argument("--stop-at", type=float, default=475.0, help="stop at this mean return over 20 episodes")
    for name, what in also.items():
        parser.add_argument(f"--{name}", help=what)
    args = parser.parse_args()
    if args.every < 1 or args.actors < 1 or args.frames < ENVS * STEPS:
        parser.error(f"--every and --actors must be at least 1, and --frames at least one batch, {ENVS * STEPS}")
    return args


def batches(
    learner: Learner,
    args: argparse.Namespace,
    make_collector: Callable[[int], BaseCollector],
    means_a_dead_actor: Callable[[Exception], bool],
) -> Iterator[tuple[TensorDictBase, float]]:
    """Data as it arrives, and how many updates its policy is behind, on average."""
    while learner.frames < args.frames:
        collector = make_collector(args.frames - learner.frames)
        collector.set_seed(args.seed)
        sent_at = [learner.updates]  # by version
        try:
            for data in collector:
                yield data, learner.updates - torch.tensor(sent_at)[data["policy_version"].long()].float().mean().item()
                if learner.updates - sent_at[-1] >= args.every:
                    collector.update_policy_weights_()
                    sent_at.append(learner.updates)
        except Exception as error:
            if not means_a_dead_actor(error):
                raise
            print(f"\nAn actor died ({str(error).splitlines()[0]}): starting them anew.", flush=True)
        finally:
            collector.shutdown()


def learn(
    args: argparse.Namespace,
    make_collector: Callable[[ProbabilisticActor, int], BaseCollector],
    means_a_dead_actor: Callable[[Exception], bool],
    **learner_options: Any,
) -> None:
    """From what ``make_collector(actor, frames)`` collects, until the return is reached or the frames are used."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # networks this small lose more to threads than they gain
    learner = Learner(make_actor(), **learner_options)
    lags = []
    with tqdm(total=args.frames, unit="frame", mininterval=0.5) as progress:
        arriving = batches(learner, args, lambda frames: make_collector(learner.actor, frames), means_a_dead_actor)
        for data, lag in arriving:
            lags.append(lag)
            learner.update(data)
            progress.update(data.numel())
            progress.set_postfix(mean_return=f"{learner.mean_return:.0f}", lag=f"{lag:.1f}")
            if learner.reached(args.stop_at):
                break
        arriving.close()
    print(learner.summary())
    print(f"lag: {sum(lags) / len(lags):.1f} updates on average, {max(lags):.1f} at most")
