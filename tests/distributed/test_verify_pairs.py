"""The verifier accepts what the product computes, in models and layouts that a covering array chooses.

Every feature of a decoder (tests/unit/decoder_cases.py) meets each kind of parallelism, and every value of the other
axes occurs. ``python -m tests.distributed.test_verify_pairs`` chooses and prints the rows, after features have changed.
The first rows run here, and the others with ``pytest -m exhaustive``, which also verifies random models in random
layouts, in all kinds of runs: PAIRS_SEED is the first one's seed, and PAIRS_ROWS their number.
"""

import os
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.distributed.launch import base_config
from tests.distributed.layouts import SCHEDULES, pipeline, recompute, tensor, zero
from tests.unit.decoder_cases import FEATURES, Row, fields_of, fits
from titan_like.config.errors import ConfigError
from titan_like.config.schema import JobConfig
from titan_like.parallel import whole_sequences
from titan_like.parallel.layout import Layout
from titan_like.verify.compare import EXACT
from titan_like.verify.shrink import Options, resolve, shrink
from titan_like.verify.verify import Verifier

FIRST_SEED = int(os.environ.get("PAIRS_SEED", random.randrange(10**6)))
RANDOM_ROWS = int(os.environ.get("PAIRS_ROWS", "40"))
MOST_PROCESSES = 4
SIZES = {"training.seq_len": 64, "training.micro_batch_size": 2, "training.global_batch_size": 32}
Meeting = tuple[str, int, str]  # feature, number of its value, axis of parallelism or ""


def context(method: str) -> dict[str, Any]:
    return {"parallelism.context_parallel_degree": 2, "parallelism.context_parallel_method": method}


def shards(size: int, stage: int, replicas: int = 1) -> dict[str, Any]:
    return {"parallelism.data_parallel_shard_degree": size} | zero(stage, replicas)


DEGREES: dict[str, list[dict[str, Any]]] = {
    "tensor": [{}, tensor(2), tensor(2, True)],
    "context": [{}, *map(context, ("ring", "all_gather", "ulysses"))],
    "pipeline": [{}, *(pipeline(2, schedule) for schedule in SCHEDULES if schedule != "none")],
    "data": [shards(1, 0), *(shards(2, stage) for stage in range(4)), shards(1, 0, 2), shards(2, 2, 2)],
}
AXES = DEGREES | {
    "degrees of experts": [
        {},
        {"parallelism.expert_parallel_degree": 2},
        {"parallelism.expert_tensor_parallel_degree": 2},
    ],
    "recompute": [{}, recompute("full"), recompute("selective"), {"activation_checkpoint.offload": True}],
    "optimizer": [{"optimizer.name": name} for name in ("adamw", "adafactor", "muon", "sgd")],
    "lora": [{}, {"lora.rank": 4}],
    "documents": [{}, {"data.reset_attention_mask": True, "data.reset_position_ids": True, "data.eod_mask_loss": True}],
}
# Of random rows alone: they take long, or runs of another kind compare them.
MORE: dict[str, list[dict[str, Any]]] = {
    "compile": [{}] * 9 + [{"compile.enable": True}],
    "dtype": [{"training.dtype": dtype} for dtype in ("float32", "bfloat16", "float16")],
}
# Scalings of one kind.
SAME_TO_LAYOUTS = {("rope", 3): 2, ("rope", 4): 2, ("rope", 5): 2, ("rope", 7): 6, ("rope", 8): 6, ("rope", 9): 6}
IMPOSSIBLE = {("heads", 2, "tensor")}  # two ranks cannot share one head of keys


def config_of(folder: Path, model: Row, layout: Row) -> tuple[JobConfig, Layout]:
    """A run of the model, deep enough for its stages. Raises a `ConfigError` if the layout does not fit it."""
    fields = fields_of(model)
    if layout["pipeline"]:
        fields["num_layers"] *= 4  # two stages on each of two ranks
    if layout["lora"] and fields.get("balance") == "bias":
        fields["bias_update_rate"] = 0.0  # adapters go with frozen routers
    settings = SIZES | {"model.family": "decoder", "model.flavor": "row", "model.flavors": {"row": fields}}
    for values in layout.values():
        settings |= values
    config = base_config(folder, settings)
    return config, resolve(config, None)


def meetings(model: Row, layout: Row) -> set[Meeting]:
    """Each value of the model with each kind of parallelism, and each value alone."""
    in_use = [name for name, options in DEGREES.items() if layout[name] != options[0]]
    values = [(name, FEATURES[name].index(model[name])) for name in FEATURES]
    alone = {*values, *((name, AXES[name].index(layout[name])) for name in AXES)}
    met = {(name, SAME_TO_LAYOUTS.get((name, number), number), axis) for name, number in values for axis in in_use}
    return met | {(*value, "") for value in alone}


def every_meeting() -> set[Meeting]:
    values = {(name, number) for name, options in FEATURES.items() for number in range(len(options))}
    met = {(name, SAME_TO_LAYOUTS.get((name, number), number), axis) for name, number in values for axis in DEGREES}
    alone = values | {(name, number) for name, options in AXES.items() for number in range(len(options))}
    return (met | {(*value, "") for value in alone}) - IMPOSSIBLE


