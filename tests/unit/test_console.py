import io
import math
import sys
from dataclasses import replace

import pytest

from titan_like.metrics.console import Console, LineContext, format_log_line, format_sources
from titan_like.metrics.flops import Throughput
from titan_like.metrics.record import StepRecord

CONTRACT = (
    " iteration        2/  250000 | consumed samples:          384 | consumed tokens:       786432 | "
    "elapsed time per iteration (ms): 5350.0 | learning rate: 3.000E-07 | global batch size:   192 | "
    "lm loss: 1.119602E+01 | grad norm: 18.118 | num zeros: 0.0 | actual seq length:  2048 | "
    "number of skipped iterations:   0 | number of nan iterations:   0 | samples per second: 35.888 | TFLOPs: 48.77 |"
)
RATES = Throughput(tokens_per_second=73_498.7, tflops_per_device=48.77, mfu_model=0.156, mfu_causal=0.15, hfu=0.2)
UNKNOWN_PEAK = replace(RATES, mfu_model=None, mfu_causal=None, hfu=None)


def record(**changes):
    fields = {
        "step": 2, "loss": 11.19602, "grad_norm": 18.118, "lr": 3e-7, "consumed_samples": 384, "skipped": 0, "nan": 0,
        "consumed_tokens": 786_432, "global_batch_size": 192, "step_time_s": 5.35, "data_time_s": 0.01,
        "throughput": RATES, "peak_memory_bytes": round(21.3 * 2**30), "num_zeros": 0.0,
    }  # fmt: skip
    return StepRecord(**fields | changes)


CONTEXT = LineContext(seq_len=2048, devices=16, device_type="cuda", device_memory=80 * 2**30, total_steps=250_000)


def line(*records, style="megatron", context=CONTEXT):
    return format_log_line(records, style, context)


def field(text, name):
    values = [part.partition(": ")[2] for part in text.split(" | ") if part.removesuffix(" |").startswith(name)]
    assert len(values) == 1, text
    return values[0].removesuffix(" |").strip()


def test_short_line():
    whole = (
        " step      2/250000 | loss 11.1960 | grad norm 18.118 | lr 3.00e-07 | 4,594 tokens/s per GPU | MFU 15.6% | "
        "memory 21.3 GiB (27%) | 3 h 23 min left"
    )
    assert line(record(), style="short", context=CONTEXT._replace(seconds_left=12_200.0)) == whole
    bad = [
        record(loss=3.0, loss_scale=2.0**16, throughput=UNKNOWN_PEAK),
        record(loss=math.inf, skipped=1, loss_scale=2.0**15, throughput=UNKNOWN_PEAK),
        record(losses={"lm_loss": 2.5, "sentence_loss": 0.5}, spike=1, loss_scale=2.0**15, throughput=UNKNOWN_PEAK),
    ]
    alone = CONTEXT._replace(devices=1, device_type="cpu", device_memory=None, seconds_left=0.0)
    assert line(*bad[:2], style="short", context=alone).endswith(
        " | 73,499 tokens/s | memory 21.3 GiB | 1 skipped | loss scale 32768"
    )
    terms = line(bad[2], style="short", context=alone)
    assert "/250000 | lm loss 2.5000 | sentence loss 0.5000 | grad" in terms and "loss scale" not in terms


def test_line_is_the_contract_s():
    # 192 samples in 5.35 s are 35.888 a second.
    assert line(record()) == f"{CONTRACT} MFU: 15.6% | memory: 21.3 GiB |"


def test_mfu_is_left_out_where_the_peak_is_unknown():
    assert line(record(throughput=UNKNOWN_PEAK)) == f"{CONTRACT} memory: 21.3 GiB |"


def rated(seconds, tflops, mfu, **changes):
    return record(step_time_s=seconds, throughput=replace(RATES, tflops_per_device=tflops, mfu_model=mfu), **changes)


