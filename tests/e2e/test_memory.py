"""The memory of a run on a CPU stays the same from step to step."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.jobs import records
from tests.e2e.scripts import PLAIN, REPO

SETTINGS = [
    "--data.dataset=text", "--model.overrides.vocab_size=50257", "--model.overrides.hidden_size=32",
    "--model.overrides.num_layers=1", "--training.seq_len=64", "--training.micro_batch_size=4",
    "--training.global_batch_size=8", "--training.steps=32", "--evaluation.interval=0", "--checkpoint.enable=false",
]  # fmt: skip

TRAIN = """
from titan_like.config.load import run_command
from titan_like.train import watchdog
from titan_like.commands.train import main

class Watchdog(watchdog.Watchdog):
    def __enter__(self):
        self.period = self.seconds_between_heartbeats = 0.02
        return super().__enter__()

watchdog.Watchdog = Watchdog
run_command(main)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="sets glibc's allocator")
def test_memory_does_not_grow(tmp_path: Path) -> None:
    """With a large vocabulary logits are 51 MB a microbatch, two of them a step, 32 steps.

    Signs of life, each of which looks at the frames of the thread that trains, are given many times a step.
    """
    text = tmp_path / "text.txt"
    text.write_text("".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz ", k=40_000)))
    command = [sys.executable, "-c", TRAIN, f"--job.dump_folder={tmp_path}", f'--data.paths=["{text}"]', *SETTINGS]
    environment = PLAIN | {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}  # as docs/profiling.md says
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peaks = [record["peak_memory_bytes"] for record in records(tmp_path)]
    assert peaks[-1] <= 1.01 * peaks[9]
