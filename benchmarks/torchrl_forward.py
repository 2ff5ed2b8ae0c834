"""Time the whole estimator, ``TritonVTrace.forward`` against stock ``VTrace.forward``, with small networks.

    python benchmarks/torchrl_forward.py --out benchmarks/results/torchrl_forward.json

A figure is the wall-clock time of a call among so many back to back as last some 30 ms (the GPU is waited for after the
last): the median of the repeats. The estimators take turns within each repeat, so that a slow spell of the host hits
all of them. Like is compared with like: stock against ours on upstream's log-probs; ours on recorded actions stands
beside it, and the least that any estimator needs: the two networks' passes with nothing around them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

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

CASES = ((64, 128, 64), (4096, 128, 64), (4096, 128, 32), (32, 2048, 64), (32, 20, 64))  # envs, steps, hidden units
OBSERVATIONS, ACTIONS = 8, 4
WARM_UP, REPEATS = 5, 15
TOGETHER = 0.03  # seconds of calls back to back: what waiting for the GPU adds is then small against them


def network(outputs: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(OBSERVATIONS, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def candidates(hidden: int, device: str) -> dict[str, Callable[[TensorDict], object]]:
    torch.manual_seed(0)
    policy, value = network(ACTIONS, hidden), network(1, hidden)
    actor = ProbabilisticActor(
        TensorDictModule(policy, ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    ).to(device)
    networks = {
        "gamma": 0.99,
        "actor_network": actor,
        "value_network": ValueOperator(value, in_keys=["observation"]).to(device),
        "device": device,
    }

    @torch.no_grad()
    def networks_alone(data: TensorDict) -> None:
        policy(data["observation"])
        value(data["observation"])
        value(data["next", "observation"])

    return {
        "stock": VTrace(**networks),
        "ours, upstream's log-probs": TritonVTrace(**networks, log_prob_of="upstream"),
        "ours, recorded action": TritonVTrace(**networks, weight_advantages=True),
        "networks alone": networks_alone,
    }


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


def milliseconds(functions: dict[str, Callable[[TensorDict], object]], data: TensorDict) -> dict[str, float]:
    synchronize = torch.cuda.synchronize if data["observation"].is_cuda else lambda: None

    def seconds(function: Callable[[TensorDict], object], calls: int) -> float:
        """Of a call."""
        given = [data.copy() for _ in range(calls)]
        synchronize()
        start = time.perf_counter()
        for each in given:
            function(each)
        synchronize()
        return (time.perf_counter() - start) / calls

    calls = {}
    for name, function in functions.items():
        once = min(seconds(function, 1) for _ in range(WARM_UP))
        calls[name] = max(1, round(TOGETHER / once))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(REPEATS):
        for name, function in functions.items():
            times[name].append(1e3 * seconds(function, calls[name]))
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    report.add_arguments(parser)
    args = parser.parse_args()

    rows = []
    for envs, steps, hidden in tqdm((CASES[0], *CASES)):  # the first one twice: a host that just woke up is slow
        functions = candidates(hidden, args.device)
        data = rollout(functions["stock"].actor_network, envs, steps, args.device)
        row: dict[str, float | int] = {"envs": envs, "steps": steps, "hidden": hidden}
        rows.append(row | milliseconds(functions, data))

    rows = rows[1:]
    print(f"\n{'envs x steps (hidden)':>22}" + "".join(f"{name:>28}" for name in functions) + f"{'like for like':>16}")
    for row in rows:
        ratio = row["stock"] / row["ours, upstream's log-probs"]
        shape = f"{row['envs']} x {row['steps']} ({row['hidden']})"
        print(f"{shape:>22}" + "".join(f"{row[name]:>25.2f} ms" for name in functions) + f"{ratio:>15.1f}x")
    what = {
        "what": f"milliseconds a call of forward, wall clock, median of {REPEATS} times {TOGETHER} s back to back",
        "networks": f"actor and critic {OBSERVATIONS} -> hidden tanh -> {ACTIONS} and 1, Categorical",
        "bytes a step": 4 * (2 * OBSERVATIONS + 2) + 8 + 3,
    }
    report.write(args, what, args.device, ("torch", "triton", "torchrl", "tensordict"), rows)


if __name__ == "__main__":
    main()
