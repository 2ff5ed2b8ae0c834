"""TorchRL's configurable trainer on Pendulum-v1, the estimator chosen in ``config/vtrace.yaml``.

python examples/torchrl_hydra.py
python examples/torchrl_hydra.py value@trainer.gae=upstream     # TorchRL's own V-trace
python examples/torchrl_hydra.py trainer=vtrace_a2c loss=a2c trainer.num_epochs=1
"""

from __future__ import annotations

import hydra
import torch
from omegaconf import DictConfig
from tensordict import TensorDictBase

import vtrace_plugins.torchrl.hydra  # noqa: F401  registers value/vtrace and trainer/vtrace_*


@hydra.main(config_path="config", config_name="vtrace", version_base="1.3")
def main(config: DictConfig) -> None:
    torch.set_num_threads(1)  # networks this small lose more to threads than they gain
    trainer = hydra.utils.instantiate(config.trainer)
    returns: list[float] = []

    def record_returns(batch: TensorDictBase) -> None:
        finished = batch["next", "episode_reward"][batch["next", "done"]]
        returns.append(finished.mean().item())

    trainer.register_op("batch_process", record_returns)
    trainer.train()
    print(f"mean return of an episode: {returns[0]:.0f} in the first batch, {returns[-1]:.0f} in the last")


if __name__ == "__main__":
    main()
