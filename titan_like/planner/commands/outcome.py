"""What a command of the planner says and with what it ends, and the options that several of them have."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_like.config import ConfigError, JobConfig, load_config
from titan_like.planner.memory import Memory
from titan_like.planner.profile import Profile, load_profile
from titan_like.planner.search import search
from titan_like.planner.search_space import set_keys
from titan_like.train.rules import CHECKS

_LARGEST = 1e18
_SECONDS_OF_SILENCE = 2.0


@dataclass(frozen=True)
class Outcome:
    """The end of a command."""

    text: str
    json: dict[str, Any]  # what --json writes
    status: int = 0  # the exit status
    files: dict[Path, str] = field(default_factory=dict)  # texts to write


class Progress:
    """Says on stderr how far something is, once it takes longer than a moment."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, what: str) -> None:
        """Say it, if the last word was some time ago."""
        now = time.monotonic()
        if now - self._said > _SECONDS_OF_SILENCE:
            self._said = now
            print(what, file=sys.stderr, flush=True)


def add_profile(parser: argparse.ArgumentParser) -> None:
    """The stack whose constants are taken."""
    parser.add_argument("--profile", help="stack profile: a shipped one or a TOML file (default: the GPU's)")


def run_of(settings: list[str], profile: Profile | None) -> JobConfig:
    """The run that the command line names; `parallelism.auto` with the layout that it stands for.

    Raises:
        ConfigError: anything the user has to change.
    """
    config = load_config(settings, CHECKS)
    return search(config, None, profile, set_keys(config), kinds=1).config if config.parallelism.auto else config


def chosen_profile(options: argparse.Namespace) -> Profile | None:
    """The profile asked for; None for the GPU's own.

    Raises:
        ConfigError: there is no such profile.
    """
    return load_profile(options.profile) if options.profile else None


def above_zero(options: argparse.Namespace, *names: str) -> None:
    """Refuse values of these options that are not above 0, or larger than anything.

    Raises:
        ConfigError: the first of them.
    """
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 < value <= _LARGEST:
            raise ConfigError(f"--{name.replace('_', '-')}", value, f"must be above 0 and at most {_LARGEST:.0e}")


def check_toml(path: str | None) -> None:
    """Refuse another name for a file that `--out` is to write.

    Raises:
        ConfigError: it does not end in .toml, by which it is told from the names of shipped profiles.
    """
    if path is not None and Path(path).suffix != ".toml":
        raise ConfigError("--out", path, "must be a TOML file; give it a name that ends with .toml")


def does_not_fit(memory: Memory) -> list[str]:
    """A line where the run is predicted not to fit, of which the command says other things."""
    if memory.fits:
        return []
    return [f"the run DOES NOT FIT: {memory.largest / 2**30:.1f} of {memory.capacity / 2**30:.0f} GiB on a GPU"]


def per_gpu(rate: float) -> str:
    """TFLOP/s of one GPU in words, with a decimal or with three digits if it is slow."""
    return f"{rate:.1f} TFLOP/s" if rate >= 10 else f"{rate:.3g} TFLOP/s"


def gpus(count: int) -> str:
    """So many in words."""
    return f"{count} GPU" + ("s" if count != 1 else "")
