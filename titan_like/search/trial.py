"""One trial: a few steps of training in a layout, under a torchrun of its own, and what became of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_like.config.errors import ConfigError
from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.search.settings import arguments
from titan_like.train.environment import environment_number
from titan_like.train.setup import OUT_OF_MEMORY, host_memory_bytes
from titan_like.verify.processes import error_in

OK, TOO_LARGE, FAILED, HUNG = "ok", "out_of_memory", "failed", "hung"
_MARK = "TITAN_SEARCH"  # environment variable of all processes of a search: its folder
_GRACE = 10.0  # seconds in which srun ends the processes on other machines
_KILLED = "Signal 9 (SIGKILL)"  # as torchrun reports it; the system does that if memory runs out
_DATA_CACHE = "data_cache"  # in a run's dump folder


@dataclass(frozen=True)
class Place:
    """Where trials run: on this machine, or on the nodes of a Slurm job."""

    program: tuple[str, ...]  # what torchrun starts
    per_node: int | None = None  # processes that a node takes; None for any number, which share its CPUs
    hosts: tuple[str, ...] = ()  # of the Slurm job
    job: int = 0  # its number
    memory_bytes: float | None = None  # that the processes of a job may use together; None for no limit

    @classmethod
    def found(cls, program: tuple[str, ...], num_gpus: int) -> Place:
        """The Slurm job that this process is in, else this machine with its ``num_gpus`` GPUs.

        Without GPUs, trials may use nine tenths of the machine's memory.

        Raises:
            ConfigError: Slurm does not name the job's nodes.
        """
        if not os.environ.get("SLURM_JOB_ID"):
            return cls(program, num_gpus or None, memory_bytes=None if num_gpus else 0.9 * host_memory_bytes())
        nodes = os.environ.get("SLURM_JOB_NODELIST", "")
        try:
            told = subprocess.run(
                ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True, timeout=60
            )
        except (OSError, subprocess.SubprocessError) as error:
            problem = f"scontrol does not name its nodes ({error}); unset SLURM_JOB_ID to search on this machine alone"
            raise ConfigError("environment variable SLURM_JOB_NODELIST", nodes, problem) from None
        name = "NPROC" if os.environ.get("NPROC") else "SLURM_GPUS_ON_NODE"
        per_node = environment_number(name, 1, least=1)
        return cls(program, per_node, tuple(told.stdout.split()), environment_number("SLURM_JOB_ID", 0))

    def problem(self, processes: int) -> str | None:
        """Why a job of this many processes cannot run here, as the predicate of a sentence."""
        if self.per_node is None or (processes <= self.per_node and not self.hosts):
            return None
        if not self.hosts:
            return f"this machine has {self.per_node} GPUs; use at most that many processes"
        there = f"{len(self.hosts)} nodes of {self.per_node}"
        if processes > self.per_node * len(self.hosts):
            return f"the Slurm job has {there}; use at most {self.per_node * len(self.hosts)} processes"
        if processes > self.per_node and processes % self.per_node:
            return f"does not fill whole nodes of the Slurm job, which has {there}; use a multiple of {self.per_node}"
        return None

    def command(
        self, processes: int, settings: list[str], number: int, timeout: float, limit: float | None
    ) -> list[str]:
        """The command of a trial.

        ``limit`` is that of a process's memory in bytes. ``number`` tells the trials of a Slurm job apart, so that
        none meets at the port of the one before.
        """
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        if not self.hosts:
            torchrun += ["--standalone", "--local_addr=127.0.0.1", f"--nproc_per_node={processes}"]
            return [*limited(limit), *torchrun, *self.program, *settings]
        assert self.per_node is not None
        nodes, each = -(-processes // self.per_node), min(processes, self.per_node)
        port = 20000 + (self.job + number) % 10000
        srun = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
        srun += [f"--nodelist={','.join(self.hosts[:nodes])}", "--overlap", "--kill-on-bad-exit=1", "--cpu-bind=none"]
        srun.append(f"--time={int(timeout // 60) + 2}")  # minutes: nothing is left running if srun is killed
        torchrun += [f"--nnodes={nodes}", f"--nproc_per_node={each}", "--rdzv_backend=c10d"]
        torchrun += [f"--rdzv_endpoint={self.hosts[0]}:{port}", f"--rdzv_id={self.job}.{number}"]
        return [*srun, *limited(limit), *torchrun, *self.program, *settings]


def limited(limit: float | None) -> list[str]:
    """Words before a command that limit the memory of each of its processes in bytes.

    The limit is that of private writable memory (RLIMIT_DATA), so an allocation beyond it fails and is reported.
    Address space says less: libraries reserve much that they never use.
    """
    if limit is None:
        return []
    return ["sh", "-c", 'ulimit -d "$1" && shift && exec "$@"', "sh", str(int(limit) >> 10)]


def measured(config: JobConfig, steps: int, folder: Path) -> JobConfig:
    """The run as it is measured: so many steps in ``folder``, and nothing besides training."""
    return edit(
        config,
        {
            "job.dump_folder": str(folder),
            "job.dry_run": False,
            "training.steps": steps,
            "training.samples": None,
            "training.tokens": None,
            "training.batch_size_rampup": None,
            "lr_scheduler.warmup_steps": 0,
            "lr_scheduler.decay": "constant",
            "lr_scheduler.decay_steps": None,
            "health.loss_spike_action": "skip",
            "checkpoint.enable": False,
            "checkpoint.load_step": None,
            "checkpoint.initial_load_path": None,
            "evaluation.interval": 0,
            "evaluation.datasets": [],
            "metrics.log_interval": steps,
            "metrics.tensorboard": False,
            "metrics.wandb": False,
            "profiling.timeline_steps": [],
            "profiling.timeline_interval": 0,
            "profiling.trace_steps": [],
        },
    )


@dataclass(frozen=True)
class Plan:
    """How trials are measured."""

    out: Path  # the search's folder
    warmup: int
    steps: int
    timeout: float  # seconds of a trial
    memory_bytes: float | None  # that a process may use


def run_trial(name: str, config: JobConfig, processes: int, place: Place, plan: Plan, number: int) -> dict[str, Any]:
    """Measure a layout. Returns its outcome, and the figures of its median step.

    The processes end with this call, whatever happens.
    """
    folder = plan.out / "trials" / name
    shutil.rmtree(folder, ignore_errors=True)  # of a search that was killed
    run, cache = folder / "run", plan.out.absolute() / _DATA_CACHE
    for path in (run, cache):
        path.mkdir(parents=True, exist_ok=True)
    (run / _DATA_CACHE).symlink_to(cache)  # so that new data is tokenized once
    settings = arguments(measured(config, plan.warmup + plan.steps, run))
    limit = plan.memory_bytes or (place.memory_bytes and place.memory_bytes / processes)
    command = place.command(processes, settings, number, plan.timeout, limit)
    environment = os.environ | {_MARK: str(plan.out.absolute())}
    started, log = time.monotonic(), folder / "log.txt"
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            code: int | None = process.wait(plan.timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None and (place.hosts or not os.path.isdir("/proc/self")):
                process.terminate()  # srun hands it on to all nodes, torchrun to its processes
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            end_processes(plan.out)
            process.wait()
    result = {"trial": name, **outcome(code, log.read_text(encoding="utf-8", errors="replace"), plan.timeout)}
    if result["outcome"] == OK:
        result |= figures(run / "metrics.jsonl", plan.warmup, plan.steps)
    return result | {"seconds": round(time.monotonic() - started, 1)}


def outcome(code: int | None, log: str, timeout: float) -> dict[str, str]:
    """What became of a trial that ended with ``code``, or None if it was stopped, and why."""
    if code == 0:
        return {"outcome": OK, "reason": ""}
    if code is None:
        return {"outcome": HUNG, "reason": f"stopped because it was not over after {timeout:g} s"}
    reason = cause(log) or f"exit code {code}"
    if any(word in log for word in (*OUT_OF_MEMORY, "enough memory", "MemoryError", _KILLED)):
        killed = "the system killed a process, perhaps for want of memory" if _KILLED in log else reason
        return {"outcome": TOO_LARGE, "reason": killed}
    return {"outcome": FAILED, "reason": reason}


def cause(log: str) -> str:
    """The first error in what the processes of a job printed, before torchrun's own words about it."""
    text = re.sub(r"^\[rank\d+\]: ?", "", log, flags=re.MULTILINE)
    told = re.search(r"^error: (.+)", text, re.MULTILINE)
    if told:
        return told[1]
    ours = re.split(r"^.* failed \(exitcode: ", text, maxsplit=1, flags=re.MULTILINE)[0]
    lines = ours.strip().splitlines()
    return error_in(ours) or (lines[-1] if lines else "")


