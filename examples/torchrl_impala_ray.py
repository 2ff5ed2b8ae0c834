"""IMPALA on CartPole-v1 over a Ray cluster, by TorchRL's own Ray collector: here a local cluster of this machine.

    pip install ray && python examples/torchrl_impala_ray.py               # about a minute on two CPU cores
    python examples/torchrl_impala_ray.py --address ray://head:10001       # a cluster that runs: see ray's docs

Each actor is a Ray actor with environments of its own and asks for one CPU (``remote_configs``); Ray puts it where one
is free. On a cluster every machine needs this package installed; this folder is sent along (``runtime_env``). Otherwise
as ``torchrl_impala_async.py``: batches are learnt from as they arrive, and a dead actor has all of them started anew.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import ray
from cartpole import ENVS, STEPS, asynchronous_arguments, environments, learn
from ray.exceptions import RayActorError
from torch.distributed import DistStoreError
from torchrl.collectors import Collector
from torchrl.collectors.distributed import RayCollector
from torchrl.modules import ProbabilisticActor


def main() -> None:
    args = asynchronous_arguments(__doc__, address="of a running cluster; without one, this machine is one")
    folder = str(Path(__file__).parent)  # where ``cartpole`` is
    if args.address:
        cluster = {"address": args.address, "runtime_env": {"working_dir": folder}}
    else:
        here = {"env_vars": {"PYTHONPATH": folder}}
        cluster = {"num_cpus": args.actors, "include_dashboard": False, "runtime_env": here}

    def make_collector(actor: ProbabilisticActor, frames: int) -> RayCollector:
        return RayCollector(
            [partial(environments, ENVS)] * args.actors,
            actor,
            collector_class=Collector,
            collector_kwargs={"track_policy_version": True},
            frames_per_batch=ENVS * STEPS,
            total_frames=frames,
            num_collectors=args.actors,
            ray_init_config=cluster,
            remote_configs={"num_cpus": 1, "num_gpus": 0},
            sync=False,
        )

    # TorchRL waits a minute for an actor to fetch its weights; one that takes longer counts as dead.
    learn(args, make_collector, lambda error: isinstance(error, (RayActorError, DistStoreError)))
    ray.shutdown()


if __name__ == "__main__":
    main()
