"""The product's scripts as a user runs them, but in processes forked from one that has imported what they import."""

import importlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, get_context
from pathlib import Path
from unittest.mock import patch

from titan_like.config.schema import Model
from titan_like.models.hugging_face import family_of
from titan_like.models.registry import model_config
from titan_like.train.signals import STOP_SIGNALS
from titan_like.verify.processes import start_fork_server

REPO = Path(__file__).parents[2]
PLAIN = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPO)}  # of interpreters
TORCHRUN = str(Path(sysconfig.get_path("scripts"), "torchrun"))  # its ranks begin as new interpreters


class Script:
    """``python SCRIPT ARGUMENTS`` in folder ``cwd``, with the folders ``path`` on PYTHONPATH. Used like a Popen.

    It writes to ``log`` if that is given, both stdout and stderr.
    """

    def __init__(
        self, script: str, arguments: Sequence[str], cwd: Path = REPO, path: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None, log: Path | None = None,
    ) -> None:  # fmt: skip
        start_fork_server()
        self.arguments, self._output = [script, *arguments], tempfile.TemporaryDirectory(prefix="script-")
        self._files = [log or Path(self._output.name, name) for name in ("stdout", "stderr")]
        folders = [str(folder) for folder in path]
        target = (self._files, str(REPO / script), self.arguments, cwd, folders, dict(environment or {}))
        self._process = get_context("forkserver").Process(target=_run, args=target, daemon=False)
        self._process.start()
        self.pid = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.exitcode

    poll = returncode.fget

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def communicate(self, timeout: float = 240) -> tuple[str, str]:
        """Wait for the end; what it wrote to stdout and to stderr."""
        self._process.join(timeout)
        if self.returncode is None:
            self.kill()
            raise subprocess.TimeoutExpired(self.arguments, timeout)
        out, err = (file.read_text(encoding="utf-8") for file in self._files)
        return out, err

    def wait(self, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        """Wait for the end."""
        out, err = self.communicate(timeout)
        assert self.returncode is not None
        return subprocess.CompletedProcess(self.arguments, self.returncode, out, err)


def install(folder: Path, name: str, group: str, entries: str) -> None:
    """Have Python find a package in ``folder`` with these entry points, a line each."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entries}".replace('"', ""))


def run_here(script: str, *arguments: str) -> object:
    """A script in this process; its exit code."""
    handlers = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGUSR2)}
    with patch.object(sys, "argv", [script, *arguments]):
        try:
            runpy.run_path(str(REPO / script), run_name="__main__")
        except SystemExit as stop:
            return stop.code
        finally:
            for number, handler in handlers.items():  # a run that is over has them ignored to the end of its process
                signal.signal(number, handler)
    raise AssertionError(f"{script} does not exit")


def _run(
    files: list[Path], script: str, arguments: list[str], cwd: Path, path: list[str], environment: dict[str, str]
) -> None:
    for number, file in enumerate(files, start=1):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    # The script's own processes begin as they would in a new interpreter. Those that it forks from a server come from
    # the one that this process comes from, because another one would import everything again.
    multiprocessing.set_start_method(None, force=True)
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None
    os.chdir(cwd)
    os.environ |= environment
    sys.argv = arguments
    sys.path[:0] = [str(Path(script).parent), *path]
    importlib.invalidate_caches()
    runpy.run_path(script, run_name="__main__")


def write_llama(folder: Path) -> None:
    """Llama 3.1 8B's Hugging Face folder, of which only config.json says anything."""
    shape = model_config(Model(family="llama", flavor="llama3.1_8b"))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(family_of(shape).to_fields(shape)))
    (folder / "tokenizer.json").touch()
