"""V-trace for TorchRL: a value estimator and a functional, on the package's one core."""

from vtrace_plugins._extras import needs

with needs("torchrl", "torchrl and tensordict"):
    from vtrace_plugins.torchrl.diagnostics import LogImportance
    from vtrace_plugins.torchrl.estimator import TritonVTrace
    from vtrace_plugins.torchrl.functional import vtrace_advantage_estimate
    from vtrace_plugins.torchrl.registration import register, unregister

__all__ = ["LogImportance", "TritonVTrace", "register", "unregister", "vtrace_advantage_estimate"]
