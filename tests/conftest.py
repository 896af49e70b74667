"""What every test may rely on."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_like.planner import trace as traces
from titan_like.verify import processes

gc.disable()  # the modules of the tests make a million objects, hardly any of them garbage

LONGEST = ("test_verify.py", "test_stopping.py", "test_samples.py", "test_dry_run.py", "test_planner_search.py")
MUTATIONS = Path(__file__).parent / "distributed" / "mutations"

# Started in the background or under nohup, the tests would hand on signals that are ignored to the programs they start,
# which would rightly ignore them too.
for _number, _usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)

# Tests run functions of these modules in processes of their own.
processes.PRELOADED += ["pytest", "tests.distributed.crash_worker"]
processes.PRELOADED += [f"tests.distributed.mutations.{path.stem}" for path in MUTATIONS.glob("[a-z]*.py")]


@pytest.fixture(autouse=True, scope="session")
def shared_traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for traces, which all tests of a session share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "traces"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traces, "default_folder", lambda: folder)
        yield folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files that start whole jobs, and wait for them, between files that compute on several processes.

    Two of them side by side then share the processors well. The longest come first and the unit tests last, so that
    nothing long is left to run alone at the end.
    """
    files, places = dict.fromkeys(item.path for item in items), dict[Path, float]()
    for folder in {file.parent for file in files}:
        inside = sorted((file for file in files if file.parent == folder), key=lambda file: file.name not in LONGEST)
        places |= {file: number / len(inside) for number, file in enumerate(inside)}
    items.sort(key=lambda item: (item.path.parent.name == "unit", places[item.path]))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(10_000)  # collections every 700 new objects, Python's default, take a thirtieth of the time
    gc.enable()
