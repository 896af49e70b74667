"""Modules of the packages that families are."""

import importlib
from typing import Any


def module_beside(kind: type, base: type, name: str) -> Any:
    """The module ``name`` in the package of a class or of the nearest of its bases below ``base``; None without one."""
    modules = dict.fromkeys(parent.__module__ for parent in kind.__mro__ if issubclass(parent, base))
    for package in (name.rpartition(".")[0] for name in modules if "." in name and name != base.__module__):
        try:
            return importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise
    return None
