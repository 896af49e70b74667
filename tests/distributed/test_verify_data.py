"""`verify` reads a user's dataset as the ranks of a layout do, and names the rank, worker and step of a fault."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.distributed.bugs import DATA, GPT
from tests.distributed.mutations import data
from tests.e2e.scripts import REPO, install
from titan_like.commands.verify import format_verdict
from titan_like.config import load_config
from titan_like.parallel.layout import Layout
from titan_like.verify import compare
from titan_like.verify.compare import Reference, Row
from titan_like.verify.data import read_alone
from titan_like.verify.processes import Group, Prepare
from titan_like.verify.shrink import Options, Small, resolve, shrink
from titan_like.verify.verify import DIFFERENT, SAME, Blame, Check, Verdict, Verifier

PAGE = (REPO / "docs" / "data.md").read_text(encoding="utf-8")
SHOWN_CLASS, SHOWN_PROJECT, _ = re.findall(
    r"^```\w+\n(.*?)^```", PAGE.split("## Adding a dataset")[1], re.DOTALL | re.MULTILINE
)
# Datasets that read on, whatever sample they are asked for, the second one in validation alone.
READS_ON = """
    read = 0

    def __getitem__(self, index: int) -> Batch:
        self.read += 1
        return super().__getitem__(self.read - 1)
"""
VALIDATION_READS_ON = READS_ON.replace("(self.read - 1)", '(self.read - 1 if self.request.split != "train" else index)')
# One that is shorter on several processes.
ENDS_EARLY = """
    def __len__(self) -> int:
        is_whole = self.request.split == "train" or os.environ["WORLD_SIZE"] == "1"
        return len(self.numbers) if is_whole else 8
"""
# A dataset that waits before the first sample that a process reads.
SLOW = """
    seconds = [1.2]

    def __getitem__(self, index: int) -> Batch:
        time.sleep(self.seconds.pop() if self.seconds else 0)
        return super().__getitem__(index)
"""
FAILS = """
    def __getitem__(self, index: int) -> Batch:
        raise KeyError(index)
"""
SETTINGS = ["--training.micro_batch_size", "2", "--training.global_batch_size", "8", "--data.num_workers", "2"]
SETTINGS += ["--data.reset_attention_mask", "true", "--data.reset_position_ids", "true", "--training.seq_len", "16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with the page's dataset, and with others that differ from it."""
    folder, entries = tmp_path_factory.mktemp("sums"), SHOWN_PROJECT.split('"titan_like.datasets"]\n')[1]
    others = {"reads_on": READS_ON, "validation_reads_on": VALIDATION_READS_ON, "ends_early": ENDS_EARLY, "slow": SLOW}
    others["fails"] = FAILS
    for name, methods in {"sums": "", **others}.items():
        (folder / f"{name}.py").write_text(f"import os\nimport time\n{SHOWN_CLASS}{methods}")
    entries += "".join(f'{name} = "{name}:Sums"\n' for name in others)
    install(folder, "sums", "titan_like.datasets", entries)
    return folder


def small_of(dataset: str, *settings: str) -> Small:
    config = load_config(["--job.config_file", GPT, *DATA, *SETTINGS, "--data.dataset", dataset, *settings])
    return shrink(config, resolve(config, None), Options(2))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    """What one process reads of any of these datasets, as it asks for the samples in order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        (alone,) = Group(read_alone, 1, small_of("sums")).wait(240)
    assert isinstance(alone.result, Reference), alone
    assert {split: len(set(all_)) for split, all_ in alone.result.own_data.items()} == {"train": 64, "validation": 32}
    return alone.result


def first_fault(
    dataset: str, reference: Reference, folder: Path, bug: Prepare | None = None
) -> tuple[Check | None, Blame | None]:
    """The first difference of the layout's samples, and what is at fault."""
    small, checks = small_of(dataset), list[Check]()
    verifier = Verifier(small, 240, 60, start=partial(Group, prepare=bug), kinds=[compare.DATA])
    verifier.folder, verifier.reference = folder, replace(reference, small=small)
    verifier.check(small.config, verifier.kinds, checks)
    first = Verdict(SAME, Layout(), checks).first_difference
    return first, first and verifier.blame(small.config, first, DIFFERENT)


def test_every_rank_reads_its_samples(
    folder: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder)
    assert Verifier(small_of("sums")).kinds[0] == compare.DATA
    assert first_fault("sums", reference, tmp_path) == (None, None)


def test_waiting_for_a_slow_dataset_is_no_deadlock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    verdict = Verifier(small_of("slow", "--data.num_workers=0"), 240, 0.5, kinds=[compare.DATA]).verify()
    left_out = "samples of data.dataset after the first 32 of train and 16 of validation"
    assert (verdict.outcome, verdict.left_out) == (SAME, [left_out])


def test_a_dataset_that_fails_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    verdict = Verifier(small_of("fails"), 240).verify()
    words = f"different: {Row.DATA} (data): one process alone fails: "
    assert words in format_verdict(verdict, [], 1.0) and verdict.blame and verdict.blame.axis == "one_process"


@pytest.mark.parametrize(
    ("dataset", "bug", "axis", "words"),
    [
        ("sums", data.every_rank_reads_the_first_one_s_samples, "data_parallel",
         "data rank 1 of 2, step 1, microbatch 0: reads samples [0, 1], not [2, 3]"),
        ("sums", data.workers_change_the_order, "data.num_workers",
         "data rank 0 of 2, data worker 0 of 2, step 1, microbatch 0: reads samples [4, 5], not [0, 1]"),
        ("sums", data.a_resumed_run_repeats_a_batch, "resume",
         "data rank 0 of 2, data worker 0 of 2, step 5 of a run that resumed after step 4, microbatch 0: "
         "reads samples [28, 29], not [32, 33]"),
        ("reads_on", None, "one_process",
         "data rank 0 of 2, step 1, microbatch 1: reads samples [2, 3], not [4, 5]"),
        ("validation_reads_on", None, "one_process",
         "data rank 0 of 2, step 1 of validation, microbatch 1: reads samples [2, 3], not [4, 5]"),
        ("ends_early", None, "data_parallel",
         "data rank 0 of 2: reads 2 microbatches of validation, not 8"),
    ],
    ids=["ranks", "workers", "resume", "index ignored", "validation", "shorter"],
)  # fmt: skip
def test_a_fault_is_named_by_rank_worker_and_step(
    folder: Path,
    reference: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dataset: str,
    bug: Prepare | None,
    axis: str,
    words: str,
) -> None:
    monkeypatch.syspath_prepend(folder)
    first, blame = first_fault(dataset, reference, tmp_path, bug)
    assert first is not None and blame is not None
    assert (first.row, first.kind) == (Row.DATA, compare.DATA) and first.detail.startswith(words), first
    assert blame.axis == axis, blame
    assert blame.axis != "one_process" or f'data.dataset = "{dataset}" itself' in blame.sentence
