"""V-trace for sb3-contrib: rollout buffers and the TRPO, MaskablePPO and RecurrentPPO that use them."""

from vtrace_plugins._extras import needs

with needs("sb3", "stable-baselines3 and sb3-contrib"):
    from vtrace_plugins.sb3_contrib.algorithms import VTraceMaskablePPO, VTraceRecurrentPPO, VTraceTRPO
    from vtrace_plugins.sb3_contrib.buffers import (
        VTraceMaskableDictRolloutBuffer,
        VTraceMaskableRolloutBuffer,
        VTraceRecurrentDictRolloutBuffer,
        VTraceRecurrentRolloutBuffer,
    )

__all__ = [
    "VTraceMaskableDictRolloutBuffer",
    "VTraceMaskablePPO",
    "VTraceMaskableRolloutBuffer",
    "VTraceRecurrentDictRolloutBuffer",
    "VTraceRecurrentPPO",
    "VTraceRecurrentRolloutBuffer",
    "VTraceTRPO",
]
