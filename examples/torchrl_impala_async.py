"""IMPALA on CartPole-v1 with actors in processes of their own: TorchRL's asynchronous collector, truly out of step.

    python examples/torchrl_impala_async.py             # about half a minute on two CPU cores
    python examples/torchrl_impala_async.py --every 16  # weights are sent every 16 updates

Actors and learner wait for nobody: a batch is learnt from as it arrives, with whatever weights its actor had, and each
step says which those were (``track_policy_version``). The lag that is printed is counted from that. If an actor dies,
all are started anew with the learner's weights. Which batch comes when depends on the machine: no two runs are alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from cartpole import ENVS, STEPS, asynchronous_arguments, environments, learn
from torchrl.collectors import MultiAsyncCollector
from torchrl.modules import ProbabilisticActor


def collector_of(args: argparse.Namespace) -> Callable[[ProbabilisticActor, int], MultiAsyncCollector]:
    def make_collector(actor: ProbabilisticActor, frames: int) -> MultiAsyncCollector:
        return MultiAsyncCollector(
            [partial(environments, ENVS)] * args.actors,
            actor,
            frames_per_batch=ENVS * STEPS,
            total_frames=frames,
            track_policy_version=True,
        )

    return make_collector


def is_a_dead_actor(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and "process failed" in str(error)


def main() -> None:
    args = asynchronous_arguments(__doc__)
    learn(args, collector_of(args), is_a_dead_actor)


if __name__ == "__main__":
    main()
