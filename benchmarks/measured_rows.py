"""Measured rows: how to read them, and how to fill in what they leave out.

A row is one published measurement of a training step. Its columns are source, model, layers, hidden, heads, kv_heads,
ffn, seq, vocab, gpu, gpus, gpus_per_node, tp, pp, vp, dp, cp, ep, zero, recompute, seq_parallel, mbs, gbs,
tflops_per_gpu, step_time_s, mem_gib and notes. Blank means unknown. The first word of the notes names the study, which
determines the stack. A row without a time whose notes say OOM ran out of memory. Runs of this project's trainer may
also come from a JSON file, as in `titan_like.planner.rows`.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from benchmarks.stacks import STACKS
from benchmarks.studies import EXPERTS, MCORE, STUDIES
from titan_like.config.errors import ConfigError, reason_of
from titan_like.config.paths import blaming, user_file
from titan_like.metrics.devices import find_device
from titan_like.models.config import TransformerConfig
from titan_like.models.gpt.config import GPTConfig
from titan_like.models.llama.config import LlamaConfig
from titan_like.models.moe.config import MoEConfig
from titan_like.models.registry import flavors
from titan_like.planner import rows
from titan_like.planner.profile import Profile
from titan_like.planner.step_time import step_time
from titan_like.planner.trace import trace
from titan_like.planner.workload import Workload

COLUMNS = ("model", "gpu", "gpus", "gbs", "notes")  # a CSV file has at least these
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_DTYPES |= {name: name for name in _DTYPES.values()}

_RECOMPUTE = {  # mode, and every how many layers
    "none": ("none", 1),
    "full": ("full", 1),
    "selective": ("selective", 1),
    "selective-ac": ("full", 2),  # torchtitan's, which recomputes every second layer
    "selective-ac(per-op)": ("full", 2),
}

_ASYNC_EXPOSED = 0.7  # of tensor-parallel collectives that are split up to overlap with products
_NOT_MODELLED = "experts in a model whose shape is not stated, nor modelled"

_Count = Annotated[int, Field(ge=1, le=10**9)]
_Size = Annotated[int, Field(ge=1, le=2**20)]


class _Cells(BaseModel):
    """The numbers of a row that are stated. The bounds are far beyond anything that has been run."""

    layers: _Size | None = None
    hidden: _Size | None = None
    heads: _Size | None = None
    kv_heads: _Size | None = None
    ffn: _Count | None = None
    seq: _Count | None = None
    vocab: _Count | None = None
    gpus: _Count
    gpus_per_node: _Count = 8
    tp: _Count | None = None
    pp: _Count = 1
    vp: _Count | None = None
    dp: _Count | None = None
    cp: _Count = 1
    ep: _Count = 1
    mbs: _Count | None = None
    gbs: _Count
    seq_parallel: bool | None = None
    tflops_per_gpu: float | None = Field(None, gt=1e-6, lt=1e5)
    step_time_s: float | None = Field(None, gt=1e-9, lt=1e6)
    mem_gib: float | None = Field(None, gt=0, lt=1e4)


_NEWER = "26.06"  # the container with which steps with experts became a quarter faster


@dataclass(frozen=True)
class Row(rows.Row):
    """One measurement. Its seconds are stated or computed from the rate."""

    study: str  # first word of the notes
    notes: str
    flash: bool = True  # attention is fused
    memory_gib: float | None = None
    out_of_memory: bool = False  # the run did not start to train, and has no time
    memory_of_first: bool = False  # memory_gib is the first pipeline rank's, not the fullest's

    @property
    def gpus(self) -> int:
        """GPUs of the job."""
        return self.work.num_gpus

    @property
    def group(self) -> str:
        """GPU and study, as reports name them."""
        return f"{self.gpu} {self.study}"

    @property
    def session(self) -> str:
        """The notes up to the first semicolon, such as "bloom 02-25". Its rows share one state of a cluster.

        For rows with experts, it also says whether the software is that of before or after a leap.
        """
        if self.work.expert > 1:
            container = re.search(r"\[([0-9]{2}\.[0-9]{2})", self.source)
            return f"{self.study} experts {'new' if container and container[1] >= _NEWER else 'old'}"
        return self.notes.partition(";")[0].strip()

    def adapted(self, profile: Profile) -> Profile:
        """The profile on the row's own GPU, with what its notes name.

        Notes can name the network ("400 Gbps" per node), asynchronous tensor parallelism, or float8 with a scale for
        each row.
        """
        if "memory size not stated" not in self.notes:
            profile = super().adapted(profile)
        changes: dict[str, Any] = {}
        for number, unit in pairwise(self.notes.replace(";", " ").split()):
            if unit == "Gbps" and re.fullmatch(r"[1-9][0-9]{0,5}", number):
                changes["node_bandwidth"] = float(number) * 1e9 / 8
        if self.sums_in_float32:
            changes["accumulation_bytes"] = profile.accumulation_bytes + 8
        if "asyncTP" in self.notes:
            changes["tensor_exposed"] = _ASYNC_EXPOSED
        if "rowwise" in self.notes:
            changes["float8_relative"] = profile.float8_rowwise
        # Rows in the same circumstances share what has been computed.
        known, key = profile.seconds, ("adapted", *changes.items())
        if key not in known:
            known[key] = profile.changed(**changes)
        return known[key]

    def predicted(self, profile: Profile) -> float:
        """As in the base class, with what the profile's stack runs in place of the traced operators."""
        stack = STACKS.get(profile.name)
        source = stack.programs(self.work, self.flash) if stack is not None else trace
        return step_time(self.work, self.adapted(profile), source).total

    @property
    def sums_in_float32(self) -> bool:
        """Whether the stack is BLOOM's bf16 optimizer of 28 February, which keeps float32 sums, unsharded."""
        return self.study in ("bloom", "production") and self.work.dtype == "bfloat16" and self.session != "bloom 02-17"


