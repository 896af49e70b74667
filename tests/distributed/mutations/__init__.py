"""Bugs to put into the product: each a context manager within which it computes something else in some layouts.

The verifier's processes enter them by name, so they can be pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

from titan_like.verify.processes import Prepare


def bug(target: Any, name: str) -> Callable[[Callable[..., Any]], Prepare]:
    """Plant a function in the place of ``target.name``, which it gets as its first argument."""

    def decorate(function: Callable[..., Any]) -> Prepare:
        @contextmanager
        @wraps(function)
        def planted() -> Iterator[None]:
            original = getattr(target, name)
            changed: Any = lambda *args, **kwargs: function(original, *args, **kwargs)  # noqa: E731
            is_static = isinstance(vars(target).get(name), staticmethod)
            with patch.object(target, name, staticmethod(changed) if is_static else changed):
                yield

        return planted

    return decorate
