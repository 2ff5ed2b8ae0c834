"""V-trace for TorchRL: a value estimator and a functional, on the package's one core."""

from vtrace_plugins.torchrl.estimator import TritonVTrace
from vtrace_plugins.torchrl.functional import vtrace_advantage_estimate

__all__ = ["TritonVTrace", "vtrace_advantage_estimate"]
