"""Return against lag: what each way of correcting for it is worth. The model is IMPALA's Table 2 and Figure E.1.

    python benchmarks/lag_study.py --out benchmarks/results/lag_study.json --plot docs/lag.png    # resumes where it was

One process, one actor-critic; the policy that acts has the parameters of ``lag`` updates ago. Steps a task, learning
rate and networks were fixed before the runs, on V-trace with lag 0 and 8 and a seed that is not in the study. A run's
figure is the mean return of the episodes that ended in the last fifth of its steps, actions sampled; that of 32
episodes of the final policy stands beside it. Runs are exact to their seeds on one machine.

- ``no correction``: as if the data were the current policy's own.
- ``one-step``: the policy gradient times pi/mu, the value targets uncorrected (IMPALA's "1-step IS").
- ``V-trace``: rho_bar = c_bar = 1; ``V-trace, lambda 0.9`` besides.
- ``TorchRL's VTrace``: upstream's estimator as it is, which takes the log-prob of the distribution's mode for pi.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from copy import deepcopy
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import report
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal
from tqdm import tqdm

from vtrace_plugins import vtrace
from vtrace_plugins.bench import torchrl_call

STEPS = {"CartPole-v1": 300_000, "Acrobot-v1": 300_000, "InvertedPendulum-v5": 300_000}
LAGS = (0, 1, 4, 16, 64)
SEEDS = range(5)
ENVS, UNROLL, GAMMA, LEARNING_RATE, ENTROPY, EPISODES = 16, 20, 0.99, 1e-3, 0.01, 32


class Actor(nn.Module):
    """Observations to the distribution of actions."""

    def __init__(self, observations: int, actions: gymnasium.Space) -> None:
        super().__init__()
        self.discrete = isinstance(actions, gymnasium.spaces.Discrete)
        outputs = int(actions.n) if self.discrete else actions.shape[0]
        self.network = mlp(observations, outputs)
        if not self.discrete:
            self.log_scale = nn.Parameter(torch.zeros(outputs))

    def forward(self, observation: Tensor) -> Distribution:
        out = self.network(observation)
        return Categorical(logits=out) if self.discrete else Independent(Normal(out, self.log_scale.exp()), 1)


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


class Rollout(NamedTuple):
    """``[UNROLL, ENVS]``; what follows a step is its terminal observation where it ends an episode."""

    observation: Tensor
    action: Tensor
    log_mu: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    observation_after: Tensor


Targets = Callable[[Rollout, Tensor, Tensor, Tensor, Distribution], tuple[Tensor, Tensor]]


def corrected(**options: float) -> Targets:
    def targets(data: Rollout, log_pi: Tensor, values: Tensor, after: Tensor, _: Distribution) -> tuple[Tensor, Tensor]:
        flags = data.terminated, data.truncated
        return vtrace(
            log_pi, data.log_mu, values, data.reward, *flags, bootstrap_values=after, gamma=GAMMA, time_dim=0, **options
        )

    return targets


def uncorrected(data: Rollout, log_pi: Tensor, values: Tensor, after: Tensor, _: Distribution) -> tuple[Tensor, Tensor]:
    return corrected()(data._replace(log_mu=log_pi), log_pi, values, after, _)


def one_step(data: Rollout, log_pi: Tensor, values: Tensor, after: Tensor, _: Distribution) -> tuple[Tensor, Tensor]:
    targets, advantages = uncorrected(data, log_pi, values, after, _)
    return targets, advantages * (log_pi - data.log_mu).exp()


def upstream(
    data: Rollout, log_pi: Tensor, values: Tensor, after: Tensor, policy: Distribution
) -> tuple[Tensor, Tensor]:
    """``torchrl.objectives.value.VTrace``, on the log-probs that its forward computes."""
    given = {"log_mu": data.log_mu, "rewards": data.reward, "terminated": data.terminated, "truncated": data.truncated}
    mode = policy.log_prob(policy.mode)
    return torchrl_call({**given, "log_pi": mode, "values": values, "bootstrap_values": after}, GAMMA, 0)()


METHODS: dict[str, Targets] = {
    "no correction": uncorrected,
    "one-step": one_step,
    "V-trace": corrected(),
    "V-trace, lambda 0.9": corrected(lam=0.9),
    "TorchRL's VTrace": upstream,
}


class Run(NamedTuple):
    task: str
    method: str
    lag: int
    seed: int


def environments(task: str, number: int) -> gymnasium.vector.VectorEnv:
    same_step = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    return gymnasium.make_vec(task, number, vectorization_mode="sync", vector_kwargs=same_step)


def tensor(observation: np.ndarray) -> Tensor:
    return torch.as_tensor(observation, dtype=torch.float32)


def taken(action: Tensor, space: gymnasium.Space) -> np.ndarray:
    """The action as environments take it: a continuous one within its bounds. Its log-prob is of the unclipped one."""
    found = action.numpy()
    return found if isinstance(space, gymnasium.spaces.Discrete) else np.clip(found, space.low, space.high)


class Collector:
    """Unrolls of a policy, and the returns of the episodes that ended in them."""

    def __init__(self, task: str, seed: int) -> None:
        self.env = environments(task, ENVS)
        self.observation, _ = self.env.reset(seed=seed)
        self.running, self.finished = np.zeros(ENVS), []

    @torch.no_grad()
    def unroll(self, actor: Actor) -> Rollout:
        steps = []
        for _ in range(UNROLL):
            now = tensor(self.observation)
            policy = actor(now)
            action = policy.sample()
            self.observation, reward, terminated, truncated, info = self.env.step(
                taken(action, self.env.single_action_space)
            )
            self.running += reward
            after = self.observation.copy()
            for i in np.flatnonzero(terminated | truncated):
                after[i] = info["final_obs"][i]
                self.finished.append(self.running[i])
                self.running[i] = 0.0
            flags = torch.as_tensor(terminated), torch.as_tensor(truncated)
            steps.append((now, action, policy.log_prob(action), tensor(reward), *flags, tensor(after)))
        return Rollout(*(torch.stack(x) for x in zip(*steps, strict=True)))


@torch.no_grad()
def final_return(task: str, actor: Actor, seed: int) -> float:
    env = environments(task, EPISODES)
    observation, _ = env.reset(seed=seed)
    total, running = np.zeros(EPISODES), np.ones(EPISODES, dtype=bool)
    while running.any():
        action = taken(actor(tensor(observation)).sample(), env.single_action_space)
        observation, reward, terminated, truncated, _ = env.step(action)
        total += reward * running
        running &= ~(terminated | truncated)
    env.close()
    return float(total.mean())


def train(run: Run, total: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    collector = Collector(run.task, 1000 * run.seed)
    inputs = collector.observation.shape[1]
    actor, critic = Actor(inputs, collector.env.single_action_space), mlp(inputs, 1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=LEARNING_RATE)
    acting = deque([deepcopy(actor)], maxlen=run.lag + 1)  # the first is the oldest

    updates = total // (ENVS * UNROLL)
    for update in range(updates):
        if update == updates * 4 // 5:
            collector.finished.clear()
        data = collector.unroll(acting[0])
        policy = actor(data.observation)
        log_pi, values = policy.log_prob(data.action), critic(data.observation).squeeze(-1)
        with torch.no_grad():
            after = critic(data.observation_after).squeeze(-1)
            targets, advantages = METHODS[run.method](data, log_pi, values, after, policy)
        loss = -(advantages * log_pi).mean() + 0.5 * (targets - values).square().mean()
        loss = loss - ENTROPY * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        for network in (actor, critic):
            nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        optimizer.step()
        acting.append(deepcopy(actor))
    ended = collector.finished or collector.running  # in the last fifth, or none did
    collector.env.close()
    result = {"return": float(np.mean(ended)), "final": final_return(run.task, actor, run.seed)}
    return {**run._asdict(), **{name: round(x, 1) for name, x in result.items()}}


def draw(rows: list[dict[str, Any]], picture: Path) -> None:
    import matplotlib.pyplot as plt
    from scipy.stats import bootstrap

    tasks = [task for task in STEPS if any(row["task"] == task for row in rows)]
    figure, axes = plt.subplots(1, len(tasks), figsize=(4 * len(tasks), 4), squeeze=False, layout="constrained")
    for ax, task in zip(axes[0], tasks, strict=True):
        for method in METHODS:
            lags, means, lows, highs = [], [], [], []
            for lag in LAGS:
                found = [r["return"] for r in rows if (r["task"], r["method"], r["lag"]) == (task, method, lag)]
                if len(found) > 1:
                    interval = bootstrap((found,), np.mean, method="percentile", rng=0).confidence_interval
                    lags.append(LAGS.index(lag))
                    means.append(np.mean(found))
                    lows.append(interval.low)
                    highs.append(interval.high)
            (line,) = ax.plot(lags, means, marker="o", label=method)
            ax.fill_between(lags, lows, highs, color=line.get_color(), alpha=0.15)
        ax.set(title=task, xlabel="lag in updates", xticks=range(len(LAGS)), xticklabels=LAGS)
    axes[0, 0].set_ylabel("return, last fifth of training")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(METHODS))
    figure.savefig(picture, dpi=110)


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_arguments(parser)
    parser.add_argument("--plot", type=Path, help="draw the figures")
    parser.add_argument("--tasks", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--lags", nargs="+", type=int, default=list(LAGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--steps", type=int, help="instead of each task's own number")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args(arguments)

    rows = json.loads(args.out.read_text())["rows"] if args.out and args.out.exists() else []
    done = {(r["task"], r["method"], r["lag"], r["seed"]) for r in rows}
    runs = [Run(*x) for x in itertools.product(args.tasks, args.methods, args.lags, args.seeds) if x not in done]
    runs.sort(key=lambda run: run.seed)
    what = {
        "what": f"mean return of the episodes that ended in the last fifth; final: of {EPISODES} of the final policy",
        "steps": {task: args.steps or STEPS[task] for task in STEPS},
        "setting": f"{ENVS} environments, unrolls of {UNROLL}, Adam {LEARNING_RATE}, gamma {GAMMA}, entropy {ENTROPY}",
    }
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        futures = [pool.submit(train, run, args.steps or STEPS[run.task]) for run in runs]
        for future in tqdm(as_completed(futures), total=len(futures)):
            rows.append(future.result())
            report.write(args, what, "cpu", ("torch", "gymnasium", "torchrl"), rows)
    if args.plot:
        draw(rows, args.plot)


if __name__ == "__main__":
    main()