FIELDS = {
    "a slow and a quick step are averaged by their time": (
        [rated(3.0, 10.0, 0.1, loss=3.0), rated(1.0, 30.0, 0.3, loss=2.0)],
        {"lm loss": "2.500000E+00", "elapsed time per iteration (ms)": "2000.0", "samples per second": "96.000"}
        | {"TFLOPs": "15.00", "MFU": "15.0%"},  # 384 samples in 4 s: 3 s at 10 and 1 s at 30
    ),
    "rates count the samples of a growing batch": (
        [record(global_batch_size=size, step_time_s=1.0) for size in (64, 128)],
        {"samples per second": "96.000", "global batch size": "128"},
    ),
    "other values are the last step's": (
        [record(grad_norm=5.0, lr=1e-3, num_zeros=None), record(grad_norm=0.25, lr=2e-3, num_zeros=7.0)],
        {"grad norm": "0.250", "learning rate": "2.000E-03", "num zeros": "7.0"},
    ),
    "loss is nan where every step's was": (
        [record(loss=math.nan, grad_norm=math.nan, nan=1)],
        {"lm loss": "NAN", "grad norm": "nan"},
    ),
    "wide numbers keep their digits": (
        [record(step=123_456_789, consumed_tokens=15_000_000_000_000, peak_memory_bytes=3 * 2**29)],
        {" iteration 123456789/": "", "consumed tokens": "15000000000000", "memory": "1.5 GiB"},
    ),
}


@pytest.mark.parametrize("case", FIELDS)
def test_fields_of_a_line(case):
    records, fields = FIELDS[case]
    assert {name: field(line(*records), name) for name in fields} == fields


def test_bad_steps_are_counted_over_the_interval_and_left_out_of_the_loss():
    records = [
        record(loss=4.0),
        record(loss=4.0, skipped=1, grad_norm=math.inf),
        record(loss=math.nan, nan=1, grad_norm=math.nan),
        record(loss=2.5, skipped=1, grad_norm=math.inf),
        record(loss=math.inf, nan=1),
        record(loss=3.5),
        record(loss=math.nan, nan=1),
    ]
    text = line(*records)
    assert "| number of skipped iterations:   2 | number of nan iterations:   3 |" in text
    assert field(text, "lm loss") == "3.500000E+00"


def test_line_ends_with_the_time_that_is_left():
    console = Console(False)
    console.start(total_steps=1000, total_samples=2000)
    assert console.seconds_left() is None
    seconds = {1: 90.0, 2: 5.0, 3: 4.0, 4: 600.0, 5: 4.5}  # the first step compiles, the fourth meets a stall
    found = {}
    for step, time in seconds.items():
        console.add(record(step=step, step_time_s=time, global_batch_size=2, consumed_samples=2 * step))
        found[step] = console.seconds_left()
    assert found == {1: 999 * 90.0, 2: 998 * 5.0, 3: 997 * 5.0, 4: 996 * 5.0, 5: 995 * 5.0}
    last = record(step=5, loss_scale=1.0)
    assert line(last, context=CONTEXT._replace(seconds_left=found[5])).endswith(
        " | memory: 21.3 GiB | loss scale: 1.0 | time left: 1 h 22 min |"
    )
    for step in range(6, 106):  # only the most recent count
        console.add(record(step=step, step_time_s=1.0, global_batch_size=2, consumed_samples=2 * step))
    assert console.seconds_left() == 895


def test_sources_of_a_blend_have_a_line():
    drawn = {"samples/code": 45.0, "epochs/code": 0.9, "samples/web": 15.0}  # the second is a stream
    assert format_sources(drawn) == " sources | code: 45 samples (75.00%), 0.900 epochs | web: 15 samples (25.00%) |"


def test_line_stays_whole_above_the_progress_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    console = Console(True)
    console.start(total_steps=10, total_samples=768)
    console.print(CONTRACT)
    console.add(record(step=5))
    assert console.seconds_left() is None  # the bar has it
    console.close()
    assert CONTRACT + "\n" in terminal.getvalue()
    assert "5/10" in terminal.getvalue()
    silent = Console(False)
    silent.start(total_steps=10, total_samples=768)
    before = terminal.getvalue()
    silent.add(record(step=5))
    silent.close()
    assert terminal.getvalue() == before
