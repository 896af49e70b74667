"""From text to a blend, by the commands of docs/data.md in their order, on one process and on two."""

import re
import shlex
from pathlib import Path

import pytest

from tests.e2e.jobs import records, train_on
from tests.e2e.scripts import REPO, Script
from tests.float64 import bound

PAGE = (REPO / "docs" / "data.md").read_text(encoding="utf-8").split("## From text to a blend")[1]
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
TOKENIZE, TRAIN = BLOCKS[0].strip().split("\n"), BLOCKS[1]
SMALL = "--training.steps 4 --training.seq_len 32 --metrics.log_interval 2 --checkpoint.enable false"
SMALL += " --training.dtype float64"


def run(command: str, folder: Path) -> str:
    """What a Python command prints."""
    _, script, *arguments = shlex.split(command)
    done = Script(script, arguments, cwd=folder).wait()
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, as links, in which the page's first commands have been run."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("docs", "README.md", "titan_like", "train_configs"):
        (folder / name).symlink_to(REPO / name)
    for command in TOKENIZE:
        assert re.fullmatch(
            r"\d+ documents, [\d,]+ tokens in data/\w+\.bin and \.idx \([\d.]+ s\)\n", run(command, folder)
        )
    return folder


def test_both_sources_are_drawn_and_told(folder: Path) -> None:
    """The numbers in the log, in metrics.jsonl, and those of the weights agree; on two processes they are the same."""
    told = {}
    for processes in (1, 2):
        command = TRAIN.replace("\\\n", " ") + f" {SMALL} --job.dump_folder out{processes}"
        if processes == 1:
            printed = run(command, folder)
        else:
            arguments = shlex.split(command)[2:]
            printed = train_on(processes, folder / "log.txt", arguments, cwd=folder)
        lines = re.findall(
            r"^ sources \| code: (\d+) samples \(([\d.]+)%\), ([\d.]+) epochs \| prose: (\d+) samples", printed, re.M
        )
        written = [record for record in records(folder / f"out{processes}") if "samples/code" in record]
        assert [record["step"] for record in written] == [2, 4]
        assert [(record["samples/code"], record["samples/prose"]) for record in written] == [
            (int(code), int(prose)) for code, _, _, prose in lines
        ]
        told[processes] = [(record["samples/code"], record["epochs/code"], record["loss"]) for record in written]
        samples = [record["samples/code"] + record["samples/prose"] for record in written]
        assert samples == [32, 64]
        assert 30 < written[-1]["samples/code"] < 58  # of 64, at seven in ten: 45 ± 3.5 σ
    assert [line[:2] for line in told[1]] == [line[:2] for line in told[2]]
    assert [line[2] for line in told[2]] == pytest.approx([line[2] for line in told[1]], rel=bound(4096 * 4))
