"""Measured steps of this project's trainer, to which `plan.py calibrate` fits a profile.

In a CSV file a line is a run, with the columns `SETTINGS`, gpu, gpus, step_time_s or tflops_per_gpu (without
recomputation), and perhaps model, notes and source. Blank cells mean ZeRO 1, sequence parallelism wherever there is
tensor parallelism, no recomputation, microbatches of one sample in a pipeline, else the largest up to 16, and stages as
interleaved as layers and microbatches allow.

A JSON file holds runs in a list, or under ``cases`` next to what all of them share. A run has ``command``, with the
settings of train.py after other words; ``tokens_per_second`` or ``step_time_s``; ``gpu``, its name; and perhaps
``gpus`` and ``source``. The file of benchmarks/peers.py is one. Its runs of other trainers, whose ``side`` is not
"ours", and cases that did not run are left out.
"""

from __future__ import annotations

import csv
import re
import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from titan_like.config.errors import ConfigError
from titan_like.config.load import load_config
from titan_like.config.paths import blaming, parse_json, user_file
from titan_like.config.schema import JobConfig
from titan_like.metrics.devices import known_device
from titan_like.metrics.flops import model_flops_per_token
from titan_like.models.registry import model_config
from titan_like.parallel.layout import resolve_layout
from titan_like.planner.profile import Profile, is_builtin
from titan_like.planner.workload import Workload, workload_of
from titan_like.train.rules import check_rules

SETTINGS = {  # columns of a CSV file, and the settings of train.py that they stand for
    "layers": "model.overrides.num_layers",
    "hidden": "model.overrides.hidden_size",
    "heads": "model.overrides.num_attention_heads",
    "kv_heads": "model.overrides.num_kv_heads",
    "ffn": "model.overrides.ffn_hidden_size",
    "vocab": "model.overrides.vocab_size",
    "seq": "training.seq_len",
    "mbs": "training.micro_batch_size",
    "gbs": "training.global_batch_size",
    "tp": "parallelism.tensor_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "vp": "parallelism.virtual_stages_per_rank",
    "cp": "parallelism.context_parallel_degree",
    "dp": "parallelism.data_parallel_shard_degree",
    "zero": "parallelism.zero_stage",
    "recompute": "activation_checkpoint.mode",
    "seq_parallel": "parallelism.sequence_parallel",
}
COLUMNS = ("model", "gpu", "gpus", "gbs", "notes")  # a CSV file has at least these
_NEEDED = ("layers", "hidden", "heads", "seq", "vocab", "gpus", "tp", "gbs")
_MORE = {*SETTINGS, "ep", "gpus_per_node", "mem_gib", "source", "step_time_s", "tflops_per_gpu"}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_DTYPES |= {name: name for name in _DTYPES.values()}


@dataclass(frozen=True)
class Row:
    """One measured run."""

    model: str
    gpu: str
    work: Workload
    seconds: float  # per step
    source: str

    def adapted(self, profile: Profile) -> Profile:
        """The profile on the row's own GPU, unless that is unknown or the profile itself describes its device."""
        device = known_device(self.gpu) if is_builtin(profile.device) else None
        return profile if device in (None, profile.device) else profile.changed(device=device)


def read_rows(path: str | Path, dtype: str) -> tuple[list[Row], list[str]]:
    """The rows of a CSV or JSON file, and which columns and rows are left out and why.

    A line of a CSV file is a run in ``dtype``, unless its notes say bf16, fp16 or fp32.

    Raises:
        ConfigError: the file cannot be read, or columns are missing or doubled.
    """
    rows, left_out, noun, number = list[Row](), list[str](), "row", 1
    if Path(path).suffix == ".json":
        read, tables = row_of_command, read_cases(path)
    else:
        tables, names = read_csv(path, COLUMNS)
        left_out = [f"column {name}: unknown, so not read" for name in names if name not in {*COLUMNS, *_MORE}]
        read, noun, number = partial(row_of_line, dtype=dtype), "line", 2
    for index, table in enumerate(tables, start=number):
        try:
            rows.append(read(table))
        except KeyError as error:
            left_out.append(f"{noun} {index}: {error.args[0]} is not stated")
        except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
            left_out.append(f"{noun} {index}: {error}")
    return rows, left_out


def _points(path: str | Path) -> AbstractContextManager[None]:
    refuse = blaming("--points", str(path), "give a readable CSV or JSON file")
    return user_file(Path(path), refuse, may_stream=True)


