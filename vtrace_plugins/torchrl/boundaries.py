"""TorchRL's three flags (done, terminated, truncated) as the core's two, its masks as one; what contradicts them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor


def _bool(x: Tensor) -> Tensor:
    return x if x.dtype is torch.bool else x != 0


def split_done(done: Tensor, terminated: Tensor | None, truncated: Tensor | None) -> tuple[Tensor, Tensor]:
    """(terminated, truncated) for the core, bool, from flags of any dtype; either of the last two may be absent.

    The core lets terminated win where both are set, so done may stand for truncated beside it.

    ====================  ==========================  ====================================================
    given                 terminated                  truncated
    ====================  ==========================  ====================================================
    all three             terminated                  done or truncated
    done and terminated   terminated                  done
    done and truncated    done, where not truncated   truncated
    done                  done                        nowhere: what ended has terminated, as upstream says
    ====================  ==========================  ====================================================
    """
    done = _bool(done)
    if terminated is None:
        return (done, torch.zeros_like(done)) if truncated is None else (done & ~_bool(truncated), _bool(truncated))
    return _bool(terminated), done if truncated is None else done | _bool(truncated)


def padding_mask(tensordict: TensorDictBase) -> Tensor | None:
    """Where ``split_trajectories`` says that a step is real: under ``("collector", "mask")``, or, for data that no
    collector made, under ``"mask"``, which counts only as one flag a step (a mask of actions has another shape)."""
    mask = tensordict.get(("collector", "mask"), None)
    if mask is None:
        mask = tensordict.get("mask", None)
        if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
            return None
        if mask.shape not in (tensordict.batch_size, (*tensordict.batch_size, 1)):
            return None
    return _bool(mask)


def both(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """Steps that both masks call real; an absent one calls all of them so."""
    if x is None or y is None:
        return y if x is None else x
    return x & y


def unmarked_ends(
    tensordict: TensorDictBase, ended: Tensor, done_key: NestedKey, time_dim: int
) -> Iterator[tuple[NestedKey, int]]:
    """Entries that say that another episode follows a step, and how often ``ended`` says that this one goes on.

    Trajectory ids that change, and ``is_init`` (at the root or beside the done key) at the next step. Reads the data.
    """
    shape = tensordict.batch_size
    beside = (*done_key[:-1], "is_init") if isinstance(done_key, tuple) else "is_init"
    mask = padding_mask(tensordict)

    def by_step(x: Tensor) -> Tensor:
        """``[T, ..., features]``"""
        return x[..., None].flatten(len(shape)).movedim(time_dim, 0)

    goes_on = ~by_step(ended).any(-1, keepdim=True)[:-1]
    if mask is not None:
        real = by_step(mask)
        goes_on = goes_on & real[:-1] & real[1:]
    for key in dict.fromkeys((("collector", "traj_ids"), "traj_ids", "is_init", beside)):
        x = tensordict.get(key, None)
        if not isinstance(x, Tensor) or x.shape[: len(shape)] != shape:
            continue
        now = by_step(x)
        another = _bool(now)[1:] if key in ("is_init", beside) else now[1:] != now[:-1]
        count = int((another.any(-1, keepdim=True) & goes_on).sum())
        if count:
            yield key, count
