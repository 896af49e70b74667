"""The verifier accepts what the product computes, and of a bug it names the axis that the bug is in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed import mutations
from titan_like.config import load_config
from titan_like.verify.processes import Prepare, Processes
from titan_like.verify.shrink import resolve, shrink
from titan_like.verify.verify import EXACT, Verdict, Verifier

STEPS = 2
CONFIG = "train_configs/debug_gpt.toml"
ONE = ["--parallelism.data_parallel_shard_degree", "1"]
PIPELINE = ["--parallelism.pipeline_parallel_degree", "2", *ONE]
DATA = ["--parallelism.data_parallel_shard_degree", "2"]
TENSOR = ["--parallelism.tensor_parallel_degree", "2", *ONE]
SEQUENCE = [*TENSOR, "--parallelism.sequence_parallel", "true"]
ZERO_3 = [*DATA, "--parallelism.zero_stage", "3"]
ACCUMULATION = ["--training.global_batch_size", "16", *ONE]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """One server of processes for all tests."""
    with Processes(tmp_path_factory.mktemp("verify"), timeout=120) as processes:
        yield processes


def verify(processes: Processes, layout: list[str], mutation: Prepare | None = None) -> Verdict:
    """Verify the debug model, with a mutation in float64 alone."""
    config = load_config(["--job.config_file", str(Path(__file__).parents[2] / CONFIG), *layout])
    small = shrink(config, resolve(config, None), STEPS)
    verifier = Verifier(small, STEPS, processes, mutation)
    if mutation is not None:
        verifier.kinds = [EXACT]
    return verifier.verify()


@pytest.mark.parametrize("layout", [PIPELINE, ZERO_3, SEQUENCE], ids=["pipeline", "zero_3", "sequence"])
def test_product_is_the_same(processes: Processes, layout: list[str]) -> None:
    verdict = verify(processes, layout)
    assert verdict.same, verdict.first_difference
    assert verdict.blame is None


@pytest.mark.parametrize(
    ("mutation", "layout", "axis", "row"),
    [
        (mutations.tied_tables_not_summed, PIPELINE, "pipeline_parallel", "gradients of step 1"),
        (mutations.norm_of_one_stage, PIPELINE, "pipeline_parallel", "losses and norms equal on all ranks"),
        (mutations.last_microbatch_dropped, PIPELINE, "pipeline_parallel", "gradients of step 1"),
        (mutations.last_stage_not_updated, PIPELINE, "pipeline_parallel", "loss of step 2"),
        (mutations.tokens_of_one_process, DATA, "data_parallel", "loss of step 1"),
        (mutations.data_of_one_process_shifted, ZERO_3, "data_parallel", "samples, each exactly once"),
        (mutations.loss_times_microbatches, ACCUMULATION, "accumulation", "gradients of step 1"),
        (mutations.row_bias_added_by_each, TENSOR, "tensor_parallel", "gradients of step 1"),
        (mutations.partial_gradients_not_summed, SEQUENCE, "sequence_parallel", "gradients of step 1"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_bug_is_found_and_its_axis_named(
    processes: Processes, mutation: Prepare, layout: list[str], axis: str, row: str
) -> None:
    verdict = verify(processes, layout, mutation)
    assert not verdict.same
    assert verdict.blame is not None
    assert verdict.blame.axis == axis, verdict.blame
    assert verdict.first_difference is not None
    assert verdict.first_difference.name == f"{row} ({EXACT})", verdict.first_difference
