"""A Slurm cluster of this machine alone: its own slurmctld and two slurmd on loopback, in a folder of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.e2e.jobs import free_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
NODES = ("127.0.0.1", "127.0.0.2")  # names that every machine can resolve

# auth/none trusts everyone, which on loopback is this machine's users; cred_expire is how long a requeued job waits.
# proctrack/linuxproc finds the processes of a step by their parents, as cgroups would.
_SETTINGS = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
MpiDefault=none
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 PreemptMode=REQUEUE
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


def missing_program() -> str | None:
    """A program of Slurm that this machine lacks."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin"
    return next((name for name in PROGRAMS if shutil.which(name, path=path) is None), None)


class SlurmCluster:
    """Starts the daemons, and ends them and everything that they have started. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        path = os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin"
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}

    def __enter__(self) -> SlurmCluster:
        (self.folder / "state").mkdir()
        settings = _SETTINGS.format(
            folder=self.folder,
            host=socket.gethostname().partition(".")[0],
            user=self.call("id", "--user", "--name"),
            nodes=NODES,
            ports=[free_port() for _ in range(3)],
        )
        (self.folder / "slurm.conf").write_text(settings)
        try:
            self._start("slurmctld", "-D", "-c")
            for node in NODES:
                (self.folder / f"spool-{node}").mkdir()
                self._start("slurmd", "-D", "-N", node)
            wait_until(lambda: self.call("sinfo", "--noheader", "--format=%D %t").split() == ["2", "idle"], 30)
        except BaseException as error:
            error.add_note(self.logs())
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["scancel", "--me"], env=self.environment, capture_output=True, timeout=30, check=False)
        for daemon in self._daemons:
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(timeout=5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in self.processes():  # steps and jobs outlive their daemon
            os.kill(process, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Every process that was started in this cluster."""
        mark, found = f"SLURM_CONF={self.folder}/slurm.conf".encode(), []
        for environment in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in environment.read_bytes().split(b"\0"):
                    found.append(int(environment.parent.name))
            except OSError:  # it has just ended, or is another user's
                continue
        return found

    def call(self, *command: str) -> str:
        """What a command prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout.strip()

    def submit(self, *arguments: str) -> str:
        """The number of a new job."""
        return self.call("sbatch", "--parsable", *arguments)

    def job(self, number: str) -> dict[str, str]:
        """What scontrol shows of a job."""
        shown = self.call("scontrol", "show", "job", "--oneliner", number)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait_for_state(self, number: str, state: str, seconds: float) -> None:
        """Wait until a job has come to a state."""
        wait_until(lambda: self.job(number)["JobState"] == state, seconds)

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def _start(self, *command: str) -> None:
        with open(self.folder / "daemons.log", "ab") as log:
            self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until something is so.

    Raises:
        TimeoutError: it has not come about.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:.0f} s")
        time.sleep(0.1)
