"""The verifier accepts what the product computes, and of a bug it names the axis that the bug is in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed import mutations
from titan_like.config import load_config
from titan_like.verify.processes import Prepare, Processes
from titan_like.verify.shrink import resolve, shrink
from titan_like.verify.verify import DROPOUT, EXACT, Verdict, Verifier

STEPS = 2
REPO = Path(__file__).parents[2]
GPT, LLAMA = (str(REPO / f"train_configs/debug_{family}.toml") for family in ("gpt", "llama"))
ONE = ["--parallelism.data_parallel_shard_degree", "1"]
PIPELINE = ["--parallelism.pipeline_parallel_degree", "2", *ONE]
DATA = ["--parallelism.data_parallel_shard_degree", "2"]
TENSOR = ["--parallelism.tensor_parallel_degree", "2", *ONE]
SEQUENCE = [*TENSOR, "--parallelism.sequence_parallel", "true"]
ZERO_3 = [*DATA, "--parallelism.zero_stage", "3"]
ZERO_1 = [*DATA, "--parallelism.zero_stage", "1"]
HSDP = [
    *["--parallelism.data_parallel_replicate_degree", "2", "--training.global_batch_size", "16"],
    *[*DATA, "--parallelism.zero_stage", "2"],
]
INTERLEAVED = [
    *["--parallelism.pipeline_schedule", "interleaved_1f1b", "--parallelism.virtual_stages_per_rank", "2"],
    *PIPELINE,
]
ZERO_BUBBLE = ["--parallelism.pipeline_schedule", "zbv_zero_bubble", "--training.global_batch_size", "32", *PIPELINE]
ACCUMULATION = ["--training.global_batch_size", "16", *ONE]
RECOMPUTATION = ["--activation_checkpoint.mode", "full", *ONE]
LLAMA_TENSOR = ["--job.config_file", LLAMA, "--parallelism.zero_stage", "0", *TENSOR]
LLAMA_SEQUENCE = [*LLAMA_TENSOR, "--parallelism.sequence_parallel", "true"]

SAMPLES, LOSS, LATER_LOSS = "samples, each exactly once", "loss of step 1", "loss of step 2"
GRADIENTS, VALIDATION, RUNS = "gradients of step 1", "validation loss", "the layout runs"
MASKS, RECOMPUTED = "dropout different where activations are", "dropout drawn again in recomputation"
BUGS = [
    (mutations.tied_tables_not_summed, PIPELINE, "pipeline_parallel", GRADIENTS),
    (mutations.norm_of_one_stage, PIPELINE, "pipeline_parallel", "losses and norms equal on all ranks"),
    (mutations.last_microbatch_dropped, PIPELINE, "pipeline_parallel", GRADIENTS),
    (mutations.last_stage_not_updated, PIPELINE, "pipeline_parallel", LATER_LOSS),
    (mutations.same_start_on_every_stage, PIPELINE, "pipeline_parallel", "initial weights"),
    (mutations.validation_without_last_microbatch, PIPELINE, "pipeline_parallel", VALIDATION),
    (mutations.gradient_never_sent, PIPELINE, "pipeline_parallel", RUNS),
    (mutations.middle_stages_swapped, INTERLEAVED, "pipeline_schedule", LOSS),
    (mutations.weight_products_of_one_microbatch_lost, ZERO_BUBBLE, "pipeline_schedule", GRADIENTS),
    (mutations.tokens_of_one_process, DATA, "data_parallel", LOSS),
    (mutations.gradients_averaged_over_data, DATA, "data_parallel", GRADIENTS),
    (mutations.crash_at_the_end, DATA, "data_parallel", "the layout ends"),
    (mutations.data_of_one_process_shifted, ZERO_3, "data_parallel", SAMPLES),
    (mutations.one_shard_not_updated, ZERO_1, "zero_stage", LATER_LOSS),
    (mutations.replicas_not_summed, HSDP, "replicas", GRADIENTS),
    (mutations.loss_times_microbatches, ACCUMULATION, "accumulation", GRADIENTS),
    (mutations.row_bias_added_by_each, TENSOR, "tensor_parallel", GRADIENTS),
    (mutations.softmax_of_own_vocabulary, TENSOR, "tensor_parallel", LOSS),
    (mutations.key_heads_of_the_next_group, LLAMA_TENSOR, "tensor_parallel", LOSS),
    (mutations.partial_gradients_not_summed, SEQUENCE, "sequence_parallel", GRADIENTS),
    (mutations.all_gathers_gradient_not_summed, SEQUENCE, "sequence_parallel", GRADIENTS),
    (mutations.positions_begin_anew_in_each_part, LLAMA_SEQUENCE, "sequence_parallel", LOSS),
    (mutations.same_dropout_everywhere, DATA, "data_parallel", MASKS),
    (mutations.same_dropout_everywhere, SEQUENCE, "sequence_parallel", MASKS),
    (mutations.same_dropout_everywhere, PIPELINE, "pipeline_parallel", MASKS),
    (mutations.same_dropout_in_all_heads, TENSOR, "tensor_parallel", MASKS),
    (mutations.dropout_drawn_anew_in_recomputation, RECOMPUTATION, "recompute", RECOMPUTED),
]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """One server of processes for all tests."""
    with Processes(tmp_path_factory.mktemp("verify"), timeout=120) as processes:
        yield processes


def verify(
    processes: Processes, layout: list[str], mutation: Prepare | None = None, kinds: list[str] | None = None
) -> Verdict:
    """Verify the debug model."""
    config = load_config(["--job.config_file", GPT, *layout])
    small = shrink(config, resolve(config, None), STEPS)
    verifier = Verifier(small, STEPS, processes, mutation)
    verifier.kinds, verifier.patience = kinds or verifier.kinds, 5.0
    return verifier.verify()


@pytest.mark.parametrize("layout", [PIPELINE, ZERO_3, SEQUENCE], ids=["pipeline", "zero_3", "sequence"])
def test_product_is_the_same(processes: Processes, layout: list[str]) -> None:
    verdict = verify(processes, layout)
    assert verdict.same, verdict.first_difference
    assert verdict.blame is None


@pytest.mark.parametrize(
    ("mutation", "layout", "axis", "row"), BUGS, ids=[f"{mutation.__name__}-{axis}" for mutation, _, axis, _ in BUGS]
)
def test_bug_is_found_and_its_axis_named(
    processes: Processes, mutation: Prepare, layout: list[str], axis: str, row: str
) -> None:
    kind = DROPOUT if row in (MASKS, RECOMPUTED) else EXACT  # one suffices, and is faster
    verdict = verify(processes, layout, mutation, [kind])
    assert not verdict.same
    assert verdict.blame is not None
    assert verdict.blame.axis == axis, verdict.blame
    assert verdict.first_difference is not None
    assert verdict.first_difference.name.removesuffix(f" ({EXACT})") == row, verdict.first_difference
