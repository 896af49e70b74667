"""The verifier accepts what the product computes, and of a bug it names the axis that the bug is in.

The bugs that run here show each row, axis, type and kind of place at least once; ``pytest -m exhaustive`` runs the
others, and the product in more layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.distributed.bugs import (
    ADAFACTOR,
    ADAPTER_DROPOUT,
    BERT,
    BERT_LAYOUT,
    BFLOAT16,
    BIASED,
    BUDGET,
    BUGS,
    COMPILED,
    CONTEXT,
    DATA,
    DOCUMENTS,
    EXPERTS,
    FLOAT8,
    FLOAT8_ROWS,
    FLOAT16,
    FOUR,
    GATHER,
    GPT,
    GROUPS,
    HSDP,
    INTERLEAVED,
    LATENT,
    LLAMA_MASKS,
    LLAMA_TENSOR,
    LLAMA_TENSOR_4,
    LORA,
    MOE,
    MUON,
    NO_DROPOUT,
    OFFLOAD,
    PAIRS,
    PIPELINE,
    RACE,
    RAMPUP,
    RECOMPUTATION,
    REPO,
    RING,
    SEQUENCE,
    SHARED,
    SPLIT_EXPERTS,
    T5,
    TENSOR,
    ULYSSES,
    Z_LOSS,
    ZERO_1,
    ZERO_3,
    ZERO_BUBBLE,
    kind_of,
)
from tests.distributed.mutations import (
    gradients,
    runs,
)
from titan_like.config import load_config
from titan_like.verify.compare import DROPOUT, EXACT, RESUME, SINGLE, Row
from titan_like.verify.processes import WAITING, Group, Prepare
from titan_like.verify.shrink import Options, resolve, shrink
from titan_like.verify.verify import _LOCATED, Verdict, Verifier

STEPS = 3


def verify(
    layout: list[str],
    mutation: Prepare | None = None,
    kinds: list[str] | None = None,
    timeout: float = 240,
    steps: int = STEPS,
    patience: float = 10.0,
) -> Verdict:
    """Verify the debug model."""
    config = load_config(["--job.config_file", GPT, *layout])
    small = shrink(config, resolve(config, None), Options(steps))
    return Verifier(small, timeout, patience, start=partial(Group, prepare=mutation), kinds=kinds or []).verify()


# Layouts in all kinds of runs, or in those that are named. test_verify_command.py has the pipeline in all of them, and
# test_verify_pairs.py decoders with all features.
# `./scripts/test.sh quick` runs the first ones alone: each kind of parallelism.
QUICK: list[tuple[list[str], list[str]]] = [
    (ZERO_3, [EXACT]),
    (SEQUENCE, [EXACT]),
    ([*RING, *PIPELINE, *ZERO_3[2:]], [EXACT]),
    ([*MOE, *ZERO_3, *Z_LOSS, *BFLOAT16[:2]], [EXACT]),
]
LORA_DROPOUT = [*ADAPTER_DROPOUT, *PIPELINE, *ZERO_3, *BFLOAT16[:2], "--lora.modules", '["q_proj", "mlp.down"]']
SAME: list[tuple[list[str], list[str]]] = [
    ([*RAMPUP[:4], *ZERO_3, *DOCUMENTS], [RESUME]),
    (SEQUENCE, [DROPOUT]),
    ([*MOE, *ZERO_3, *Z_LOSS, *BFLOAT16[:2]], ["bfloat16"]),
    (BFLOAT16, ["bfloat16"]),
    ([*T5, *PIPELINE], [EXACT, DROPOUT]),
    ([*FLOAT8, *ZERO_3, *BFLOAT16[:2]], [EXACT, "bfloat16"]),
    ([*FLOAT8_ROWS, *SEQUENCE], [EXACT]),
    # The reference's choice of experts is replayed, so that gradients may not differ by a token with others.
    ([*MOE, *SEQUENCE, *BFLOAT16[:2]], ["bfloat16"]),
    (LORA_DROPOUT, [DROPOUT]),
]
MORE_SAME: list[tuple[list[str], list[str]]] = [
    # An adapter's first update is a whole step whatever its gradient's size, unless the small run prevents that.
    ([*LORA, *PIPELINE, *TENSOR, *BFLOAT16[:2]], ["bfloat16", RESUME]),
    ([*LLAMA_TENSOR_4, "--lora.rank", "4", "--lora.modules", '["q_proj", "v_proj"]'], [EXACT]),
    ([*EXPERTS, *SEQUENCE, "--parallelism.tensor_parallel_degree", "4", *COMPILED[:2]], [EXACT]),
    ([*RAMPUP[:4], *ZERO_3, *DOCUMENTS], [DROPOUT]),
    ([*T5, *PIPELINE], [RESUME]),
    ([*SPLIT_EXPERTS, *SHARED, *ZERO_3], [EXACT, RESUME]),
    ([*EXPERTS, *FLOAT8, *SEQUENCE], [EXACT]),
    (LORA_DROPOUT, [EXACT, "bfloat16"]),
    ([*LATENT, *EXPERTS[2:], *FLOAT8, *SEQUENCE], [EXACT]),
    ([*LLAMA_MASKS, *SEQUENCE], [EXACT, SINGLE, RESUME]),
    ([*GATHER, *SEQUENCE, *LLAMA_MASKS], [SINGLE]),
    ([*FLOAT8, *TENSOR[:2], *ZERO_3, *BFLOAT16[:2]], [EXACT, "bfloat16"]),
    ([*FLOAT8_ROWS, *SEQUENCE], [SINGLE]),
    ([*PAIRS, *SEQUENCE], [EXACT, SINGLE, DROPOUT]),
    # Large weights: AdamW makes steps of the rounding of gradients that cancel, such as those of the keys' biases.
    (["--model.overrides.init_std", "0.5", *DATA], [EXACT, SINGLE]),
    ([*MOE, *BIASED, *SHARED, *ZERO_BUBBLE, *ZERO_3], []),
    ([*MOE, *BIASED, *SHARED, *INTERLEAVED, *FLOAT16[:2], "--training.global_batch_size", "32"], []),
    ([*MOE, *GATHER[2:], *RECOMPUTATION[:2], *BFLOAT16[:2], *Z_LOSS], []),
    ([*MOE, *SHARED, *HSDP, *DOCUMENTS, "--model.overrides.qk_norm", "all"], []),
    ([*SPLIT_EXPERTS, *EXPERTS[2:], *ZERO_1, *COMPILED[:2], *BFLOAT16[:2]], []),
    ([*SPLIT_EXPERTS, *PIPELINE[:2]], []),
    ([*MOE, *COMPILED, *BIASED, "--activation_checkpoint.mode", "selective"], []),
    ([*GATHER, *COMPILED, *DATA], []),
    ([*LLAMA_TENSOR, *COMPILED, *BUDGET, "0.3"], []),
    ([*GATHER, *COMPILED, *BUDGET, "0"], []),
    ([*MOE, *ZERO_3, *COMPILED[:2], *BUDGET, "0.5"], []),
    ([*OFFLOAD, *ZERO_3, *BFLOAT16[:2]], []),
    ([*OFFLOAD, *ZERO_BUBBLE], []),
    ([*OFFLOAD, *RING, *COMPILED, *BUDGET, "0.2"], []),
    ([*RING, *COMPILED], []),
    ([*ULYSSES, *GROUPS, *COMPILED, *PIPELINE], []),
    ([*RING, *FOUR, *SEQUENCE, *DOCUMENTS, *FLOAT16[:2]], []),
    ([*GATHER, *FOUR, *HSDP, *BFLOAT16[:2], "--training.global_batch_size", "64"], []),
    ([*ULYSSES, *FOUR, "--model.overrides.num_kv_heads", "4", *DOCUMENTS], []),
    ([*ULYSSES, *GROUPS, *ZERO_3, *RECOMPUTATION[:2], *ADAFACTOR], []),
    ([*GATHER, *ZERO_BUBBLE, *MUON], []),
    ([*GATHER, *INTERLEAVED, *RAMPUP[:2]], []),
    ([*T5, *CONTEXT[2:], *SEQUENCE, "--training.decoder_seq_len", "64", *NO_DROPOUT], []),
    ([*BERT, *CONTEXT[2:], *ZERO_3, *NO_DROPOUT], []),
    ([*CONTEXT[2:], *PIPELINE, *DOCUMENTS, *NO_DROPOUT], []),
    (PIPELINE, []),
    (SEQUENCE, []),
    ([*FLOAT8, *T5, *TENSOR[:2], *ZERO_3], []),
    ([*FLOAT8_ROWS, *ZERO_BUBBLE], []),
    ([*EXPERTS, *FLOAT8, *BFLOAT16[:2], *DATA], []),
    ([*EXPERTS, *FLOAT8_ROWS, *SEQUENCE, "--parallelism.tensor_parallel_degree", "4", *GROUPS], [EXACT]),
    ([*MOE, *FLOAT8_ROWS, *PIPELINE, *SHARED], []),
    ([*PAIRS, *BERT_LAYOUT], []),
    ([*T5, *BERT_LAYOUT], []),
    (["--model.overrides.init_std", "3.0", *DATA], []),
    (["--job.config_file", str(REPO / "train_configs/gpt_1t.toml")], [EXACT, SINGLE]),
    # The bias of the head that chooses has a gradient of rounding alone.
    ([*RACE, *SEQUENCE], []),
    ([*RACE, *ZERO_3, *PIPELINE[:2]], []),
    # Four axes, which take 16 processes.
    ([*PIPELINE, *TENSOR, *HSDP, "--training.global_batch_size", "64"], [EXACT, DROPOUT]),
    # In float32 rounding decided here whether an update of Adafactor's is clipped.
    ([*ADAFACTOR, *PIPELINE, *TENSOR, *DATA, "--training.global_batch_size", "32"], []),
]


def marked(cases: list[tuple[list[str], list[str]]], mark: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(*case, marks=mark) for case in cases]


@pytest.mark.parametrize(
    ("layout", "kinds"), [*QUICK, *marked(SAME, pytest.mark.slow), *marked(MORE_SAME, pytest.mark.exhaustive)]
)
def test_product_is_the_same(layout: list[str], kinds: list[str]) -> None:
    verdict = verify(layout, kinds=kinds)
    assert verdict.outcome == "same", verdict.first_difference
    assert verdict.blame is None and verdict.place is None


def cost(mutation: Prepare, layout: list[str], axis: str, row: str, _: str) -> int:
    """What the time grows with that a bug takes to be found: the processes of all runs, also for the axis and place."""
    degrees = {"--parallelism.data_parallel_shard_degree": 2}  # where a layout names none
    degrees |= {key: int(value) for key, value in zip(layout[::2], layout[1::2], strict=True) if "_degree" in key}
    processes = math.prod(degree for key, degree in degrees.items() if "expert" not in key)
    legs = 4 if kind_of(mutation, layout, axis, row) == RESUME else 1
    return processes * (legs * (1 if axis == "one_process" else 2) + (row in _LOCATED))


def cases_of_bugs() -> Iterator[Any]:
    """The parameters of each bug of a layout. Those are chosen, in two steps, that show most for what they cost.

    The others are marked. Compiling takes long, so no bug is chosen because it needs that.
    """
    bugs = [bug for bug in BUGS if bug[2] != "one_process" or bug[3] == Row.RUNS]
    types, places = {"float16", "bfloat16"}, ("the loss", "layers", "embedding", "position", "norm")
    shows = [
        {axis, row, *types & set(layout), *filter(place.startswith, places)} - {"compile"}
        for _, layout, axis, row, place in bugs
    ]
    missing, chosen = set[str]().union(*shows), set[int]()
    while missing:
        number = max(range(len(bugs)), key=lambda number: len(shows[number] & missing) / cost(*bugs[number]))
        chosen.add(number)
        missing -= shows[number]
    for number in sorted(chosen, key=lambda number: -cost(*bugs[number])):
        if shows[number] <= set[str]().union(*(shows[other] for other in chosen - {number})):
            chosen.remove(number)
    for number, (mutation, layout, axis, row, place) in enumerate(bugs):
        steps, marks = (2, []) if number in chosen else (STEPS, [pytest.mark.exhaustive])
        steps += "--checkpoint.async" in layout and number not in chosen  # so that a good step follows on a save
        yield pytest.param(mutation, layout, axis, row, place, steps, marks=marks, id=f"{mutation.__name__}-{axis}")


@pytest.mark.parametrize(("mutation", "layout", "axis", "row", "place", "steps"), list(cases_of_bugs()))
def test_bug_is_found_and_its_place_and_axis_named(
    mutation: Prepare, layout: list[str], axis: str, row: str, place: str, steps: int
) -> None:
    verdict = verify(layout, mutation, [kind_of(mutation, layout, axis, row)], steps=steps)
    first = verdict.first_difference
    assert verdict.outcome == "different" and first is not None and verdict.blame is not None
    assert verdict.blame.axis == axis, verdict.blame
    assert first.row == row, first
    assert (verdict.place or first.parameter).startswith(place), (verdict.place, first)


def test_running_out_of_time_is_no_difference() -> None:
    verdict = verify(DATA, runs.computes_for_ever, [EXACT], timeout=6)
    assert verdict.outcome == "undecided"
    assert verdict.reason == "the reference, on one process: it was not over in time"
    assert verdict.first_difference is None and verdict.blame is None


def test_processes_that_wait_while_gloo_spins_are_a_deadlock() -> None:
    verdict = verify(PIPELINE, gradients.receives_never_awaited, [EXACT], steps=2, patience=2.0)
    first = verdict.first_difference
    assert first is not None and (first.row, first.detail) == (Row.RUNS, WAITING), verdict
    assert verdict.blame is not None and verdict.blame.axis == "pipeline_parallel", verdict.blame


def test_training_that_diverges_on_one_process_is_no_difference() -> None:
    # Decay multiplies matrices by 1 - lr * weight_decay = -1e12 in each update: 26 pass float64's largest number.
    grows = ["--optimizer.lr", "1e6", "--optimizer.weight_decay", "1e6", "--lr_scheduler.decay", "constant"]
    verdict = verify([*grows, *DATA], kinds=[EXACT], steps=30)
    assert verdict.outcome == "undecided" and verdict.blame is None
    assert verdict.reason == ("one process alone trains to infinite or NaN numbers in float64; lower the learning rate")
