"""Bugs to put into the product: each a context manager within which it computes something else in some layouts.

The verifier's processes enter them by name, so they can be pickled.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

from titan_like.verify.processes import Prepare


def under(make: Callable[[], AbstractContextManager[Any]]) -> Callable[[Callable[..., Any]], Prepare]:
    """The bug is what the context is that this makes."""

    def decorate(function: Callable[..., Any]) -> Prepare:
        @contextmanager
        @wraps(function)
        def planted() -> Iterator[None]:
            with make():
                yield

        return planted

    return decorate


def bug(target: Any, name: str) -> Callable[[Callable[..., Any]], Prepare]:
    """Plant a function in the place of ``target.name``, which it gets as its first argument."""

    def decorate(function: Callable[..., Any]) -> Prepare:
        def make() -> AbstractContextManager[Any]:
            original = getattr(target, name)
            changed: Any = lambda *args, **kwargs: function(original, *args, **kwargs)  # noqa: E731
            is_static = isinstance(vars(target).get(name), staticmethod)
            return patch.object(target, name, staticmethod(changed) if is_static else changed)

        return under(make)(function)

    return decorate