def random_case(draw: random.Random, missing: set[Meeting] = frozenset()) -> tuple[Row, Row]:  # type: ignore[assignment]
    """A model in a layout that fits it; values with ``missing`` meetings are likely. Two degrees, or HSDP, are 2."""
    folder = Path("nowhere")
    # No built-in layer needs whole sequences, which the rule finds out by running the model.
    with patch.object(whole_sequences, "needs_whole_sequences", lambda *_, **__: None):
        while True:
            degrees = draw.choice([("data",), *[draw.sample(list(DEGREES), 2)] * 9])
            layout = {}
            for name, options in AXES.items():
                allowed = options if name not in DEGREES else options[1:] if name in degrees else options[:1]
                weights = [1 + 6 * ((name, options.index(value), "") in missing) for value in allowed]
                layout[name] = draw.choices(allowed, weights)[0]
            model = {}
            for name, options in FEATURES.items():
                met = [[(name, number, axis) for axis in ("", *degrees)] for number in range(len(options))]
                model[name] = draw.choices(options, [1 + 20 * len(missing.intersection(each)) for each in met])[0]
            if fits(model):
                try:
                    if config_of(folder, model, layout)[1].num_processes <= MOST_PROCESSES:
                        return model, layout
                except ConfigError:
                    continue


def choose(draw: random.Random) -> list[tuple[Row, Row]]:
    missing, chosen = every_meeting(), list[tuple[Row, Row]]()
    while missing:
        cases = [random_case(draw, missing) for _ in range(8)]
        best = max(cases, key=lambda case: len(meetings(*case) & missing))
        if meetings(*best) & missing:
            chosen.append(best)
            missing -= meetings(*best)
    return chosen


def numbered(model: Row, layout: Row) -> str:
    return "".join(str((FEATURES | AXES)[name].index(value)) for name, value in (*model.items(), *layout.items()))


def case_of(numbers: str) -> tuple[Row, Row]:
    values = {name: options[int(n)] for n, (name, options) in zip(numbers, (FEATURES | AXES).items(), strict=True)}
    return {name: values[name] for name in FEATURES}, {name: values[name] for name in AXES}


IN_CI = 4  # rows, which have most of the meetings
# The numbers of the values of `FEATURES` and `AXES`.
COVER = [
    "200120101211241061110112013001110",
    "411311000200000140201010200111201",
    "611213010100020113001001024013011",
    "700502111011413043110102001202310",
    "002424101100332124311110002210201",
    "900003111011131075310100210020100",
    "803120000001244102010011030300101",
    "112321001001512145200112016010100",
    "110023110111115001000111100403100",
    "312514101010521130301011010511211",
    "504220001010242112110012200113100",
    "802422001200403070010112020403111",
    "002014000001304102311102017000300",
    "700121000011530055010110000613001",
    "511201010210113034211111025001101",
    "111401110201511060300002000413101",
    "003500000000023164000012200301201",
    "411122100111432131201101200210310",
    "011404101101502123211002200223011",
    "300100100010330104300111100103301",
    "600014000101005100201110021003211",
    "603520000000313071111102003403101",
    "104000000000010151110011032013200",
    "811224000010240022311001015013201",
    "110414000011121155211012220011100",
    "611404101110424002200001200100311",
]


def verify(folder: Path, model: Row, layout: Row, kinds: list[str]) -> None:
    config, degrees = config_of(folder, model, layout)
    verdict = Verifier(shrink(config, degrees, Options(steps=2)), 240, kinds=kinds).verify()
    assert verdict.outcome == "same", (verdict.first_difference, verdict.blame, verdict.place, verdict.reason)


def test_the_rows_are_a_cover() -> None:
    assert every_meeting() - set().union(*(meetings(*case_of(numbers)) for numbers in COVER)) == set()


def marked() -> list[Any]:
    marks = [pytest.mark.slow] * IN_CI + [pytest.mark.exhaustive] * (len(COVER) - IN_CI)
    return [pytest.param(numbers, marks=mark) for numbers, mark in zip(COVER, marks, strict=True)]


@pytest.mark.parametrize("numbers", marked())
def test_features_in_layouts(tmp_path: Path, numbers: str) -> None:
    verify(tmp_path, *case_of(numbers), [EXACT])


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(RANDOM_ROWS))
def test_random_features_in_random_layouts(tmp_path: Path, number: int) -> None:
    draw = random.Random(FIRST_SEED + number)
    model, layout = random_case(draw)
    layout = {**layout, **{name: draw.choice(options) for name, options in MORE.items()}}
    print(f"PAIRS_SEED={FIRST_SEED + number} PAIRS_ROWS=1: {model} {layout}")
    verify(tmp_path, model, layout, [])


if __name__ == "__main__":
    print("\n".join(numbered(*case) for case in choose(random.Random(0))))
