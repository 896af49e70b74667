"""Proof that a parallel layout computes the same training as one process. The package can be called as a function."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan_like.config.schema import JobConfig
    from titan_like.verify.verify import Verdict


class _Callable(ModuleType):
    """Makes `titan_like.verify` both the package and the function of the Python API."""

    def __call__(self, config: JobConfig, **options: Any) -> Verdict:
        """Verify a configuration's layout on processes of this machine, with the `Options` of `titan-verify`.

        Raises:
            ConfigError: an option is out of range, there is no valid layout, or there are fewer GPUs than processes.
        """
        from titan_like.verify.verify import Options, verifier_of

        return verifier_of(config, Options(**options)).verify()


sys.modules[__name__].__class__ = _Callable
