"""The registry swap: after :func:`register`, TorchRL's "vtrace" means :class:`TritonVTrace`."""

from __future__ import annotations

from typing import Any

from torchrl.objectives.utils import ValueEstimators, get_value_estimator_entry, register_value_estimator

from vtrace_plugins.torchrl.estimator import TritonVTrace, check_options

_upstream: Any = None  # the registry's entry that ours replaced, while it does


def register(**options: Any) -> None:
    """Make ``loss.make_value_estimator("vtrace")`` and ``ValueEstimators.VTrace`` build a :class:`TritonVTrace`.

    Losses built before the call use it too, once they make their estimator. Calling it again replaces the options.

    Args:
        **options: defaults for the constructor, over upstream's own (``backend="torch"``, ``lmbda=0.95``, ...).

    Raises:
        VTraceError: for an option that the constructor does not take, or a value that it refuses.
    """
    global _upstream
    check_options(**options)
    if _upstream is None:
        _upstream = get_value_estimator_entry(ValueEstimators.VTrace)
    register_value_estimator(ValueEstimators.VTrace, default_kwargs={**_upstream.default_kwargs, **options})(
        TritonVTrace
    )


def unregister() -> None:
    """Give "vtrace" back to the class that had it before :func:`register`; nothing to do if that never ran."""
    global _upstream
    if _upstream is not None:
        register_value_estimator(ValueEstimators.VTrace, default_kwargs=_upstream.default_kwargs)(_upstream.cls)
        _upstream = None
