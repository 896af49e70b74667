"""Options of scripts beside the run's settings."""

from __future__ import annotations

import argparse
from typing import NoReturn

from titan_like.config.errors import ConfigError, shortened


class OptionParser(argparse.ArgumentParser):
    """Says what is wrong with an option in one sentence, as all else does."""

    def error(self, message: str) -> NoReturn:
        """Refuse.

        Raises:
            ConfigError: always.
        """
        option, colon, problem = message.removeprefix("argument ").partition(": ")
        if not colon:  # about no option in particular
            option, problem = "", message
        raise ConfigError("command line", option or None, f"{shortened(problem)}; {self.prog} --help says more")
