"""A data loader process dies: the job ends with one sentence, and resumes with the next sample on another number."""

import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.jobs import REPO, ForkedJob, kill, records, short, steps
from tests.e2e.scripts import Script
from tests.float64 import bound
from titan_like.data.readers.indexed import DTYPES, IndexedWriter

ENDLESS = 100_000
SETTINGS = [
    f"--job.config_file={REPO / 'train_configs/debug_gpt.toml'}", *short(ENDLESS, micro_batch=1),
    "--data.dataset=indexed", "--optimizer.lr=0.0005", "--lr_scheduler.decay=constant", "--checkpoint.interval=5",
    "--metrics.log_interval=1", "--training.dtype=float64",
]  # fmt: skip


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    """Settings of a run over a blend of two datasets."""
    for name in ("subprocess", "ast"):
        with IndexedWriter(tmp_path / name, DTYPES[8]) as writer:
            writer.add(np.frombuffer(Path(sys.modules[name].__file__ or "").read_bytes(), np.uint8))
    return [*SETTINGS, f'--data.paths=[0.7, "{tmp_path}/subprocess", 0.3, "{tmp_path}/ast"]']


def train(*settings: str) -> str:
    """Train on one process, and return what it printed."""
    done = Script("train.py", settings).wait()
    assert done.returncode == 0, done.stderr
    return done.stdout


def children(pid: int) -> list[int]:
    """Processes that any thread of a process has started."""
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the process in /proc")
def test_a_job_that_loses_a_loader_process_says_so_and_resumes_on_one_rank(tmp_path: Path, settings: list[str]) -> None:
    dump, log = tmp_path / "parts", tmp_path / "log.txt"
    arguments = [*settings, "--data.num_workers=1", f"--job.dump_folder={dump}"]
    with ForkedJob(log, "train.py", arguments) as job:
        job.until(lambda: len(steps(dump)) >= 8, "step 8")
        (loader,) = children(job.workers()[1])
        kill(loader, signal.SIGKILL)
        assert job.wait() == 1
        errors = [line for line in job.output.splitlines() if line.startswith("error: ")]
    sentence = f"error: a data loader process (pid {loader}) was killed by signal 9, "
    assert len(errors) == 1 and errors[0].startswith(sentence), job.output
    assert "in __next__" not in job.output and "Traceback" not in job.output
    reached = len(steps(dump))
    assert 8 <= reached < ENDLESS

    settings.append(f"--training.steps={reached + 8}")
    assert "resumed from " in train(*settings, f"--job.dump_folder={dump}")
    train(*settings, f"--job.dump_folder={tmp_path / 'whole'}")
    assert steps(dump) == steps(tmp_path / "whole") == list(range(1, reached + 9))
    for key in ("loss", "consumed_samples", "samples/ast"):
        found, wanted = ([one[key] for one in records(folder)] for folder in (dump, tmp_path / "whole"))
        assert found == pytest.approx(wanted, rel=bound(4096 * len(wanted))), key


SLOW_SEED = """
import sys, time, traceback
import torch.cuda
from titan_like.commands.train import run

class Slow:
    def __getattr__(self, name):
        return getattr(traceback, name)
    def format_stack(self):  # which torch calls under its lock when it seeds
        time.sleep(0.5)
        return traceback.format_stack()

torch.cuda.traceback = Slow()
run()
"""


def test_processes_are_not_forked_while_torch_seeds(tmp_path: Path, settings: list[str]) -> None:
    (tmp_path / "slow.py").write_text(SLOW_SEED)
    options = [f"--job.dump_folder={tmp_path}/slow", "--data.num_workers=2", "--training.steps=3"]
    out, err = Script(str(tmp_path / "slow.py"), [*settings, *options]).communicate(timeout=60)
    assert " step 3/" in out, err