def figures(metrics: Path, warmup: int, steps: int) -> dict[str, Any]:
    """The rates of the median step after warm-up, the lower one of two, and the most memory of rank 0.

    A run without all its steps has failed.
    """
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    records = [json.loads(line) for line in lines][warmup:]
    if len(records) < steps:
        return {"outcome": FAILED, "reason": f"it ended after {len(lines)} of {warmup + steps} steps"}
    middle = sorted(records, key=lambda record: record["step_time_s"])[(len(records) - 1) // 2]
    return {
        "step_time_s": middle["step_time_s"],
        "step_times_s": [record["step_time_s"] for record in records],
        "samples_per_second": middle["global_batch_size"] / middle["step_time_s"],
        "tokens_per_second": middle["tokens_per_second"],
        "tflops_per_device": middle["tflops_per_device"],
        "mfu_model": middle["mfu_model"],
        "peak_memory_bytes": records[-1]["peak_memory_bytes"],
    }


def end_processes(out: Path) -> None:
    """Kill every process of a search on this machine, also those that a killed search has left behind.

    torchrun's processes are in sessions of their own, so they are found by their environment.
    """
    mark = f"{_MARK}={out.absolute()}".encode()
    for _ in range(100):
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has just ended, or is another user's
                if mark in file.read_bytes().split(b"\0"):
                    found.append(int(file.parent.name))
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.05)
