"""A process killed at any instant leaves the last complete checkpoint, which loads and goes on bit for bit."""

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import crash_worker
from tests.distributed.crash_worker import Death
from tests.distributed.launch import base_config, collect, died, launch, start_group
from tests.e2e.jobs import steps, wait_until
from titan_like.checkpoint.step_folders import complete_steps

# Two ranks write their checkpoints in the background.
LAYOUTS: dict[int, dict[str, Any]] = {1: {}, 2: {"parallelism.zero_stage": 1, "checkpoint.async": True}}
BACK = {"checkpoint.load_step": 1, "optimizer.lr": 5e-3}  # another branch of the run, with other weights
LONG = {"training.steps": 24, "checkpoint.keep_latest": 2}
NEVER = 10**9


class Straight:
    """Runs that nothing disturbed: a folder to start from, and the digests of every step."""

    def __init__(self, root: Path, ranks: int) -> None:
        self.root, self.ranks, self.settings = root, ranks, LAYOUTS[ranks]
        base_config(root, {})  # writes the text
        launch(crash_worker.train, ranks, root, root / "start", self.settings | {"training.steps": 2})
        self.digests = self._reference("long", LONG)
        self.copy("back", 1)
        self.digests_back = self._reference("back", BACK)
        assert self.digests_back["2"] != self.digests["2"]

    def _reference(self, name: str, settings: dict[str, Any]) -> dict[str, str]:
        return collect(crash_worker.reference, self.ranks, self.root, self.root / name, self.settings | settings)[0]

    def copy(self, name: str, *steps: int) -> Path:
        """The folder of a run that stopped after two steps, with only the checkpoints named."""
        dump = self.root / name
        shutil.copytree(self.root / "start", dump)
        for step in {1, 2} - set(steps):
            shutil.rmtree(dump / "checkpoint" / f"step-{step}")
        return dump

    def kill(self, dump: Path, settings: dict[str, Any], death: Death) -> list[str]:
        """Train in ``dump`` until death; the operations, if the process outlived them all."""
        job = start_group(crash_worker.train, self.ranks, self.root, dump, self.settings | settings, death)
        outcomes = job.wait(120, seconds_to_follow=0)
        assert died(outcomes), f"{death}: {outcomes}"
        listing = dump / "operations.json"
        return json.loads(listing.read_text()) if listing.exists() else []

    def instants(self, dump: Path, settings: dict[str, Any], step: int) -> tuple[list[str], list[Path]]:
        """Train in ``dump``; the operations of a step's save, and copies of the folder as it was before each of them.

        On one rank such a copy is what a process leaves that is killed at that instant; it takes no process of its own.
        """
        folder = self.root / f"{dump.name}, instants"
        operations = self.kill(dump, settings, Death(step, NEVER, instants=folder if self.ranks == 1 else None))
        return operations, [folder / str(number) for number in range(len(operations))]

    def resume(self, dumps: list[Path], settings: dict[str, Any]) -> list[dict[str, Any]]:
        """What new processes find in the folders and make of them."""
        return collect(crash_worker.resume_each, self.ranks, self.root, dumps, self.settings | settings)[0]


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    return Straight(tmp_path_factory.mktemp("crash"), request.param)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_every_instant_of_a_save_that_removes_the_one_before(straight: Straight) -> None:
    """The run resumes from step 1 and dies while it saves step 2, which replaces step 1 as the one that is kept."""
    settings = {"checkpoint.keep_latest": 1}
    operations, copies = straight.instants(straight.copy("outlived", 1), settings, 2)
    arrival = operations.index("os.rename step-2.unfinished step-2")
    assert operations[:2] == ["os.mkdir checkpoint", "os.mkdir step-2.unfinished"]
    written = [operations.index(f"open {name}") for name in ("__0_0.distcp", ".metadata.tmp", "run.json")]
    assert written == sorted(written) and written[-1] < arrival < operations.index("os.rename step-1 step-1.unfinished")
    removed = [operations.index(f"os.remove {name}") for name in ("__0_0.distcp", ".metadata", "run.json")]
    assert max(removed) < len(operations) - 1 == operations.index("os.rmdir step-1.unfinished")

    chosen = range(len(operations)) if straight.ranks == 1 else (written[1], arrival, arrival + 1)
    deaths = {f"before {i} {operations[i]}": Death(step=2, operation=i) for i in chosen}
    whole = straight.root / "start" / "checkpoint" / "step-1"
    for rank in range(straight.ranks):
        tensors = f"__{rank}_0.distcp"
        for size in (1, (whole / tensors).stat().st_size // 2)[straight.ranks - 1 :]:  # on two ranks, the half only
            deaths[f"{size} bytes into {tensors}"] = Death(step=2, file=tensors, size=size, rank=rank)
    if straight.ranks == 1:  # a single rank writes these in any case
        for file, target in ((".metadata.tmp", ".metadata"), ("run.json", "run.json")):
            deaths[f"inside {target}"] = Death(step=2, file=file, size=(whole / target).stat().st_size // 2)

    dumps = {}
    for name, death in deaths.items():
        if straight.ranks == 1 and death.operation is not None and death.operation != arrival:
            dumps[name] = copies[death.operation]
        else:
            dumps[name] = straight.copy(name, 1)
            straight.kill(dumps[name], settings, death)
        arrived = death.operation is not None and death.operation > arrival
        assert complete_steps(dumps[name] / "checkpoint")[-1] == (2 if arrived else 1), name
        if death.file:
            sizes = [
                path.stat().st_size for path in (dumps[name] / "checkpoint" / "step-2.unfinished").glob(death.file)
            ]
            assert sizes == [death.size], name
    for (name, death), outcome in zip(deaths.items(), straight.resume(list(dumps.values()), settings), strict=True):
        step = 2 if death.operation is not None and death.operation > arrival else 1
        assert (outcome["step"], outcome["digest"]) == (step, straight.digests[str(step)]), name
        assert outcome["final"] == straight.digests["3"], name
        assert steps(dumps[name]) == [1, 2, 3], name
        assert names(dumps[name] / "checkpoint") == ["step-3"], name


def test_every_instant_of_replacing_a_step_after_going_back(straight: Straight) -> None:
    operations, copies = straight.instants(straight.copy("outlived back", 1, 2), BACK, 2)
    gone, arrived = (
        operations.index(f"os.rename {names}") for names in ("step-2 step-2.replaced", "step-2.unfinished step-2")
    )
    assert arrived == gone + 1 and operations[-1] == "os.rmdir step-2.replaced"
    digests = [straight.digests["2"], straight.digests_back["2"]]
    instants = range(gone - 1, len(operations)) if straight.ranks == 1 else (arrived, arrived + 1)
    dumps = {i: copies[i] for i in instants}
    if straight.ranks > 1:
        dumps = {i: straight.copy(f"went back {i}", 1, 2) for i in instants}
        for i, dump in dumps.items():
            straight.kill(dump, BACK, Death(step=2, operation=i))
    assert "step-2" not in names(dumps[arrived] / "checkpoint")
    for i, outcome in zip(instants, straight.resume(list(dumps.values()), {}), strict=True):
        assert (outcome["step"], outcome["digest"]) == (2, digests[i > arrived]), operations[i]
        assert steps(dumps[i]) == [1, 2, 3], operations[i]
        assert names(dumps[i] / "checkpoint") == ["step-1", "step-2", "step-3"], operations[i]


def test_every_instant_of_sweeping_up_after_a_crash(straight: Straight) -> None:
    def crashed(name: str) -> Path:
        dump = straight.copy(name, 1, 2)
        folder = dump / "checkpoint"
        shutil.copytree(folder / "step-2", folder / "step-3.unfinished")
        shutil.copytree(folder / "step-1", folder / "step-1.replaced")  # its removal was not reached
        (folder / "step-2").rename(folder / "step-2.replaced")  # its replacement did not arrive
        return dump

    operations, copies = straight.instants(crashed("swept"), {}, 0)
    assert "os.rename step-2.replaced step-2" in operations
    removals = [i for i, operation in enumerate(operations) if not operation.startswith("open")]
    instants = removals if straight.ranks == 1 else removals[:1]
    dumps = {i: copies[i] for i in instants}
    if straight.ranks > 1:
        dumps = {i: crashed(f"swept {i}") for i in instants}
        for i, dump in dumps.items():
            straight.kill(dump, {}, Death(step=0, operation=i))
    for i, outcome in zip(instants, straight.resume(list(dumps.values()), {}), strict=True):
        assert (outcome["step"], outcome["final"]) == (2, straight.digests["3"]), operations[i]
        assert names(dumps[i] / "checkpoint") == ["step-1", "step-2", "step-3"], operations[i]


@pytest.mark.parametrize("straight", [1], indirect=True, ids=["1 rank"])
def test_every_instant_of_writing_a_folder_for_transformers(straight: Straight) -> None:
    """The run dies while it writes the folder of step 3, first its weights and no checkpoint besides."""
    settings = {"training.steps": 4, "checkpoint.interval": 100, "checkpoint.hugging_face_interval": 1}
    dump = straight.copy("outlived folders", 1)
    operations, copies = straight.instants(dump, settings, 3)
    arrival = operations.index("os.rename step-3.unfinished step-3", operations.index("os.rmdir weights"))
    whole = {name: contents(dump / "hugging_face" / name) for name in ("step-2", "step-3")}
    assert "model.safetensors" in whole["step-2"] and whole["step-2"] != whole["step-3"]
    for i, copy in enumerate(copies):
        complete = {name for name in names(copy / "hugging_face") if not name.endswith(".unfinished")}
        assert complete == ({"step-2", "step-3"} if i > arrival else {"step-2"}), operations[i]
        assert all(contents(copy / "hugging_face" / name) == whole[name] for name in complete), operations[i]
    launch(crash_worker.train, 1, straight.root, copies[arrival], straight.settings | settings)
    assert names(copies[arrival] / "hugging_face") == ["step-2", "step-3", "step-4"]
    assert {name: contents(copies[arrival] / "hugging_face" / name) for name in whole} == whole


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("straight", [2], indirect=True, ids=["2 ranks"])
def test_kills_at_random_times_while_saving_after_every_step(straight: Straight) -> None:
    """A single rank's instants are all in the tests above."""
    dump, moments = straight.root / "random", random.Random(straight.ranks)
    settings = straight.settings | LONG
    for step in (2, 6, 10, 14):
        job = start_group(crash_worker.train, straight.ranks, straight.root, dump, settings)
        wait_until(lambda step=step: len(steps(dump)) >= step)
        time.sleep(moments.uniform(0, 0.06))  # a step and its save take about that long
        job.kill()
        assert died(job.wait(120))
    launch(crash_worker.train, straight.ranks, straight.root, dump, settings)
    starts = [json.loads(line) for line in (dump / "resumed.jsonl").read_text().splitlines()]
    # A job that was killed before it had resumed says nothing.
    assert len(starts) >= 3 and [start["step"] for start in starts] == sorted(start["step"] for start in starts)
    for start in starts:
        assert start["digest"] == straight.digests[str(start["step"])], start["step"]
    assert steps(dump) == list(range(1, 25))
    assert names(dump / "checkpoint") == ["step-23", "step-24"]
    (outcome,) = straight.resume([dump], LONG)
    assert outcome["digest"] == straight.digests["24"]
