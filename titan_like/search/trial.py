"""One trial: some steps of training in a layout, under a torchrun of its own, and its outcome."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_like.config.errors import ConfigError, require
from titan_like.config.load import edit
from titan_like.config.monitoring import Checkpoint, Evaluation, Metrics, Profiling
from titan_like.config.schema import JobConfig, LRScheduler
from titan_like.train.environment import environment_number

OK, TOO_LARGE, FAILED, HUNG, SKIPPED = "ok", "out_of_memory", "failed", "hung", "skipped"
_MARK = "TITAN_SEARCH"  # environment variable of all processes of a search: its folder
_GRACE = 10.0  # seconds in which srun ends processes on other machines
_KILLED = "Signal 9 (SIGKILL)"  # as torchrun reports it; the system does that if memory runs out
_NO_MEMORY = ("enough memory", "allocate memory", "out of memory", "bad_alloc", "MemoryError", _KILLED)


@dataclass(frozen=True)
class Plan:
    """How trials are measured. A search resumes only with the same plan."""

    warmup: int  # steps before the measured ones
    steps: int
    timeout: float  # seconds of a trial
    memory_gib: float | None  # that a process may use


@dataclass(frozen=True)
class Place:
    """Where trials run: on this machine, or on the nodes of a Slurm job."""

    program: tuple[str, ...]  # what torchrun starts
    per_node: int | None = None  # processes that a node takes; None for any number, which share its CPUs
    memory_gib: float | None = None  # that the processes of a trial may use together; None for no limit
    hosts: tuple[str, ...] = ()  # of the Slurm job
    job: int = 0  # its number

    @classmethod
    def of_slurm(cls, program: tuple[str, ...]) -> Place:
        """The nodes of the Slurm job that this process is in, with `NPROC` processes each, or one for each GPU.

        Raises a `ConfigError` if Slurm does not name them.
        """
        nodes, job = os.environ.get("SLURM_JOB_NODELIST", ""), environment_number("SLURM_JOB_ID", 0)
        per_node = environment_number("NPROC" if os.environ.get("NPROC") else "SLURM_GPUS_ON_NODE", 1, least=1)
        try:
            hosts = subprocess.check_output(["scontrol", "show", "hostnames", nodes], text=True, timeout=60).split()
        except (OSError, subprocess.SubprocessError) as error:
            reason = f"scontrol does not name its nodes ({error}); unset SLURM_JOB_ID to search on this machine alone"
            raise ConfigError("environment variable SLURM_JOB_NODELIST", nodes, reason) from None
        return cls(program, per_node, None, tuple(hosts), job)

    def check(self, processes: int) -> None:
        """Refuse a job of this many processes if it cannot run here."""
        each, limit = self.per_node or processes, (self.per_node or processes) * max(1, len(self.hosts))
        available = f"the Slurm job has {len(self.hosts)} nodes of {each}" if self.hosts else f"there are {each} GPUs"
        require(processes <= limit, "--processes", processes, f"{available}; use at most {limit}")
        reason = f"does not fill whole nodes; use a multiple of {each}"
        require(processes <= each or processes % each == 0, "--processes", processes, reason)

    def command(self, processes: int, settings: list[str], number: int, plan: Plan) -> list[str]:
        """The command of a trial. ``number`` differs, so that no Slurm step meets at the port of the one before."""
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        limit = plan.memory_gib or (self.memory_gib and self.memory_gib / processes)
        if limit:  # of private writable memory: of the address space, libraries reserve much that they never use
            kib = str(int(limit * 2**20))
            torchrun = ["sh", "-c", 'ulimit -d "$1" && shift && exec "$@"', "sh", kib, *torchrun]
        if not self.hosts:
            alone = ["--standalone", "--local_addr=127.0.0.1", f"--nproc_per_node={processes}"]
            return [*torchrun, *alone, *self.program, *settings]
        each = min(processes, self.per_node or 1)
        hosts = self.hosts[: processes // each]
        srun = ["srun", f"--nodes={len(hosts)}", f"--ntasks={len(hosts)}", "--ntasks-per-node=1", "--overlap"]
        srun += [f"--nodelist={','.join(hosts)}", "--kill-on-bad-exit=1", "--cpu-bind=none"]
        srun += [f"--time={int(plan.timeout // 60) + 2}"]  # minutes; nothing is left running if srun is killed
        rendezvous = [f"--nnodes={len(hosts)}", f"--nproc_per_node={each}", "--rdzv_backend=c10d"]
        rendezvous += [f"--rdzv_endpoint={hosts[0]}:{20000 + (self.job + number) % 10000}"]
        identity = f"--rdzv_id={self.job}.{number}.{os.getpid()}"  # differs from the step that a killed search has left
        return [*srun, *torchrun, *rendezvous, identity, *self.program, *settings]


def arguments(key: str, value: Any) -> Iterator[str]:
    """A section or a setting as arguments of train.py. In free tables, text is quoted."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from arguments(f"{key}.{name}", item)
    else:
        is_plain = isinstance(value, str) and key.count(".") == 1
        yield f"--{key}={value if is_plain else json.dumps(value, ensure_ascii=False)}"


