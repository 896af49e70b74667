"""Runs one process of a training job, from rendezvous to exit."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from titan_like.checkpoint.loader import hold_folder
from titan_like.checkpoint.step_folders import release
from titan_like.config.errors import ConfigError, first_line
from titan_like.train.environment import is_one_of_several
from titan_like.train.log import StepCallback
from titan_like.train.memory import MemoryWatch
from titan_like.train.setup import Run, out_of_memory_names
from titan_like.train.signals import StopSignals
from titan_like.train.trainer import Trainer
from titan_like.train.watchdog import Watchdog

_NEW_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def run_job(run: Run, signals: StopSignals | None = None, callback: StepCallback | None = None) -> None:
    """Join the process group and train to the end of the run, or raise a `ConfigError` or `RunError` with the reason.

    ``signals`` are handlers that are installed already, and ignore signals once the run is over; None installs new
    ones. ``callback`` is called with the record of every step, and the text that it returns is printed.
    """
    patience, dump = run.config.health.hang_timeout_seconds, Path(run.config.job.dump_folder)
    handled = StopSignals() if signals is None else nullcontext(signals)
    with process_group(run.device, patience), handled as stop, Watchdog(patience) as watchdog:
        hold_folder("job.dump_folder", dump, dump / "run")  # `Trainer` locks the folder of checkpoints
        memory, hint = MemoryWatch(run), "choose a smaller model or more processes"
        with out_of_memory_names("model.flavor", run.config.model.flavor, lambda _: hint):
            trainer = Trainer(run, callback, memory, stop)
        # Passes, sends and receives grow as long as training and evaluation make progress.
        scorer = trainer.validator.scorer
        watchdog.progress = lambda: (trainer.state.step, trainer.pipeline.num_actions + scorer.num_actions)
        watchdog.is_starting = lambda: trainer.state.step == trainer.state.start_step
        size = run.config.training.micro_batch_size
        with out_of_memory_names("training.micro_batch_size", size, memory.account):
            trainer.train()
        if signals is not None:
            signals.ignore()
    release()


@contextmanager
def process_group(device: torch.device, patience: float = 0.0) -> Iterator[None]:
    """Set up the default process group, of torchrun's processes or of this one alone, for the time of this context.

    Collectives time out after ``patience`` seconds plus a minute, so that a `Watchdog` acts first. With 0 they have
    torch's default timeout.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=patience + 60) if patience else dist.constants.default_pg_timeout
    store, rank, world_size = meeting_place(timeout)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store, rank=rank, world_size=world_size,
        timeout=timeout if patience else None,
        device_id=device if on_gpu else None,
    )  # fmt: skip
    yield
    dist.destroy_process_group()  # not after an error, when other ranks may wait in a collective that never completes


def meeting_place(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Rendezvous with the job's other processes. Returns the store, this process's rank and their number.

    torchrun may reuse one store when it restarts the processes, and the store then holds the addresses of processes
    that are gone. On a single machine each restart therefore gets a prefix of its own, by the number of restarts.
    torchruns on several machines count restarts differently, so there they must be told to make a new store.
    """
    if not is_one_of_several():
        return dist.HashStore(), 0, 1
    try:
        store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    except dist.DistNetworkError as error:
        cause = "the port is in use" if "EADDRINUSE" in str(error) else f"no meeting there ({first_line(error)})"
        reason = f"{cause}; choose another port, and rank 0's machine as MASTER_ADDR, the same for all processes"
        raise ConfigError("environment variable MASTER_PORT", os.environ["MASTER_PORT"], reason) from None
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"start-{start}-of-{world_size}", store)
    elif rank == 0 and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and not os.environ.get(_NEW_STORES):
        print(f"set {_NEW_STORES}=1 for torchrun on every machine, or its restarts may fail", flush=True)
    return store, rank, world_size
