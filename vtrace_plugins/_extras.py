"""One sentence where an optional library is missing, which names the extra that brings it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(extra: str, libraries: str) -> Iterator[None]:
    """Around the imports of a subpackage that needs ``libraries``, which the extra installs.

    Raises:
        ImportError: with the command, and the reason that Python gave.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"this needs {libraries}: pip install 'vtrace-plugins[{extra}]' ({error})") from error
