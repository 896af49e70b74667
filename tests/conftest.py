"""What every test may rely on."""

import signal
from pathlib import Path

from titan_like.verify import processes

MUTATIONS = Path(__file__).parent / "distributed" / "mutations"

# Started in the background or under nohup, the tests would hand on signals that are ignored to the programs they start,
# which would rightly ignore them too.
for _number, _usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)

# Tests run functions of these modules in processes of their own.
processes.PRELOADED += ["pytest", "tests.distributed.crash_worker"]
processes.PRELOADED += [f"tests.distributed.mutations.{path.stem}" for path in MUTATIONS.glob("[a-z]*.py")]
