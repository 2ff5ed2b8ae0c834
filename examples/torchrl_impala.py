"""IMPALA-style A2C on CartPole-v1 with TorchRL: actors several updates behind the learner, corrected by V-trace.

    python examples/torchrl_impala.py                     # about a minute on one CPU core
    python examples/torchrl_impala.py --estimator stock   # upstream's estimator, for comparison
    python examples/torchrl_impala.py --plot return.png

The actors run a copy of the policy that is refreshed only every ``--lag`` updates, so all data is off-policy.
"""

from __future__ import annotations

import argparse
from collections import deque
from copy import deepcopy

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, RewardSum, SerialEnv, TransformedEnv
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss
from torchrl.objectives.value import VTrace
from tqdm import tqdm

from vtrace_plugins.torchrl import TritonVTrace

ENVS, STEPS, GAMMA = 16, 32, 0.99


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frames", type=int, default=500_000, help="stop after this many environment steps")
    parser.add_argument("--lag", type=int, default=8, help="the actors get new weights every so many updates")
    parser.add_argument("--stop-at", type=float, default=475.0, help="stop at this mean return over 20 episodes")
    parser.add_argument("--estimator", choices=["ours", "stock"], default="ours")
    parser.add_argument("--plot", metavar="FILE", help="write the return against frames as a picture")
    args = parser.parse_args()
    if args.lag < 1 or args.frames < ENVS * STEPS:
        parser.error(f"--lag must be at least 1 and --frames at least one batch, {ENVS * STEPS}")
    return args


def network(outputs: int, gain: float) -> nn.Sequential:
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    for layer, scale in zip(layers[::2], (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # networks this small lose more to threads than they gain

    env = TransformedEnv(SerialEnv(ENVS, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True)), RewardSum())
    env.set_seed(args.seed)
    actor = ProbabilisticActor(
        TensorDictModule(network(2, 0.01), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(network(1, 1.0), in_keys=["observation"])
    behaviour = deepcopy(actor)
    collector = Collector(env, behaviour, frames_per_batch=ENVS * STEPS, total_frames=args.frames)

    loss = A2CLoss(actor, critic, entropy_coeff=0.01, critic_coeff=0.5, loss_critic_type="l2", functional=False)
    estimator = TritonVTrace if args.estimator == "ours" else VTrace
    advantage = estimator.for_loss(loss, gamma=GAMMA)  # the one line that differs
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)

    returns: deque[float] = deque(maxlen=20)
    ratios: deque[torch.Tensor] = deque(maxlen=50)
    history: list[tuple[int, float]] = []
    frames = 0
    with tqdm(total=args.frames, unit="frame") as progress:
        for update, data in enumerate(collector):
            with torch.no_grad():
                dist = actor.get_dist(data.select(*actor.in_keys))
                ratios.append((dist.log_prob(data["action"]) - data["action_log_prob"]).exp())
            advantage(data)
            losses = loss(data)
            optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
            nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
            optimizer.step()
            if (update + 1) % args.lag == 0:
                behaviour.load_state_dict(actor.state_dict())

            frames += data.numel()
            returns.extend(data["next", "episode_reward"][data["next", "done"]].tolist())
            mean_return = sum(returns) / max(1, len(returns))
            history.append((frames, mean_return))
            progress.update(data.numel())
            mean, spread = ratios[-1].mean(), ratios[-1].std()
            progress.set_postfix(mean_return=f"{mean_return:.0f}", ratio=f"{mean:.2f}±{spread:.2f}")
            if len(returns) == returns.maxlen and mean_return >= args.stop_at:
                break
    collector.shutdown()

    print(f"\n{'frames':>10}  mean return of the last 20 episodes")
    for at, value in history[:: max(1, len(history) // 10)] + history[-1:]:
        print(f"{at:>10}  {value:6.1f}  {'#' * round(value / 10)}")
    ratio = torch.stack(tuple(ratios))
    print(
        f"\nimportance ratio pi/mu over the last {len(ratios)} updates: mean {ratio.mean():.3f} "
        f"(1 in expectation, at any lag), deviation {ratio.std():.3f}, clipped {(ratio > 1).float().mean():.0%}"
    )
    verdict = "solved" if mean_return >= 450 else "not solved"
    print(f"seed {args.seed}: mean return {mean_return:.1f} over the last 20 episodes, {verdict}")
    if args.plot:
        import matplotlib.pyplot as plt

        plt.plot(*zip(*history, strict=True))
        plt.xlabel("environment steps")
        plt.ylabel("mean return of the last 20 episodes")
        plt.savefig(args.plot, dpi=150, bbox_inches="tight")
        print(f"wrote {args.plot}")


if __name__ == "__main__":
    main()
