"""Command-line options of scripts, in addition to the run's settings."""

from __future__ import annotations

import argparse
from typing import NoReturn

from titan_like.config.errors import ConfigError, shortened


class OptionParser(argparse.ArgumentParser):
    """Reports a wrong option as a ConfigError, in one sentence like every other error."""

    def error(self, message: str) -> NoReturn:
        """Turn argparse's message into a ConfigError.

        Raises:
            ConfigError: always.
        """
        option, colon, problem = message.removeprefix("argument ").partition(": ")
        if not colon:  # about no option in particular
            option, problem = "", message
        raise ConfigError("command line", option or None, f"{shortened(problem)}; {self.prog} --help says more")
