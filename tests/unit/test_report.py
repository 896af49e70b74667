"""The page of a run holds what it shows, whatever the run lacks; html.parser and xml read it."""

import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_timeline import unit_step
from titan_like.commands.report import main
from titan_like.config import load_config
from titan_like.config.errors import ConfigError
from titan_like.metrics.run_files import write_forecast, write_settings
from titan_like.metrics.step_timeline import chrome_trace
from titan_like.metrics.svg_chart import chart, number, timeline

VOID = {"meta"}
FACTS = {"device": "NVIDIA H100", "device_memory_bytes": 80 * 2**30, "processes": 8, "vocab_size": 50304}


class Page(HTMLParser):
    """Checks that tags close in order; collects texts and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value or "") for key, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def write_run(folder: Path, records: list[dict[str, Any]], *settings: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if settings:
        write_settings(folder, load_config([*settings, f"--job.dump_folder={folder}"]), FACTS)
    return folder


def page_of(folder: Path) -> tuple[str, Page]:
    assert main([str(folder)]) == 0
    text = (folder / "report.html").read_text(encoding="utf-8")
    return text, Page(text)


def test_a_page_has_everything_and_nothing_from_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = []
    for step in range(1, 401):
        records.append(
            {"step": step, "loss": 3 + 7 / step, "lr": 1e-3, "grad_norm": 1.0, "step_time_s": 0.5, "data_time_s": 0.2}
            | {"tokens_per_second": 12_345.0, "mfu_model": 0.41, "peak_memory_bytes": 60 * 2**30, "skipped": 0}
            | {"consumed_tokens": 1000 * step, "run_id": "x"}
        )
        if step % 100 == 0:
            records[-1] |= {"validation_loss": 3.5 - step / 1000, "lambada/accuracy": step / 1000}
    folder = write_run(tmp_path / "run", records, "--job.description=<b>a & b</b>", "--optimizer.lr=0.5")
    write_forecast(folder, {
        "steps": "steps 4 to 8", "profile": "titan_h100", "predicted_seconds": 0.55, "measured_seconds": 0.5,
        "seconds_low": 0.4, "seconds_high": 0.6, "predicted_memory_bytes": 55 * 2**30,
        "measured_memory_bytes": 50 * 2**30,
    })  # fmt: skip
    (folder / "timeline").mkdir()
    for step in (9, 20):
        (folder / "timeline" / f"step-{step}.json").write_text(json.dumps(chrome_trace(unit_step())))
    text, page = page_of(folder)
    assert {key for _, key, _ in page.attributes} & {"src", "href", "onclick", "srcset"} == set()
    assert "http" not in text and "<script" not in text and "@import" not in text and "url(" not in text
    assert ("meta", "content", "width=device-width, initial-scale=1") in page.attributes
    words = " ".join(page.texts)
    for shown in (
        *("<b>a & b</b>", "optimizer.lr", "0.5", "12,345", "41.0%", "60.0 of 80 GiB", "3.1000", "+10.0%", "titan_h100"),
        *("lambada/accuracy", "validation loss, step 400", "400k", "Timeline of step 20", "rank 0"),
        "data-bound: 40% of the time is spent waiting for data",
    ):
        assert shown in words, shown
    assert "data-bound" in capsys.readouterr().out
    svgs = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(svgs) == 9  # loss, six figures of steps, the task, the timeline
    for svg in svgs:
        ET.fromstring(svg)
    fixed = [int(width) for width in re.findall(r"(?<!max-)(?<!in-)width: (\d+)px", text)]
    assert not fixed, "a page for 390 pixels"


def test_a_page_of_a_run_that_lacks_most_things(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, records in {
        "one": [{"step": 1, "loss": 2.0}],
        "nan": [{"step": 1, "loss": None, "nan": 1}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": math.nan, "nan": 1}],
        "a\x1b[31m<script>": [{"step": 1, "loss": 2.0, "x/<i>": 1.0}],
    }.items():
        _, page = page_of(write_run(tmp_path / name, records))
        assert "Nothing found" in " ".join(page.texts) or name == "nan"
        assert "\x1b" not in capsys.readouterr().out
        assert not {"script", "i"} & {tag for tag, *_ in page.attributes}
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no metrics.jsonl with a loss"):
        main([str(tmp_path / "empty")])
    with pytest.raises(ConfigError, match=r"--out = .*name an .html file"):
        main([str(tmp_path / "one"), "--out", str(tmp_path / "x.txt")])


def places(svg: str, kind: str) -> list[tuple[float, float]]:
    path = next(e for e in ET.fromstring(svg) if e.get("class") == kind).get("d") or ""
    return [(float(x), float(y)) for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path)]


def test_points_are_where_their_values_are() -> None:
    """The plot spans x 62 to 448 and y 10 (highest tick) to 204 (lowest)."""
    svg = chart({"a": [(0, 0.0), (5, 5.0), (10, 10.0)], "b": [(0, 10.0), (10, 40.0)]}, (0.0, 10.0))
    assert places(svg, "line c0") == [(62.0, 204.0), (255.0, 107.0), (448.0, 10.0)]
    assert places(svg, "line c1") == [(62.0, 10.0), (448.0, 10.0)], "what lies above the limits is drawn at their edge"
    long = places(chart({"a": [(x, math.sin(x)) for x in range(10_000)]}), "line c0")
    assert len(long) == 300 and all(62 <= x <= 448 and 10 <= y <= 204 for x, y in long)
    assert places(chart({"a": [(3, 7.0)]}), "line c0")[0][0] == 62.0


def test_numbers_are_short() -> None:
    shown = {0.0: "0", 1e-4: "0.0001", 1234.0: "1234", 12_345.0: "12.3k", 1e6: "1M", 2.5e9: "2.5G", -3.0: "-3"}
    assert {value: number(value) for value in shown} == shown


def test_a_timeline_has_a_box_for_each_pass() -> None:
    step = unit_step()
    boxes = [e for e in ET.fromstring(timeline(step)) if (e.get("class") or "").startswith("pass")]
    assert len(boxes) == len(step.passes)
    ends = [float(box.get("x") or 0) + float(box.get("width") or 0) for box in boxes]
    assert max(ends) == pytest.approx(60 + 2 * 460 - 70, abs=1)
    assert 'class="gap exposed"' in timeline(unit_step(transfer=0.5)) and 'class="gap' not in timeline(step)