def settings_of(config: JobConfig) -> list[str]:
    """Everything that a run sets, as arguments of train.py that need no file."""
    tree = config.model_dump(mode="json", exclude_defaults=True)
    tree.get("job", {}).pop("config_file", None)
    return [word for section, table in tree.items() for word in arguments(section, table)]


def measured(config: JobConfig, steps: int, folder: str) -> list[str]:
    """The arguments of a run as it is measured: this many steps, and nothing besides training."""
    length = {"steps": steps, "samples": None, "tokens": None, "epochs": None, "batch_size_rampup": None}
    values: dict[str, Any] = {f"training.{name}": value for name, value in length.items()} | {"model.from_": None}
    values |= {"job.dump_folder": folder, "job.dry_run": False, "job.description": ""}
    values["health.loss_spike_action"] = "skip"  # the other needs checkpoints
    plain = {"lr_scheduler": LRScheduler(decay="constant"), "metrics": Metrics(log_interval=steps)}
    plain |= {"checkpoint": Checkpoint(), "evaluation": Evaluation(), "profiling": Profiling()}
    return settings_of(edit(config, values).model_copy(update=plain))


def run_trial(folder: Path, config: JobConfig, processes: int, place: Place, plan: Plan, number: int) -> dict[str, Any]:
    """Measure a layout. Returns its outcome, the reason, and the figures of its median step.

    Its processes end with this call, whatever happens.
    """
    shutil.rmtree(folder, ignore_errors=True)  # of a search that was killed
    out, run, log = folder.parents[1].resolve(), folder / "run", folder / "log.txt"
    for path in (run, out / "data_cache"):
        path.mkdir(parents=True, exist_ok=True)
    (run / "data_cache").symlink_to(out / "data_cache")  # new data is tokenized once
    settings = measured(config, plan.warmup + plan.steps, str(run))
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            place.command(processes, settings, number, plan),
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            env=os.environ | {_MARK: str(out)}, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(plan.timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None and place.hosts:
                process.terminate()  # srun hands it on to all nodes
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            end_processes(out)
            process.wait()
    if code is None:
        return {"outcome": HUNG, "reason": f"ended because it was not over after {plan.timeout:g} s"}
    if code != 0:
        text = log.read_text(encoding="utf-8", errors="replace")
        if code == -signal.SIGTERM or "SignalException" in text:  # ended from outside, as at the end of a Slurm job
            raise KeyboardInterrupt
        return failure(text, code)
    return figures(run / "metrics.jsonl", plan)


def failure(log: str, code: int) -> dict[str, Any]:
    """Why a job failed: the first error in what its processes printed, before torchrun's own words about it."""
    from titan_like.verify.processes import error_in

    text = re.sub(r"^\[rank\d+\]: ?", "", log, flags=re.MULTILINE)
    sentence = re.search(r"^error: (.+)", text, re.MULTILINE)
    head = re.split(r"^.* failed \(exitcode: ", text, maxsplit=1, flags=re.MULTILINE)[0]
    reason = sentence[1] if sentence else error_in(head) or (head.strip().splitlines() or [f"exit code {code}"])[-1]
    if _KILLED in log:
        reason = "the system killed a process, perhaps because memory ran out"
    return {"outcome": TOO_LARGE if any(word in log for word in _NO_MEMORY) else FAILED, "reason": reason}


def figures(metrics: Path, plan: Plan) -> dict[str, Any]:
    """The rates of the median step after warm-up, the lower one of two, and the most memory of rank 0."""
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    records = [json.loads(line) for line in lines]
    if len(records) < plan.warmup + plan.steps:
        return {"outcome": FAILED, "reason": f"it ended after {len(records)} of {plan.warmup + plan.steps} steps"}
    times = [record["step_time_s"] for record in records[plan.warmup :]]
    middle = records[plan.warmup + times.index(sorted(times)[(len(times) - 1) // 2])]
    rates = {name: middle[name] for name in ("step_time_s", "tokens_per_second", "tflops_per_device", "mfu_model")}
    rates["samples_per_second"] = middle["global_batch_size"] / middle["step_time_s"]
    return {"outcome": OK, "step_times_s": times, "peak_memory_bytes": records[-1]["peak_memory_bytes"], **rates}


def end_processes(out: Path) -> None:
    """Kill every process of a search on this machine, including what a killed search has left behind.

    torchrun's processes are in sessions of their own, so they are found by their environment.
    """
    mark = f"{_MARK}={out.resolve()}".encode()
    for _ in range(100):
        pids = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has just ended, or is another user's
                if mark in file.read_bytes().split(b"\0"):
                    pids.append(int(file.parent.name))
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
