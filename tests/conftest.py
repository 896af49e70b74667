"""What every test may rely on."""

import signal

# Started in the background or under nohup, the tests would hand on signals that are ignored to the programs they start,
# which would rightly ignore them too.
for _number, _usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)
