"""Memory and speed of a training process on a CPU with a large vocabulary, under settings of the C allocator.

    python benchmarks/host_memory.py --json host_memory.json
    python benchmarks/host_memory.py --settings ours --rounds 1

A GPT with 16 million parameters, 13 million of them in the embedding table of 50,257 tokens, trains for --steps steps
in one process. Rounds alternate between the settings, and each run is a new process:

- ours: those of `train.py` (`titan_like.train.host_memory`), which keep freed buffers in the process and leave a spare
  hole for small blocks that live on, with the cache of small blocks turned off as docs/metrics.md says;
- tcache: ours with that cache, which fragments the heap;
- default: glibc's own settings, which return large buffers to the kernel when they are freed.

Growth is that of the peak resident set from step 10 to the last step. Tokens per second are those of the median step
after step 10. System time is spent in the kernel, mostly to hand out pages.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from runs import ROOT, machine, parser_of, read_records, write

sys.path.insert(0, str(ROOT))
SETTINGS = {"ours": "glibc.malloc.tcache_count=0", "tcache": "", "default": ""}  # glibc's tunables
TOKENS = 8 * 256
RUN = [
    "--data.dataset=stdlib", "--model.overrides.vocab_size=50257", "--model.overrides.hidden_size=256",
    "--model.overrides.num_layers=4", "--model.overrides.max_seq_len=256", "--training.seq_len=256",
    "--training.micro_batch_size=4", "--training.global_batch_size=8", "--evaluation.interval=0",
    "--checkpoint.enable=false",
]  # fmt: skip


def worker(setting: str, argv: list[str]) -> None:
    """Run train.py under one of the settings; its last line of output is the processor time."""
    from titan_like.train import host_memory

    if setting == "default":
        host_memory.keep_freed_memory = lambda: None
    from titan_like.commands.train import main

    status = main(argv)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"user_s": used.ru_utime, "system_s": used.ru_stime}))
    sys.exit(status)


def measure(setting: str, steps: int, threads: int, folder: Path) -> dict[str, float]:
    """Measure one run."""
    command = [sys.executable, __file__, "worker", setting, f"--job.dump_folder={folder}", *RUN]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    environment["GLIBC_TUNABLES"] = SETTINGS[setting]
    done = subprocess.run([*command, f"--training.steps={steps}"], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{setting} failed:\n{done.stdout}{done.stderr}")
    records = read_records(folder)
    peaks = [record["peak_memory_bytes"] for record in records]
    return {
        "peak_at_10_mib": peaks[9] / 2**20,
        "peak_at_end_mib": peaks[-1] / 2**20,
        "growth": peaks[-1] / peaks[9] - 1,
        "tokens_per_second": TOKENS / statistics.median(record["step_time_s"] for record in records[10:]),
        **json.loads(done.stdout.splitlines()[-1]),
    }


def main() -> None:
    """Read the command line, measure the settings in turn, write the result."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=300, help="steps of each run (default 300)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each setting (default 2)")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="default: all")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="OMP_NUM_THREADS (default: all cores)")
    args = parser.parse_args()

    runs: dict[str, list[dict[str, float]]] = {setting: [] for setting in args.settings}
    print(
        f"{'':8} {'step 10':>9} {'step ' + str(args.steps):>9} {'growth':>7} {'tokens/s':>9} {'user':>8} {'system':>8}"
    )
    for number in range(args.rounds):
        for setting in args.settings:
            with tempfile.TemporaryDirectory() as folder:
                run = measure(setting, args.steps, args.threads, Path(folder))
            runs[setting].append(run)
            print(
                f"{setting:8} {run['peak_at_10_mib']:5.0f} MiB {run['peak_at_end_mib']:5.0f} MiB {run['growth']:6.1%} "
                f"{run['tokens_per_second']:9.0f} {run['user_s']:6.0f} s {run['system_s']:6.1f} s  round {number + 1}",
                flush=True,
            )
    libc = " ".join(os.confstr("CS_GNU_LIBC_VERSION").split())  # type: ignore[union-attr]
    write(args.json, {"run": RUN, "machine": machine(), "libc": libc, "runs": runs})


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], sys.argv[3:])
    else:
        main()
