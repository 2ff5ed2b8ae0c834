"""TorchRL's three flags (done, terminated, truncated) as the core's two."""

from __future__ import annotations

import torch
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