def read_csv(path: str | Path, needed: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """The lines of a CSV file, and the names of its columns.

    Raises:
        ConfigError: it cannot be read, or columns are missing or doubled.
    """
    with _points(path), open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        names = [name for name in reader.fieldnames or [] if name]
        tables = [{name: text or "" for name, text in table.items()} for table in reader]
    double = next((name for name in names if names.count(name) > 1), None)
    missing = next((name for name in needed if name not in names), None)
    if double or missing:
        reason = f"has two columns {double}; remove one" if double else f"has no column {missing}"
        raise ConfigError("--points", str(path), reason)
    return tables, names


def read_cases(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a JSON file, each with what all of them share.

    Raises:
        ConfigError: it holds no list of rows.
    """
    with _points(path):
        content = parse_json(Path(path).read_text(encoding="utf-8"))
    shared = content if isinstance(content, dict) else {"cases": content}
    cases, machine = shared.pop("cases", None), shared.get("machine")
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise ConfigError("--points", str(path), 'has no list of rows under "cases"')
    shared |= machine if isinstance(machine, dict) else {}
    return [shared | case for case in cases if case.get("side", "ours") == "ours" and "problem" not in case]


def row_of_command(case: dict[str, Any]) -> Row:
    """Read a row of a JSON file.

    Raises:
        KeyError: something is not stated.
        ValueError, TypeError, AttributeError, ZeroDivisionError: the row says something impossible.
    """
    words = shlex.split(case["command"])
    settings = words[next(index for index, word in enumerate([*words, "--"]) if word.startswith("--")) :]
    return _row(load_config(settings), case, f"this trainer on {case['gpu']}, PyTorch {case.get('torch', 'unknown')}")


def row_of_line(cells: dict[str, Any], dtype: str) -> Row:
    """Read a line of a CSV file, in ``dtype`` unless its notes name another type.

    Raises:
        ValueError: it says too little, or something impossible.
    """
    if None in cells:  # where the csv module puts surplus cells
        raise ValueError("more cells than the file has columns")
    stated = {name: text.strip().lower() for name, text in cells.items() if text.strip()}
    missing = next((name for name in _NEEDED if name not in stated), None)
    if missing or stated.get("ep", "1") != "1":
        raise ValueError(f"{missing} is not stated" if missing else "experts have no columns; give the run as JSON")
    if re.search("fp[48]", stated.get("notes", "")):
        raise ValueError("products in float8 or float4 are not predicted")
    number = {name: _whole(name, stated[name]) for name in _NEEDED}
    hidden, gpus, tensor, batch = (number[name] for name in ("hidden", "gpus", "tp", "gbs"))
    # What is not stated follows from what is.
    plain = {"kv_heads": number["heads"], "ffn": 4 * hidden, "pp": 1, "cp": 1, "zero": 1, "recompute": "none"}
    plain["seq_parallel"] = str(tensor > 1)
    texts = {name: str(value) for name, value in plain.items()} | stated
    pipeline = _whole("pp", texts["pp"])
    data = max(1, gpus // (tensor * pipeline * _whole("cp", texts["cp"])))
    likely = 1 if pipeline > 1 else max(size for size in range(1, 17) if batch // data % size == 0)
    micro = _whole("mbs", texts.setdefault("mbs", str(likely)))
    virtual = number["layers"] // pipeline if pipeline > 1 and batch // (data * micro) % pipeline == 0 else 1
    virtual = _whole("vp", texts.setdefault("vp", str(virtual)))
    texts["seq_parallel"] = {"0": "false", "1": "true"}.get(texts["seq_parallel"], texts["seq_parallel"].lower())
    is_llama = "llama" in stated.get("model", "") or texts["ffn"] != str(4 * hidden)
    values = {key: texts[name] for name, key in SETTINGS.items() if name in texts} | {
        "model.family": "llama" if is_llama else "gpt",
        "model.overrides.max_seq_len": texts["seq"],
        "parallelism.pipeline_schedule": "interleaved_1f1b" if virtual > 1 else "1f1b",
        "training.dtype": stated_dtype(stated.get("notes", "")) or dtype,
        "training.steps": "1",
        "compile.enable": str("compile" in stated.get("notes", "")).lower(),
    }
    config = load_config([f"--{key}={value}" for key, value in values.items()])
    row = _row(config, cells, cells["gpu"])
    check_rules(config, row.work.model, resolve_layout(config.parallelism, gpus))
    return row


def stated_dtype(notes: str) -> str | None:
    """The data type that a row's notes name."""
    return next((dtype for word, dtype in _DTYPES.items() if re.search(rf"\b{word}\b", notes.lower())), None)


def _whole(name: str, text: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]{0,9}", text):
        raise ValueError(f"{name} = {text}: must be a whole number of at least 1")
    return int(text)


def _row(config: JobConfig, record: dict[str, Any], source: str) -> Row:
    """A run with the GPU and the speed that ``record`` states."""
    model, layout = model_config(config.model), resolve_layout(config.parallelism, int(record.get("gpus", 1)))
    work = workload_of(config, model, layout)
    tokens = work.global_batch_size * work.seq_len
    if record.get("step_time_s"):
        seconds = float(record["step_time_s"])
    elif record.get("tflops_per_gpu"):
        flops = tokens * model_flops_per_token(model, work.seq_len, decoder_seq_len=work.decoder_seq_len)
        seconds = flops / (work.num_gpus * float(record["tflops_per_gpu"]) * 1e12)
    elif record.get("tokens_per_second"):
        seconds = tokens / float(record["tokens_per_second"])
    else:
        raise ValueError("neither step_time_s nor tokens_per_second nor tflops_per_gpu is stated")
    if not 1e-9 < seconds < 1e6:
        raise ValueError(f"a step of {seconds} s")
    name = record.get("model") or f"{config.model.family} {config.model.flavor}"
    return Row(str(name), record["gpu"], work, seconds, str(record.get("source") or source))
