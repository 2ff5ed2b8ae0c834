"""IMPALA-style A2C on CartPole-v1 with TorchRL: actors several updates behind the learner, corrected by V-trace.

    python examples/torchrl_impala.py                     # about a minute on one CPU core
    python examples/torchrl_impala.py --estimator stock   # upstream's estimator, for comparison
    python examples/torchrl_impala.py --plot return.png

The actors run a copy of the policy that is refreshed only every ``--lag`` updates: data is 0 to lag - 1 updates old.
"""

from __future__ import annotations

import argparse
from copy import deepcopy

import torch
from cartpole import Learner, environments, make_actor
from torchrl.collectors import Collector
from torchrl.objectives.value import VTrace
from tqdm import tqdm

from vtrace_plugins.torchrl import TritonVTrace

ENVS, STEPS = 16, 32


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


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # networks this small lose more to threads than they gain

    env = environments(ENVS)
    env.set_seed(args.seed)
    actor = make_actor()
    learner = Learner(actor, TritonVTrace if args.estimator == "ours" else VTrace)
    behaviour = deepcopy(actor)
    collector = Collector(env, behaviour, frames_per_batch=ENVS * STEPS, total_frames=args.frames)

    with tqdm(total=args.frames, unit="frame", mininterval=0.5) as progress:
        for data in collector:
            learner.update(data)
            if learner.updates % args.lag == 0:
                behaviour.load_state_dict(actor.state_dict())
            progress.update(data.numel())
            mean, spread = learner.ratios[-1].mean(), learner.ratios[-1].std()
            progress.set_postfix(mean_return=f"{learner.mean_return:.0f}", ratio=f"{mean:.2f}±{spread:.2f}")
            if learner.reached(args.stop_at):
                break
    collector.shutdown()

    print(learner.summary())
    if args.plot:
        import matplotlib.pyplot as plt

        plt.plot(*zip(*learner.history, strict=True))
        plt.xlabel("environment steps")
        plt.ylabel("mean return of the last 20 episodes")
        plt.savefig(args.plot, dpi=150, bbox_inches="tight")
        print(f"wrote {args.plot}")


if __name__ == "__main__":
    main()
