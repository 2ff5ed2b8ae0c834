"""Time the whole estimator, ``TritonVTrace.forward`` against stock ``VTrace.forward``, with small networks.

    python benchmarks/torchrl_forward.py --out benchmarks/results/torchrl_forward.json

A figure is the wall-clock time of a call among several back to back (the GPU is waited for after the last, as a
training loop does): the median of the repeats. The estimators take turns within each repeat, so that a slow spell of
the host hits all of them. Like is compared with like: stock against ours on upstream's log-probs; ours on recorded
actions stands beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time

import report
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives.value import VTrace
from tqdm import tqdm

from vtrace_plugins.torchrl import TritonVTrace

SHAPES = ((64, 128), (4096, 128), (32, 2048), (32, 20))
OBSERVATIONS, HIDDEN, ACTIONS = 8, 64, 4
WARM_UP, REPEATS, CALLS = 5, 15, 8


def network(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(OBSERVATIONS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs))


def rollout(actor: ProbabilisticActor, envs: int, steps: int, device: str) -> TensorDict:
    data = TensorDict({"observation": torch.randn(envs, steps, OBSERVATIONS, device=device)}, [envs, steps])
    with torch.no_grad():
        data = actor(data)
    terminated = torch.rand(envs, steps, 1, device=device) < 0.01
    truncated = ~terminated & (torch.rand(envs, steps, 1, device=device) < 0.01)
    data["next"] = TensorDict(
        {
            "observation": torch.randn(envs, steps, OBSERVATIONS, device=device),
            "reward": torch.randn(envs, steps, 1, device=device),
            "done": terminated | truncated,
            "terminated": terminated,
            "truncated": truncated,
        },
        [envs, steps],
    )
    return data


def milliseconds(estimators: dict[str, VTrace], data: TensorDict) -> dict[str, float]:
    synchronize = torch.cuda.synchronize if data["observation"].is_cuda else lambda: None
    times: dict[str, list[float]] = {name: [] for name in estimators}
    for repeat in range(REPEATS + WARM_UP):
        for name, estimator in estimators.items():
            given = [data.copy() for _ in range(CALLS)]
            synchronize()
            start = time.perf_counter()
            for each in given:
                estimator(each)
            synchronize()
            if repeat >= WARM_UP:
                times[name].append(1e3 * (time.perf_counter() - start) / CALLS)
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    report.add_arguments(parser)
    args = parser.parse_args()

    torch.manual_seed(0)
    actor = ProbabilisticActor(
        TensorDictModule(network(ACTIONS), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    ).to(args.device)
    critic = ValueOperator(network(1), in_keys=["observation"]).to(args.device)
    networks = {"gamma": 0.99, "actor_network": actor, "value_network": critic, "device": args.device}
    estimators = {
        "stock": VTrace(**networks),
        "ours, upstream's log-probs": TritonVTrace(**networks, log_prob_of="upstream"),
        "ours, recorded action": TritonVTrace(**networks, weight_advantages=True),
    }
    rows = []
    for envs, steps in tqdm((SHAPES[0], *SHAPES)):  # the first one twice: a host that just woke up is slow
        data = rollout(actor, envs, steps, args.device)
        row: dict[str, float | int] = {"envs": envs, "steps": steps}
        rows.append(row | milliseconds(estimators, data))

    rows = rows[1:]
    print(f"\n{'envs x steps':>14}" + "".join(f"{name:>28}" for name in estimators) + f"{'like for like':>16}")
    for row in rows:
        ratio = row["stock"] / row["ours, upstream's log-probs"]
        shape = f"{row['envs']} x {row['steps']}"
        print(f"{shape:>14}" + "".join(f"{row[name]:>25.2f} ms" for name in estimators) + f"{ratio:>15.1f}x")
    what = {
        "what": f"milliseconds a call of forward, wall clock, median of {REPEATS} times {CALLS} calls back to back",
        "networks": f"actor and critic {OBSERVATIONS} -> {HIDDEN} tanh -> {ACTIONS} and 1, Categorical",
        "bytes a step": 4 * (2 * OBSERVATIONS + 2) + 8 + 3,
    }
    report.write(args, what, args.device, ("torch", "triton", "torchrl", "tensordict"), rows)


if __name__ == "__main__":
    main()
