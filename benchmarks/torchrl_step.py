"""Time a whole training step of many environments and long windows on one device, with ours and upstream's estimator.

    python benchmarks/torchrl_step.py --out benchmarks/results/torchrl_step.json

TorchRL's own ``PendulumEnv``, written in torch, steps all environments at once on the device. A2C learns from a window
in four passes, and the estimator is called anew in each. Figures are milliseconds of wall clock, the device waited for
after each part, the median of the repeats: collecting a window, and for each estimator its own calls and the whole
update (estimator, loss, backward and optimizer). The estimators take turns on the same window.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import report
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from torchrl.envs import EnvBase, PendulumEnv
from torchrl.modules import NormalParamExtractor, ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss
from torchrl.objectives.value import VTrace
from tqdm import tqdm

from vtrace_plugins.torchrl import TritonVTrace

SHAPES = ((256, 128), (4096, 128), (1024, 512), (256, 2048))
HIDDEN, PASSES = 64, 4


class Network(nn.Module):
    def __init__(self, outputs: int, *after: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs), *after)

    def forward(self, th: Tensor, thdot: Tensor) -> Tensor:
        return self.layers(torch.stack([th.cos(), th.sin(), thdot / 8], -1))


class LocScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = Network(2, NormalParamExtractor())

    def forward(self, th: Tensor, thdot: Tensor) -> tuple[Tensor, Tensor]:
        loc, scale = self.network(th, thdot)
        return loc, scale


class NormalVector(Independent):
    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        super().__init__(Normal(loc, scale), 1)


class Update:
    """A2C with its own networks (of the same weights for every estimator), ``PASSES`` times over a window."""

    def __init__(self, estimator: type[VTrace], device: str) -> None:
        torch.manual_seed(0)
        self.actor = ProbabilisticActor(
            TensorDictModule(LocScale(), ["th", "thdot"], ["loc", "scale"]),
            in_keys=["loc", "scale"],
            distribution_class=NormalVector,
            return_log_prob=True,
        ).to(device)
        critic = ValueOperator(Network(1), in_keys=["th", "thdot"]).to(device)
        self.loss = A2CLoss(self.actor, critic, functional=False)
        self.advantage = estimator.for_loss(self.loss, gamma=0.99)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=1e-3)

    def correct(self, data: TensorDictBase) -> None:
        for _ in range(PASSES):
            self.advantage(data)

    def __call__(self, data: TensorDictBase) -> None:
        for _ in range(PASSES):
            self.advantage(data)
            losses = self.loss(data)
            self.optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
            self.optimizer.step()


@torch.no_grad()
def collect(env: EnvBase, actor: ProbabilisticActor, envs: int, steps: int) -> TensorDictBase:
    start = env.reset(env.gen_params(batch_size=[envs], device=env.device), set_state=False)
    data = env.rollout(steps, actor, auto_reset=False, tensordict=start)
    return data.exclude("params", ("next", "params"))


def timed(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """Its result and its milliseconds."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    start = time.perf_counter()
    result = function(*args)
    synchronize()
    return result, 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="*", default=[f"{n}x{t}" for n, t in SHAPES], help="environments x steps")
    parser.add_argument("--repeats", type=int, default=5)
    report.add_arguments(parser)
    args = parser.parse_args()

    env = PendulumEnv(device=args.device, seed=0)
    updates = {"upstream": Update(VTrace, args.device), "ours": Update(TritonVTrace, args.device)}
    rows = []
    for shape in tqdm(args.shapes):
        envs, steps = map(int, shape.split("x"))
        times: dict[str, list[float]] = defaultdict(list)
        for repeat in range(args.repeats + 1):
            found: dict[str, float] = {}
            window, found["collect"] = timed(collect, env, updates["ours"].actor, envs, steps)
            for name, update in updates.items():
                found[f"{name}: estimator"] = timed(update.correct, window.copy())[1]
                found[f"{name}: update"] = timed(update, window.copy())[1]
            if repeat:  # the first one compiles
                for name, ms in found.items():
                    times[name].append(ms)
        rows.append({"envs": envs, "steps": steps, **{k: round(statistics.median(v), 2) for k, v in times.items()}})

    for row in rows:
        ratios = [row[f"upstream: {part}"] / row[f"ours: {part}"] for part in ("estimator", "update")]
        step = (row["collect"] + row["upstream: update"]) / (row["collect"] + row["ours: update"])
        print(row, f"faster by: estimator {ratios[0]:.1f}x, update {ratios[1]:.1f}x, with collecting {step:.2f}x")
    what = {
        "what": f"milliseconds, median of {args.repeats}: collecting, the estimator's {PASSES} calls, the update",
        "networks": f"actor and critic 3 -> {HIDDEN} tanh -> 2 and 1, a normal distribution",
        "passes": PASSES,
    }
    report.write(args, what, args.device, ("torch", "triton", "torchrl", "tensordict"), rows)


if __name__ == "__main__":
    main()
