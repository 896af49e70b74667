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
SAME_TO_LAYOUTS = {("rope", 3): 2, ("rope", 4): 2, ("rope", 5): 2, ("rope", 7): 6}  # scalings of one kind
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
    "30130201111140151200012203010011",
    "41102100100442164111110020403100",
    "51002110000321042311100206021310",
    "10340001011500071300001030102211",
    "01011211110023113010112030201000",
    "21221000110213030100101011002311",
    "00432000010331142201002010302201",
    "60220111100114100310002010500000",
    "60412000001000004001111110002101",
    "71101101000203120010012000610000",
    "51010200001143053000000020403210",
    "60412000010302173210012025002110",
    "00141101001412170100010200411311",
    "01040110000233014101110201001101",
    "11011101111034103001100102001100",
    "50101101001500031301001204020311",
    "20322000001143064210111037002200",
    "40242001101443130201012005413101",
    "70020001111422022210011200301210",
    "60001100000540020201110023000100",
    "21100100110122060000112210013300",
    "30330000011402001011110201002101",
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
