"""An optimizer of another package, exactly as docs/optimizers.md has it, is chosen by its name in the TOML."""

import json
import re
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.jobs import records, short, train_on
from tests.e2e.scripts import REPO, Script, install
from tests.float64 import bound
from titan_like.commands import verify
from titan_like.verify import verify as verify_module
from titan_like.verify.compare import EXACT
from titan_like.verify.verify import Verifier

SETTINGS = [
    f"--job.config_file={REPO}/train_configs/debug_gpt.toml", *short(4, warmup=0), "--optimizer.name=lion",
    "--optimizer.lr=1e-3", "--training.dtype=float64", "--metrics.log_interval=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like site-packages, with the document's module and its entry point."""
    folder = tmp_path_factory.mktemp("site")
    text = (REPO / "docs" / "optimizers.md").read_text()
    (module,) = re.findall(r"```python\n# my_optimizers.py\n(.*?)```", text, re.DOTALL)
    (lars,) = re.findall(r"```python\n# my_lars.py\n(.*?)```", text, re.DOTALL)
    (folder / "my_lars.py").write_text(lars)
    (entry,) = re.findall(r'\[project.entry-points."titan_like.optimizers"\]\n(.*?)```', text, re.DOTALL)
    (folder / "my_optimizers.py").write_text(module)
    install(folder, "my_optimizers", "titan_like.optimizers", f"{entry}\nlars = my_lars:lars\n")
    return folder


def train(package: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    return Script("train.py", [*SETTINGS, *settings], path=[package]).wait()


def losses(dump: Path) -> list[float]:
    return [record["loss"] for record in records(dump)]


def test_trains_alike_on_one_process_and_on_two_and_resumes(package: Path, tmp_path: Path) -> None:
    alone, shards = tmp_path / "alone", tmp_path / "shards"
    saves = "--checkpoint.enable=true"
    done = train(package, f"--job.dump_folder={alone}", saves, "--checkpoint.interval=2")
    assert done.returncode == 0, done.stderr
    layout = ["--parallelism.zero_stage=3", "--checkpoint.load_step=2", f"--checkpoint.folder={alone}/checkpoint"]
    train_on(2, tmp_path / "log.txt", [*SETTINGS, *layout, f"--job.dump_folder={shards}", saves], path=[package])
    assert losses(alone)[0] > losses(alone)[-1] + 0.1
    assert losses(shards) == pytest.approx(losses(alone)[2:], rel=bound())  # momentum and weights of step 2, in shards


def test_is_planned_with_the_state_that_it_keeps(package: Path, tmp_path: Path) -> None:
    done = train(package, "--job.dry_run=true", f"--job.dump_folder={tmp_path}", f"--json={tmp_path / 'plan.json'}")
    assert done.returncode == 0, done.stderr
    plan = json.dumps(json.loads((tmp_path / "plan.json").read_text()))
    parameters = int(re.search(r'"num_parameters": (\d+)', plan)[1])  # type: ignore[index]
    assert f'"optimizer": {8 * parameters}' in plan  # one moment in float64


def test_a_rule_of_whole_parameters_is_verified(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 alone: it goes on from checkpoints in the test above."""
    monkeypatch.syspath_prepend(package)
    monkeypatch.setattr(verify_module, "Verifier", partial(Verifier, kinds=[EXACT]))
    options = [SETTINGS[0], "--steps=2", "--processes=2", "--training.seq_len=32", "--optimizer.name=lars"]
    layout = ["--parallelism.tensor_parallel_degree=2", "--parallelism.data_parallel_shard_degree=1"]
    assert verify.main([*options, *layout]) == 0


def test_wrong_names_and_options_are_told_in_a_sentence(package: Path) -> None:
    done = train(package, "--optimizer.name=lyon")
    assert done.returncode == 2 and "did you mean lion?" in done.stderr
    done = train(package, "--optimizer.name=sgd", "--optimizer.options.momentum=0.9")
    assert done.returncode == 2 and "sgd has no options" in done.stderr and "Traceback" not in done.stderr
