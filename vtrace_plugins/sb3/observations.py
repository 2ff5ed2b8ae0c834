"""An observation is an array (or a tensor), or a dict of them; ``each`` and ``join`` take either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def each(function: Callable[..., Any], *observations: Any) -> Any:
    """``function`` of the arrays, or of the entries under each key of the dicts."""
    if isinstance(observations[0], dict):
        return {key: function(*(x[key] for x in observations)) for key in observations[0]}
    return function(*observations)


def join(function: Callable[..., Any], many: Sequence[Any]) -> Any:
    """``function`` (stack, cat) of many arrays, or of many dicts' entries under each key."""
    return each(lambda *arrays: function(arrays), *many)


def same(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Where two arrays hold the same number, NaN included."""
    found: np.ndarray = (x == y) | ((x != x) & (y != y))
    return found
