"""scripts/slurm/train.sbatch on a real Slurm, where it is installed: a cluster of this machine alone.

Its slurmctld and two slurmd are on loopback, in a folder of its own. How jobs are requeued is tested with stand-ins for
Slurm's programs, too.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from tests.e2e.jobs import REPO, free_port, processes_with, short, steps, wait_until

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

    def __enter__(self) -> Self:
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
        return processes_with(f"SLURM_CONF={self.folder}/slurm.conf")

    def call(self, *command: str) -> str:
        """What a command prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout.strip()

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


STEPS = 80
SETTINGS = [*short(STEPS), "--metrics.log_interval=100", "--checkpoint.interval=100000"]

lacks = missing_program()
needs_slurm = pytest.mark.skipif(lacks is not None, reason=f"Slurm is not installed: no {lacks}")


class Training:
    """A job of train.sbatch: one process on each of two nodes."""

    def __init__(self, cluster: SlurmCluster, folder: Path, *options: str, settings: list[str]) -> None:
        self.cluster, self.folder = cluster, folder
        folder.mkdir(exist_ok=True)
        python = str(Path(sys.executable).parent)
        words = [
            "--parsable", f"--chdir={REPO}", f"--output={folder}/job.out", "--nodes=2", "--gpus-per-node=0",
            f"--export=ALL,PATH={python}:{os.environ['PATH']},PYTHONPATH={REPO},CUDA_VISIBLE_DEVICES=,MAX_RESTARTS=1",
        ]  # fmt: skip
        run = ["train_configs/debug_gpt.toml", f"--job.dump_folder={folder}", *settings]
        self.number = cluster.call("sbatch", *words, *options, str(REPO / "scripts/slurm/train.sbatch"), *run)

    def output(self) -> str:
        """What the job has printed in all its lives."""
        return (self.folder / "job.out").read_text()

    def wait_for_step(self, step: int) -> int:
        """Wait until the run has come to a step."""
        wait_until(lambda: len(steps(self.folder)) >= step, 180)
        return steps(self.folder)[-1]

    def wait_for_state(self, state: str) -> dict[str, str]:
        """Wait until the job has come to a state, and say what Slurm knows of it."""
        self.cluster.wait_for_state(self.number, state, 180)
        return self.cluster.job(self.number)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
    assert cluster.processes() == []


@needs_slurm
def test_a_warned_and_preempted_run_goes_on_to_its_end(cluster: SlurmCluster, tmp_path: Path) -> None:
    training = Training(cluster, tmp_path, settings=SETTINGS)
    training.wait_for_step(5)
    # What slurmctld does before the time limit because of --signal=B:USR1@300: USR1, to the batch shell alone.
    cluster.call("scancel", "--batch", "--signal=USR1", training.number)
    wait_until(lambda: cluster.job(training.number)["Restarts"] == "1", 120)
    warned = steps(tmp_path)[-1]

    training.wait_for_step(warned + 5)
    other = cluster.call("sbatch", "--parsable", "--partition=high", "--nodes=2", "--output=/dev/null", "--wrap=true")
    cluster.wait_for_state(other, "COMPLETED", 120)
    preempted = steps(tmp_path)[-1]

    job = training.wait_for_state("COMPLETED")
    assert (job["ExitCode"], job["Restarts"]) == ("0:0", "2")
    assert 5 <= warned < preempted < STEPS
    assert steps(tmp_path) == list(range(1, STEPS + 1))
    output = training.output()
    assert re.findall(r"^ stopped by (\w+) after step (\d+)$", output, re.MULTILINE) == [
        ("SIGUSR1", str(warned)),
        ("SIGTERM", str(preempted)),
    ]
    checkpoints = [f"{tmp_path}/checkpoint/step-{step}" for step in (warned, preempted, STEPS)]
    assert re.findall(r"^ saved (.*)$", output, re.MULTILINE) == checkpoints
    assert re.findall(r"^resumed from (.*)$", output, re.MULTILINE) == checkpoints[:2]


@needs_slurm
def test_a_wrong_setting_ends_the_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    training = Training(cluster, tmp_path, settings=["--training.global_batch_size=3"])
    job = training.wait_for_state("FAILED")
    assert (job["ExitCode"], job["Restarts"]) == ("2:0", "0")
    assert training.output().count("error: training.global_batch_size = 3: ") == 1


@needs_slurm
def test_a_failing_run_ends_the_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    diverging = ["--optimizer.name=sgd", "--optimizer.lr=1e6", "--training.max_norm=0"]
    options = ["--health.skip_nonfinite=false", *SETTINGS, *diverging]
    training = Training(cluster, tmp_path, "--nodes=1", settings=options)
    job = training.wait_for_state("FAILED")
    assert (job["ExitCode"], job["Restarts"]) == ("1:0", "0")
    assert training.output().count("error: the loss of step 2 is ") == 2  # torchrun tried again once


# Stand-ins: the run has stopped cleanly and can resume. Job 40 is an array of tasks 1 to 3, or heterogeneous. As in
# Slurm, 40 names all of them, and the last task to start has it as its own id.
STAND_INS = {
    "python": "exit 0",
    "srun": "exit 0",
    "squeue": r"""
[ "$CTLD" = away ] && { echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1; }
case "$*" in *--jobs=40_2\ *|*--jobs=41\ *) echo "$STATE" ;; *--jobs=40\ *) printf "$STATE\n$STATE\n" ;; esac""",
    "scontrol": """
[ "$1" = show ] && { echo node; exit 0; }
[ "$CTLD" = disabled ] && { echo "Requested operation is presently disabled for job $2" >&2; exit 1; }
echo "$*" >> requeued""",
}
ARRAY = {"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "2"}


@pytest.mark.parametrize(
    ("variables", "requeued", "code"),
    [
        ({"SLURM_JOB_ID": "41"}, "41", 0),
        ({"SLURM_JOB_ID": "41", **ARRAY}, "40_2", 0),
        ({"SLURM_JOB_ID": "40", **ARRAY}, "40_2", 0),
        ({"SLURM_JOB_ID": "40", "SLURM_HET_SIZE": "2"}, "40", 0),
        ({"SLURM_JOB_ID": "40", **ARRAY, "STATE": "COMPLETING"}, None, 0),  # scancel
        ({"SLURM_JOB_ID": "40", **ARRAY, "CTLD": "disabled"}, None, 1),  # sbatch --no-requeue, or salloc
        ({"SLURM_JOB_ID": "41", "CTLD": "away"}, None, 1),
    ],
    ids=["job", "task", "last task", "heterogeneous", "cancelled", "disabled", "no controller"],
)
def test_exactly_the_task_that_stopped_is_requeued(
    tmp_path: Path, variables: dict[str, str], requeued: str | None, code: int
) -> None:
    for name, lines in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node", "SLURM_NNODES": "1"}
    environment |= {"STATE": "RUNNING", "CTLD": "there"} | variables
    command = ["bash", str(REPO / "scripts/slurm/train.sbatch"), "debug.toml"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    asked = tmp_path / "requeued"
    assert (asked.read_text().split("\n") if asked.exists() else None) == (requeued and [f"requeue {requeued}", ""])
    job = "40_2" if "SLURM_ARRAY_JOB_ID" in variables else variables["SLURM_JOB_ID"]
    told = [f"error: job {job} stopped before its last step and cannot be requeued; submit it again to continue"]
    assert (done.returncode, [line for line in done.stderr.splitlines() if "error: job" in line]) == (code, told * code)
