"""V-trace (IMPALA, arXiv:1802.01561) as one fused kernel, for TorchRL, Stable-Baselines3 and plain torch."""

from vtrace_plugins._core.api import VTraceReturns, vtrace
from vtrace_plugins._core.checks import VTraceError
from vtrace_plugins.validation import validate

__all__ = ["VTraceError", "VTraceReturns", "__version__", "validate", "vtrace"]
__version__ = "0.1.0"
