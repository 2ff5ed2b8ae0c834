"""V-trace for Stable-Baselines3: rollout buffers, the callback that binds a policy to them, PPO and A2C."""

from vtrace_plugins._extras import needs

with needs("sb3", "stable-baselines3"):
    from vtrace_plugins.sb3.algorithms import VTraceA2C, VTracePPO
    from vtrace_plugins.sb3.buffers import VTraceDictRolloutBuffer, VTraceMixin, VTraceRolloutBuffer
    from vtrace_plugins.sb3.callback import VTraceCallback

__all__ = [
    "VTraceA2C",
    "VTraceCallback",
    "VTraceDictRolloutBuffer",
    "VTraceMixin",
    "VTracePPO",
    "VTraceRolloutBuffer",
]
