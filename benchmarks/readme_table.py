"""README.md's account of GPUs, from results of peers.py and gpu_check.py: python benchmarks/readme_table.py FILE...

One table has all cards. Of each model there is a row for every side beside ours, with the ratio of our figure to the
other side's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
NAMES = {"trainer": "Hugging Face `Trainer`", "bare": "bare compiled loop"}
HEAD = "| card | model, microbatch | titan_like | compared with | speed | memory |\n|---|---|---|---|---|---|"


def figures(row: Row) -> str:
    """Tokens per second, and memory in 10⁹ bytes where it is known."""
    size = row.get("peak_memory_bytes")
    return f"{row['tokens_per_second']:,.0f}" + (f", {size / 1e9:.4g} GB" if size else "")


def ratio(ours: Row, other: Row, key: str, is_worse: float) -> str:
    """Our figure over the other side's, in bold type where ours is the worse one; empty if one is unknown."""
    if not ours.get(key) or not other.get(key):
        return ""
    found = ours[key] / other[key]
    return f"**{found:.3f}**" if (found - 1) * is_worse > 0.0005 else f"{found:.3f}"


def table_of(results: Sequence[dict[str, Any]]) -> str:
    """The table of results of peers.py, and of each its card, date, commit and version of torch."""
    origins = [f"{card_of(r)}: {r['date']}, commit {r['commit']}, torch {r['machine']['torch']}." for r in results]
    return "\n".join([HEAD, *(line for result in results for line in rows_of(result)), "", *origins])


def card_of(result: dict[str, Any]) -> str:
    """The GPU, or the CPU where there was none."""
    return str(result["machine"]["gpu"] or result["machine"]["cpu"]).removeprefix("NVIDIA ")


def rows_of(result: dict[str, Any]) -> list[str]:
    """The rows of one card, which the first of them names."""
    card, versions, lines = card_of(result), result["versions"], list[str]()
    for ours in (row for row in result["cases"] if row["side"] == "ours" and "tokens_per_second" in row):
        mfu = "" if ours.get("mfu") is None else f", MFU {ours['mfu']:.1%}"
        first = left = f"| {card} | {ours['model']} | {figures(ours)}{mfu} "
        for row in result["cases"]:
            if row["model"] != ours["model"] or row["side"] == "ours" or "tokens_per_second" not in row:
                continue
            side = NAMES.get(row["side"], f"{row['side']} {versions.get(row['side']) or ''}".strip())
            speed, memory = ratio(ours, row, "tokens_per_second", -1), ratio(ours, row, "peak_memory_bytes", 1)
            lines.append(f"{left}| {side}: {figures(row)} | {speed} | {memory} |".replace("  |", " |"))
            left = "| | | "
        if left == first:
            lines.append(f"{left}| | | |")
        card = ""
    return lines


def checks_of(result: dict[str, Any]) -> str:
    """One line on a result of gpu_check.py."""
    parts = [name for name in result if f"{name}_not_reached" in result]
    told = [f"{name} {sum(row['ok'] for row in result[name])} of {len(result[name])}" for name in parts]
    missed = sum(len(result[f"{name}_not_reached"]) for name in parts)
    head = f"{card_of(result)}, {result['date']}, commit {result['commit']}"
    return f"{head}: {', '.join(told)} right" + (f"; {missed} cases not reached" if missed else "")


if __name__ == "__main__":
    found = [json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]
    print(table_of([result for result in found if "cases" in result]))
    print(*(checks_of(result) for result in found if "cases" not in result), sep="\n")
