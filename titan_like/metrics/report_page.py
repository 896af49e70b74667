"""A run as one page of HTML, which holds all that it shows: no scripts, no other files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from titan_like.config.errors import printable, shortened
from titan_like.config.schema import JobConfig
from titan_like.metrics.console import format_duration
from titan_like.metrics.loss_curve import plotted_range
from titan_like.metrics.step_timeline import StepTimeline
from titan_like.metrics.svg_chart import Curve, chart, number, timeline
from titan_like.metrics.timeline_report import headline, legend_of, report

_GIB = 2**30
# Title → the keys of its curves and a factor of their values.
_CHARTS: dict[str, tuple[tuple[str, ...], float]] = {
    "learning rate": (("lr",), 1.0),
    "gradient norm, before clipping": (("grad_norm",), 1.0),
    "tokens per second": (("tokens_per_second",), 1.0),
    "model FLOPs utilisation, %": (("mfu_model",), 100.0),
    "time of a step and waiting for data in it, s": (("step_time_s", "data_time_s"), 1.0),
    "peak memory so far, GiB": (("peak_memory_bytes",), 1 / _GIB),
    "loads of experts: entropy, smallest and largest": (
        ("expert_load_entropy", "min_expert_share", "max_expert_share"), 1.0),
    "pipeline: bubble, and without messages": (("bubble_fraction", "bubble_fraction_simulated"), 1.0),
}  # fmt: skip
_CSS = Path(__file__).with_name("report.css")


def page(
    name: str,
    records: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    findings: Sequence[str],
    forecast: Mapping[str, Any] | None = None,
    step: tuple[str, StepTimeline] | None = None,
) -> str:
    """The page of a run.

    ``records`` are the lines of metrics.jsonl, ``settings`` those of `read_settings`, ``findings`` the diagnosis,
    ``forecast`` the planner's comparison (`titan_like.planner.forecast`), ``step`` a timeline and its title. There is a
    loss at least.
    """
    title = escape(printable(settings.get("metrics.run_name") or name))
    described = escape(printable(str(settings.get("job.description") or "")))
    body = [f"<h1>{title}</h1>", f"<p>{described}</p>" if described else "", _tiles(records, settings)]
    body.append("<h2>Diagnosis</h2>")
    body.append(_list(findings) if findings else "<p>Nothing found: no rule of the diagnosis applies.</p>")
    body += ["<h2>Curves</h2>", f'<div class="charts">{"".join(_charts(records))}</div>']
    if forecast:
        body += ["<h2>Predicted and measured</h2>", _forecast(forecast)]
    if step:
        legend = " ".join(f'<b class="key {key.split()[0]}"></b>{text}' for key, text in legend_of(step[1]).items())
        body.append(f"<h2>Timeline of {escape(step[0])}</h2><p>{escape(headline(step[1]))}</p>")
        body.append(f'<div class="wide">{timeline(step[1])}</div><p class="legend">{legend} (means of the ranks)</p>')
        body.append(f"<details><summary>figures</summary><pre>{escape(report(step[1], step[0]))}</pre></details>")
    body += ["<h2>Settings</h2>", _settings(settings)]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}'
    style = _CSS.read_text(encoding="utf-8")
    content = "\n".join(filter(None, body))
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</title>\n<style>\n{style}</style></head>\n'
        f"<body><main>\n{content}\n</main></body></html>\n"
    )


def curve_of(records: Iterable[Mapping[str, Any]], key: str, factor: float = 1.0) -> Curve:
    """Steps and values of a key, where it is known."""
    return [(record["step"], factor * record[key]) for record in records if record.get(key) is not None]


def _tiles(records: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
    """The main figures."""
    losses, last = [y for _, y in curve_of(records, "loss")], records[-1]
    seconds = sum(y for _, y in curve_of(records, "step_time_s"))
    tiles = [("steps", f"{last['step']:,}"), ("tokens", number(last.get("consumed_tokens") or 0))]
    tiles += [("time in steps", format_duration(seconds)), ("last loss", f"{losses[-1]:.4f}")]
    for key in _validations(records):
        value, step = min((y, x) for x, y in curve_of(records, key))
        tiles.append((f"lowest {key.replace('_', ' ')}, step {step:,.0f}", f"{value:.4f}"))
    rates = [y for _, y in curve_of(records, "tokens_per_second")]
    utilisation = [y for _, y in curve_of(records, "mfu_model")]
    tiles += [("tokens/s, median", f"{median(rates):,.0f}")] if rates else []
    tiles += [("MFU, median", f"{median(utilisation):.1%}")] if utilisation else []
    if peaks := [y for _, y in curve_of(records, "peak_memory_bytes")]:
        capacity = settings.get("run.device_memory_bytes")
        tiles.append(("peak memory", f"{max(peaks) / _GIB:.1f}{f' of {capacity / _GIB:.0f}' if capacity else ''} GiB"))
    skips = sum(1 for record in records if any(record.get(key) for key in ("skipped", "nan", "spike")))
    tiles.append(("skipped steps", f"{skips:,}"))
    if processes := settings.get("run.processes"):
        tiles.append(("processes", f"{processes:,} × {settings.get('run.device', '?')}"))
    cells = (f"<div><span>{escape(str(name))}</span><b>{escape(value)}</b></div>" for name, value in tiles)
    return f'<div class="tiles">{"".join(cells)}</div>'


def _validations(records: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = {key: None for record in records for key in record if key.partition("/")[0] == "validation_loss"}
    return [key for key in keys if curve_of(records, key)]


def _charts(records: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    losses = {key: curve_of(records, key) for key in ("loss", *_validations(records))}
    yield _figure("loss, nats per token", losses, plotted_range(losses), dots=True)
    tasks = {key: None for record in records for key in record if "/" in key and key.partition("/")[0] not in _OTHER}
    charts = _CHARTS | {key: ((key,), 1.0) for key in tasks}
    for title, (keys, factor) in charts.items():
        curves = {key: curve for key in keys if (curve := curve_of(records, key, factor))}
        if curves and any(y != 0 for curve in curves.values() for _, y in curve):
            # The first step compiles and warms up.
            shown = {key: curve[1:] if len(curve) > 2 and "time" in title else curve for key, curve in curves.items()}
            yield _figure(title, shown)


_OTHER = ("validation_loss", "samples", "epochs")


def _figure(
    title: str, curves: Mapping[str, Curve], limits: tuple[float, float] | None = None, dots: bool = False
) -> str:
    keys = (f'<b class="key c{index % 6}"></b>{escape(name)}' for index, name in enumerate(curves))
    legend = f'<span class="legend">{" ".join(keys)}</span>' if len(curves) > 1 else ""
    return f"<figure><figcaption>{escape(title)} {legend}</figcaption>{chart(curves, limits, dots)}</figure>"


def _forecast(forecast: Mapping[str, Any]) -> str:
    rows = [("", "predicted", "measured", "difference")]
    for row, unit, factor in (("seconds", "s a step", 1.0), ("memory_bytes", "GiB on rank 0", 1 / _GIB)):
        expected, actual = (factor * forecast[f"{kind}_{row}"] for kind in ("predicted", "measured"))
        rows.append((unit, f"{expected:.4g}", f"{actual:.4g}", f"{expected / actual - 1:+.1%}"))
    low, high = forecast["seconds_low"], forecast["seconds_high"]
    note = f"profile {forecast['profile']}; nine in ten steps between {low:.4g} and {high:.4g} s; {forecast['steps']}"
    return f"{_table(rows)}<p>{escape(note)}</p>"


def _settings(settings: Mapping[str, Any]) -> str:
    """The settings that are not the defaults, and behind a click all of them."""
    defaults = {f"{section}.{key}": value for section, table in JobConfig().model_dump(mode="json").items()
                for key, value in table.items()}  # fmt: skip
    rows = [(key, shortened(printable(json.dumps(value)), 400)) for key, value in settings.items()]
    changed = [(key, text) for key, text in rows if key not in defaults or settings[key] != defaults[key]]
    return f"{_table(changed)}<details><summary>all settings</summary>{_table(rows)}</details>"


def _table(rows: Iterable[Sequence[str]]) -> str:
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _list(sentences: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(printable(sentence))}</li>' for sentence in sentences)}</ul>"
