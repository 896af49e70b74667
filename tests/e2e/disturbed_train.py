"""train.py on whose rank 1 something goes wrong after step 3: --disturb=sleep or fail; or that does not wait long for
another run to end: --disturb=impatient; or that leaves the processor to others: --disturb=slow."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from titan_like.checkpoint import loader
from titan_like.commands import train
from titan_like.config.load import run_command
from titan_like.parallel.model import WholeModel

forward_backward = WholeModel.forward_backward
calls = 0


def disturbed_step(self: WholeModel, *args: object) -> None:
    """The third step's passes go well, the fourth's do not."""
    global calls
    calls += 1
    if calls == 4 and os.environ.get("RANK") == "1":
        if "--disturb=sleep" in ARGUMENTS:
            time.sleep(1000)
        if "--disturb=fail" in ARGUMENTS:
            raise ZeroDivisionError("the test divides by zero")
    if "--disturb=slow" in ARGUMENTS:
        time.sleep(0.1)
    forward_backward(self, *args)  # type: ignore[arg-type]


ARGUMENTS = list(sys.argv)
sys.argv = [argument for argument in sys.argv if not argument.startswith("--disturb")]
if "--disturb=impatient" in ARGUMENTS:
    loader._TIME_TO_END = 1.0
WholeModel.forward_backward = disturbed_step  # type: ignore[method-assign,assignment]
run_command(train.main)
