"""A job that loses a rank or a node goes on by itself, with the same samples and the same losses."""

from pathlib import Path

import pytest

from tests.e2e.jobs import REPO, TorchrunJob, free_port, records, short, steps, train_on
from tests.float64 import bound

LAST = 24
SETTINGS = [
    f"--job.config_file={REPO / 'train_configs/debug_gpt.toml'}", *short(LAST, batch=4, micro_batch=1),
    "--optimizer.lr=0.0005", "--lr_scheduler.decay=constant", "--checkpoint.enable=true", "--checkpoint.interval=5",
    "--parallelism.zero_stage=3", "--training.dtype=float64",
]  # fmt: skip


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """A run that nothing disturbs, on two ranks."""
    folder = tmp_path_factory.mktemp("straight")
    arguments = [*SETTINGS, f"--job.dump_folder={folder / 'out'}"]
    train_on(2, folder / "log.txt", arguments)
    return records(folder / "out")


def meeting(port: int, is_host: int) -> tuple[str, ...]:
    """Options of one of two torchruns."""
    return (
        "--nnodes=1:2", "--max-restarts=3", "--rdzv_backend=c10d", "--rdzv_id=7", "--local_addr=127.0.0.1",
        f"--rdzv_endpoint=127.0.0.1:{port}",
        f"--rdzv_conf=is_host={is_host},last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=5",
    )  # fmt: skip


@pytest.mark.exhaustive
def test_a_lost_node_leaves_a_smaller_job_with_the_same_curve(tmp_path: Path, straight: list[dict[str, float]]) -> None:
    dump, port = tmp_path / "out", free_port()
    arguments = [*SETTINGS, f"--job.dump_folder={dump}", "--training.steps=36"]

    with (
        TorchrunJob(tmp_path / "log_0.txt", REPO / "train.py", arguments, 1, meeting(port, 1)) as first,
        TorchrunJob(tmp_path / "log_1.txt", REPO / "train.py", arguments, 1, meeting(port, 0)) as second,
    ):
        first.until(lambda: len(steps(dump)) >= 12, "step 12")
        assert len(first.workers()) == len(second.workers()) == 1
        second.kill()
        assert first.wait() == 0, first.output
    assert "2 processes on cpu (data 2)" in first.output + second.output
    assert "1 process on cpu (no parallelism)" in first.output
    assert steps(dump) == list(range(1, 37))
    found = records(dump)[:LAST]
    assert [record["consumed_samples"] for record in found] == [4.0 * step for step in range(1, LAST + 1)]
    for record, wanted in zip(found, straight, strict=True):
        assert record["loss"] == pytest.approx(wanted["loss"], rel=bound(4096 * LAST))
