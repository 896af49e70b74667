"""No step of a run on a CPU leaves its logits behind."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SETTINGS = [
    "--data.dataset=text", "--model.overrides.vocab_size=50257", "--model.overrides.hidden_size=32",
    "--model.overrides.num_layers=1", "--training.seq_len=64", "--training.micro_batch_size=4",
    "--training.global_batch_size=8", "--training.steps=48", "--evaluation.interval=0", "--checkpoint.enable=false",
]  # fmt: skip

TRAIN = """
import sys
from titan_like.config.load import run_command
from titan_like.train import watchdog
from train import main

class Watchdog(watchdog.Watchdog):
    def __enter__(self):
        self.period = self.seconds_between_heartbeats = 0.02
        return super().__enter__()

watchdog.Watchdog = Watchdog
run_command(main)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="sets glibc's allocator")
def test_logits_do_not_outlive_their_step(tmp_path: Path) -> None:
    """With a large vocabulary logits are 51 MB a microbatch, two of them a step, 48 steps.

    Signs of life, each of which looks at the frames of the thread that trains, are given many times a step.
    """
    text = tmp_path / "text.txt"
    text.write_text("".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz ", k=40_000)))
    command = [sys.executable, "-c", TRAIN, f"--job.dump_folder={tmp_path}", f'--data.paths=["{text}"]', *SETTINGS]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    peaks = [record["peak_memory_bytes"] for record in records]
    logits = 4 * 4 * 64 * 50_304  # bytes
    # Heaps that fragment take one to three of them; whatever keeps logits from step to step takes dozens.
    assert peaks[-1] - peaks[0] < 6 * logits
