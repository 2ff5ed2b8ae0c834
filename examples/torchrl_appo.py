"""APPO on CartPole-v1: PPO's clipped loss on stale rollouts, V-trace advantages, actors in processes of their own.

    python examples/torchrl_appo.py               # about half a minute on two CPU cores
    python examples/torchrl_appo.py --every 16    # staler: weights are sent every 16 updates

As ``torchrl_impala_async.py``, but each batch is used for four passes. Its ratios grow with each, so V-trace computes
the advantages anew before every one. ``for_loss`` sees that ClipPPOLoss multiplies by the ratio, and leaves it out.
"""

from __future__ import annotations

from cartpole import asynchronous_arguments, learn
from torchrl.objectives import ClipPPOLoss
from torchrl_impala_async import collector_of, is_a_dead_actor


def main() -> None:
    args = asynchronous_arguments(__doc__)
    learn(args, collector_of(args), is_a_dead_actor, make_loss=ClipPPOLoss, passes=4)


if __name__ == "__main__":
    main()