def read_rows(path: str | Path) -> tuple[list[Row], list[str]]:
    """The rows of a CSV or JSON file that say enough to be predicted, and which columns and lines are left out and why.

    Raises:
        ConfigError: the file cannot be read, or columns are missing or doubled.
    """
    if Path(path).suffix == ".json":
        own, left_out = rows.read_rows(path)
        return [_own_row(row) for row in own], left_out
    tables, names = read_csv(path, COLUMNS)
    known = {*COLUMNS, *_Cells.model_fields, "source", "zero", "recompute"}
    found, left_out = [], [f"column {name}: unknown, so not read" for name in names if name not in known]
    for number, table in enumerate(tables, start=2):
        try:
            found.append(row_from(table))
        except ValueError as error:
            left_out.append(f"line {number}: {error}")
    return found, left_out


def read_csv(path: str | Path, needed: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """The lines of a CSV file, and the names of its columns.

    Raises:
        ConfigError: it cannot be read, or columns are missing or doubled.
    """
    refuse = blaming("--points", str(path), "give a readable CSV or JSON file")
    with user_file(Path(path), refuse, may_stream=True), open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        names = [name for name in reader.fieldnames or [] if name]
        tables = [{name: text or "" for name, text in table.items()} for table in reader]
    double = next((name for name in names if names.count(name) > 1), None)
    missing = next((name for name in needed if name not in names), None)
    if double or missing:
        reason = f"has two columns {double}; remove one" if double else f"has no column {missing}"
        raise ConfigError("--points", str(path), reason)
    return tables, names


def _own_row(row: rows.Row) -> Row:
    gpu, notes = find_device(row.gpu).name, f"titan_like; {row.work.dtype}"
    return Row(row.model, gpu, row.work, row.seconds, row.source, "titan_like", notes)


def study_of(notes: str) -> str:
    """The first word of the notes without punctuation. From "tokens/s=…" the value is dropped."""
    word = next(iter((notes or "").split()), "").strip(";:,")
    return word.split("=")[0] if word.startswith("tokens/s") else word


def row_from(table: dict[str, str]) -> Row:
    """Read one row.

    Raises:
        ValueError: it says too little, or something impossible.
    """
    cells, notes = _cells(table), table.get("notes") or ""
    study = study_of(notes)
    defaults = STUDIES.get(study, MCORE)
    if cells.tp is None:
        raise ValueError("tp is not stated")
    # Sizes: stated, or the likely ones.
    tensor, pipeline, context = cells.tp, cells.pp, cells.cp
    model = _with_experts(table["model"], cells) if cells.ep > 1 else _model(cells, "llama" in table["model"].lower())
    gpus, batch = cells.gpus, cells.gbs
    others = tensor * pipeline * context
    data = cells.dp or gpus // others
    if data * others != gpus:
        raise ValueError(f"gpus = {gpus}: not the product of the degrees, {others} × data {data or 1}")
    # If it is not stated, a microbatch is one sample in a pipeline, else the largest size up to 16 that divides.
    likely = 1 if pipeline > 1 else max(size for size in range(1, 17) if batch // data % size == 0)
    micro = cells.mbs or likely
    if batch % (data * micro):
        raise ValueError(f"gbs = {batch}: not a multiple of {data} × microbatches of {micro}")
    virtual = cells.vp or _likely_virtual(defaults, model.num_layers, pipeline, batch // (data * micro))
    # Recomputation and sharding: stated, or the study's.
    stated = (table.get("recompute") or defaults["recompute"]).strip().lower()
    if stated not in _RECOMPUTE:
        raise ValueError(f"recompute = {stated}: must be one of {', '.join(_RECOMPUTE)}")
    recompute, every = _RECOMPUTE[stated]
    zero_text = (table.get("zero") or "").strip().lower().replace("fsdp", "3").split("/")[0]
    if zero_text not in ("", "0", "1", "2", "3"):
        raise ValueError(f"zero = {table['zero']}: must be 0, 1, 2, 3 or fsdp")
    zero = int(zero_text) if zero_text else defaults["zero"]
    sequence = cells.seq_parallel if cells.seq_parallel is not None else defaults.get("sp", False)
    stages = pipeline * virtual
    if stages > model.num_layers + 2:  # the embedding and the output may have stages of their own
        raise ValueError(f"{stages} stages for {model.num_layers} layers")
    work = Workload(
        model=model,
        seq_len=model.max_seq_len,
        micro_batch_size=micro,
        global_batch_size=batch,
        tensor=tensor,
        pipeline=pipeline,
        shard=data,
        context=context,
        expert=cells.ep,
        schedule="interleaved_1f1b" if virtual > 1 else "1f1b",
        virtual_stages=virtual,
        sequence_parallel=sequence and tensor > 1,
        zero_stage=zero,
        recompute=recompute,
        recompute_every=every,
        stage_layers=equal_stages(model.num_layers, stages) if pipeline > 1 else None,
        dtype=_dtype(notes, study, defaults["dtype"]),
        dropout=defaults.get("dropout", False),
        compiled="compile" in notes or (study == "torchtitan" and "eager" not in notes),
    )
    is_timed = cells.step_time_s is not None or cells.tflops_per_gpu is not None
    out_of_memory = not is_timed and re.search(r"\bOOM\b|out of memory", notes) is not None
    return Row(
        table["model"],
        table["gpu"],
        work,
        math.nan if out_of_memory else cells.step_time_s or _seconds(work, gpus, cells.tflops_per_gpu, notes),
        table.get("source") or "",
        study,
        notes,
        defaults["flash"],
        cells.mem_gib,
        out_of_memory,
        defaults.get("memory_of_first", False),
    )


def equal_stages(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of equal stages. If they do not divide evenly, the middle stages take one more each.

    Stages without layers have only the embedding or the output.
    """
    base, remainder = divmod(num_layers, num_stages)
    first = (num_stages - remainder) // 2
    return tuple(base + (first <= stage < first + remainder) for stage in range(num_stages))


def _cells(table: dict[str, str]) -> _Cells:
    if None in table:  # where the csv module puts surplus cells
        raise ValueError("more cells than the file has columns")
    try:
        return _Cells.model_validate({name: text for name, text in table.items() if (text or "").strip()})
    except ValidationError as error:
        first = error.errors()[0]
        name, value = first["loc"][0], "(blank)" if first["type"] == "missing" else first["input"]
        raise ValueError(f"{name} = {value}: {reason_of(first)}") from None


def _model(cells: _Cells, named_llama: bool) -> TransformerConfig:
    """The model's shape, with the row's sequence length. An MLP of an unusual width is taken to be Llama's."""
    layers, hidden, seq, vocab = cells.layers, cells.hidden, cells.seq, cells.vocab
    if cells.heads and cells.heads % (cells.tp or 1):
        raise ValueError(f"tp = {cells.tp}: does not divide the {cells.heads} heads")
    for name in ("layers", "hidden", "seq", "vocab"):
        if getattr(cells, name) is None:
            raise ValueError(f"{name} is not stated")
    assert layers and hidden and seq and vocab
    heads = cells.heads or _likely_heads(hidden, cells.tp or 1)
    ffn = cells.ffn or 4 * hidden
    try:
        sizes = {"max_seq_len": seq, "vocab_size": vocab}
        return _shape(named_llama or ffn != 4 * hidden, layers, hidden, heads, cells.kv_heads or heads, ffn, **sizes)
    except ValidationError as error:
        raise ValueError(reason_of(error.errors()[0])) from None


def _with_experts(name: str, cells: _Cells) -> TransformerConfig:
    """The shape of a published model with experts, which rows name instead of stating it."""
    found = next((shape for start, shape in EXPERTS.items() if name.startswith(start)), None)
    if found is None:
        raise ValueError(f"{name.partition(' (')[0]}: {_NOT_MODELLED}")
    shape = flavors("moe")[found] if isinstance(found, str) else found
    return MoEConfig.model_validate(shape | {"max_seq_len": cells.seq})


def _likely_heads(hidden: int, tensor: int) -> int:
    """If heads are not stated: the number that gives a width nearest to 128 among those that the sizes allow."""
    fits = [h for h in range(tensor, hidden + 1, tensor) if hidden % h == 0] or [1]
    return min(fits, key=lambda h: abs(math.log(hidden / h / 128)))


@cache
def _shape(llama: bool, layers: int, hidden: int, heads: int, kv: int, ffn: int, **sizes: int) -> TransformerConfig:
    family: type[TransformerConfig] = LlamaConfig if llama else GPTConfig
    sizes |= {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return family.model_validate(sizes | {"num_kv_heads": kv, "ffn_hidden_size": ffn})


def _likely_virtual(defaults: dict[str, Any], layers: int, pipeline: int, m: int) -> int:
    """If interleaving is not stated: newer stacks interleave as finely as layers and microbatches allow."""
    if defaults is not MCORE or pipeline == 1 or m % pipeline:
        return 1
    padded = layers + -layers % pipeline  # the embedding and the output may take the place of layers
    return padded // pipeline if padded <= layers + 2 else 1


def _dtype(notes: str, study: str, default: str) -> str:
    words = notes.lower()
    if "nvfp4" in words:
        return "float4"
    if "fp8" in words:
        return "float8"
    if study == "bloom" and "bf16" in words:
        return "bfloat16"
    return default if study in STUDIES else _stated_dtype(notes) or default


def _stated_dtype(notes: str) -> str | None:
    """The data type that a row's notes name."""
    return next((dtype for word, dtype in _DTYPES.items() if re.search(rf"\b{word}\b", notes.lower())), None)


def _seconds(work: Workload, gpus: int, tflops_per_gpu: float | None, notes: str) -> float:
    """Seconds per step, from TFLOP/s per GPU by the convention that the notes name."""
    if tflops_per_gpu is None:
        raise ValueError("neither step_time_s nor tflops_per_gpu is stated")
    model, seq = work.model, work.seq_len
    layer = 2 * model.parts.kinds[0].matrices[0] + 4 * seq * model.hidden_size
    logits = 2 * model.hidden_size * model.padded_vocab_size
    passes = 4 if "hw96" in notes else 3
    flops = passes * model.num_layers * layer + 3 * logits
    return flops * work.global_batch_size * seq / (gpus * tflops_per_gpu * 1e12)
