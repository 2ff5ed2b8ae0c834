"""TorchRL's three flags (done, terminated, truncated) as the core's two."""

from __future__ import annotations

from torch import Tensor


def split_done(done: Tensor, terminated: Tensor | None, truncated: Tensor | None) -> tuple[Tensor, Tensor]:
    """(terminated, truncated) for the core, bool, from flags of any dtype; either of the last two may be absent.

    ============  ===========  ==========================================================
    given         terminated   truncated
    ============  ===========  ==========================================================
    all three     terminated   done or truncated, where not terminated
    no truncated  terminated   done, where not terminated
    no terminated done, where  truncated
                  not truncated
    only done     done         never: what ended is taken as terminated, as upstream does
    ============  ===========  ==========================================================
    """
    ended = done != 0
    cut_short = None if truncated is None else truncated != 0
    if terminated is None:
        terminal = ended if cut_short is None else ended & ~cut_short
    else:
        terminal = terminated != 0
    return terminal, (ended if cut_short is None else ended | cut_short) & ~terminal
