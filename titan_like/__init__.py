"""titan_like: large-language-model pretraining in native PyTorch.

The names of the Python API are imported when they are first used, so that this package loads nothing by itself.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "load_config": "titan_like.config.load",
    "resolve_settings": "titan_like.train.rules",
    "prepare_run": "titan_like.train.setup",
    "process_group": "titan_like.train.job",
    "Trainer": "titan_like.train.trainer",
    "predict": "titan_like.planner.predict",
    "load": "titan_like.evaluate.inference",
}
__all__ = ["__version__", "verify", *_MODULES]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name == "verify":
        return importlib.import_module("titan_like.verify")  # a package that can be called
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
