"""Tokenizing text, for `data.py`: the script against bare loops, and the memory of its processes."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
END = "<|endoftext|>"
REPEATS = 5


def text_of(options: argparse.Namespace, folder: Path, megabytes: float) -> tuple[Path, str]:
    """A .jsonl file of the wanted size, and the tokenizer: what the command line names, else the standard library."""
    tokenizer = options.tokenizer or str(folder / "tokenizer.json")
    if options.input:
        return options.input, tokenizer if options.tokenizer else _train(
            tokenizer, [options.input.read_text()[: 10**7]]
        )
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    path, draw, written = folder / f"{megabytes:g}.jsonl", random.Random(0), 0
    if not options.tokenizer:
        _train(tokenizer, texts)
    with open(path, "w", encoding="utf-8") as file:
        for number in count():
            lines = texts[number % len(texts)].splitlines(keepends=True)
            start = draw.randrange(len(lines) + 1)
            line = json.dumps({"text": f"copy {number}\n" + "".join(lines[start:] + lines[:start])}) + "\n"
            written += file.write(line)
            if written >= megabytes * 1e6:
                return path, tokenizer
    raise AssertionError


def _train(path: str, texts: list[str]) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if not Path(path).exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=8192, special_tokens=[END], show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.save(path)
    return path


def tokenize(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds of the script with 1 and 2 workers, and of as many bare loops: in turn, medians."""
    path, tokenizer = text_of(options, folder, 100 * options.scale)
    found: dict[str, Any] = {"bytes": path.stat().st_size}
    script: dict[int, list[float]] = {1: [], 2: []}
    bare: dict[int, list[float]] = {1: [], 2: []}
    for workers in [1, 2] * REPEATS:
        _, counts = preprocessed(path, tokenizer, workers, folder)
        script[workers].append(counts["seconds"])
        bare[workers].append(bare_seconds(path, tokenizer, workers))
        found["tokens"] = counts["tokens"]
    for workers in (1, 2):
        found |= {f"seconds_{workers}": script[workers], f"bare_{workers}": bare[workers]}
    medians = {workers: statistics.median(script[workers]) for workers in (1, 2)}
    bare_medians = {workers: statistics.median(bare[workers]) for workers in (1, 2)}
    speeds = [found["bytes"] / medians[workers] / 1e6 for workers in (1, 2)]
    found["speedup"] = medians[1] / medians[2]
    found["bare_speedup"] = bare_medians[1] / bare_medians[2]
    found["of_bare"] = [bare_medians[workers] / medians[workers] for workers in (1, 2)]
    print(
        f"tokenize: {speeds[0]:.2f} and {speeds[1]:.2f} MB/s on 1 and 2 workers, {found['speedup']:.2f} × (goal 1.8; "
        f"two bare loops {found['bare_speedup']:.2f} × one); {found['of_bare'][0]:.2f} and {found['of_bare'][1]:.2f} × "
        f"the bare loops (goal 0.9)"
    )
    return found


def bare_seconds(path: Path, tokenizer: str, processes: int) -> float:
    """Seconds in which processes tokenize a file whose texts they hold already, each its share of every megabyte."""
    context = get_context("spawn")
    barrier, times = context.Barrier(processes + 1, timeout=3600), []
    workers = [
        context.Process(target=_bare_loop, args=(path, tokenizer, number, processes, barrier))
        for number in range(processes)
    ]
    for worker in workers:
        worker.start()
    for _ in range(2):  # before and after
        barrier.wait()
        times.append(time.perf_counter())
    for worker in workers:
        worker.join()
    return times[1] - times[0]


def _bare_loop(path: Path, name: str, number: int, processes: int, barrier: Any) -> None:
    from titan_like.data.text.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(name).tokenizer
    batches, size = [[]], 0  # type: list[list[str]], int
    with open(path, encoding="utf-8") as file:
        for line in file:
            batches[-1].append(json.loads(line)["text"])
            size += len(line)
            if size >= 1 << 20:
                batches.append([])
                size = 0
    barrier.wait()
    for batch in batches[number::processes]:
        tokenizer.encode_batch_fast(batch, add_special_tokens=False)
    barrier.wait()


def preprocessed(path: Path, tokenizer: str, workers: int, folder: Path) -> tuple[list[int], dict[str, Any]]:
    """Run the script; the peak memory of its processes, the first one's first, and what it has counted."""
    with tempfile.TemporaryDirectory(dir=folder) as output:
        command = [sys.executable, "scripts/preprocess_data.py", f"--input={path}", f"--tokenizer={tokenizer}"]
        command += [f"--output={output}/tokens", f"--workers={workers}", f"--json={output}/counts.json"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as job:
            peaks = {}
            while job.poll() is None:
                children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
                for pid in [job.pid, *map(int, children.read_text().split() if children.exists() else [])]:
                    peaks[pid] = max(peak_of(pid), peaks.get(pid, 0))
                time.sleep(0.2)
            if job.returncode:
                raise SystemExit(f"{' '.join(command)} failed:\n{job.stderr.read() if job.stderr else ''}")
        return list(peaks.values()), json.loads(Path(f"{output}/counts.json").read_text())


def peak_of(pid: int) -> int:
    """Peak resident bytes of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def memory(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Peak memory of each process of the script, which has two workers."""
    path, tokenizer = text_of(options, folder, 1000 * options.scale)
    inputs = {"jsonl": path}
    if options.long:
        inputs["txt"] = folder / "long.txt"
        with open(path, encoding="utf-8") as lines, open(inputs["txt"], "w", encoding="utf-8") as file:
            file.writelines(json.loads(line)["text"] for line in lines)
    found: dict[str, Any] = {}
    for kind, name in inputs.items():
        peaks, _ = preprocessed(name, tokenizer, 2, folder)
        found[kind] = {"bytes": name.stat().st_size, "parent": peaks[0], "workers": sorted(peaks[1:])[-2:]}
        workers = " and ".join(f"{peak / 2**20:.0f}" for peak in found[kind]["workers"])
        print(f"memory: .{kind}: {peaks[0] / 2**20:.0f} MiB, its workers {workers} MiB (goal 300)")
    return found
