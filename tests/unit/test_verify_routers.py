"""In 16-bit dtypes `verify` replays the choice of experts: what rounding tips is no difference, wrong scores are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.distributed.bugs import GPT, MOE, ONE
from titan_like.config import load_config
from titan_like.models.layers.experts import Router
from titan_like.parallel.axes import on_one_process
from titan_like.parallel.layout import Layout
from titan_like.train.job import process_group
from titan_like.verify.compare import Check, Reference, Row, combine
from titan_like.verify.observe import observe
from titan_like.verify.processes import Member
from titan_like.verify.reference import compute_reference
from titan_like.verify.shrink import Options, resolve, shrink
from titan_like.verify.verify import Verdict

# Small weights: all scores of a token nearly tie. Two microbatches are recomputed.
SETTINGS = [*MOE, *ONE, "--training.dtype", "bfloat16", "--model.overrides.init_std", "0.002"]
SETTINGS += ["--training.global_batch_size", "8", "--activation_checkpoint.mode", "full"]

Choose = Callable[[Router, torch.Tensor], torch.Tensor]
CHOOSE: Choose = Router.choose


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with process_group(torch.device("cpu")):
        yield


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("reference")
    config = load_config(["--job.config_file", GPT, *SETTINGS])
    small = shrink(config, resolve(config, 1), Options(2))
    made = compute_reference(Member(0, 1, folder, 0, "cpu"), small, ["bfloat16"], folder / "reference.safetensors")
    assert isinstance(made, Reference), made
    return made


def checks_of(reference: Reference, folder: Path, choose: Choose) -> list[Check]:
    """The checks of a run whose routers choose in this way."""
    config = reference.small.config
    assert on_one_process(config) != config  # it recomputes
    with patch.object(Router, "choose", choose):
        return combine(reference, [[observe(Member(0, 1, folder, 0, "cpu"), reference, config, "bfloat16")]])


def noisy(router: Router, scores: torch.Tensor) -> torch.Tensor:
    """Rounds scores to bfloat16, but none that are exact."""
    return CHOOSE(router, scores if scores.dtype == torch.float64 else scores.bfloat16())


def without_the_first(router: Router, scores: torch.Tensor) -> torch.Tensor:
    """Sends no token to the first expert."""
    return CHOOSE(router, scores.index_fill(1, torch.tensor([0]), -1))


def test_experts_that_rounding_chooses_are_no_difference(reference: Reference, tmp_path: Path) -> None:
    checks = checks_of(reference, tmp_path, noisy)
    assert all(check.ok for check in checks), Verdict("", Layout(), checks).first_difference
    rows = {(check.row, check.step) for check in checks}
    assert {(row, step) for row in (Row.SCORES, Row.CHOICE) for step in (1, 2, 3)} <= rows
    assert (Row.FIGURES, 1) in rows
    # The farthest gradient of two draws is a few roundings away, times the margin, and no token's share of the norm.
    assert all(check.allowed < 0.25 for check in checks if check.row == Row.GRADIENT)


def test_another_way_of_choosing_is_found(reference: Reference, tmp_path: Path) -> None:
    first = Verdict("", Layout(), checks_of(reference, tmp_path, without_the_first)).first_difference
    assert first is not None and (first.row, first.step, first.kind) == (Row.CHOICE, 1, "bfloat16"), first
    assert first.parameter == "layers.0.mlp.router"


def test_wrong_scores_are_found(reference: Reference, tmp_path: Path) -> None:
    """Where the bias for the choice, or any score, is off by more than rounding."""
    linear = Router.linear

    def larger(router: Router) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight, bias = linear(router)
        return weight * torch.linspace(1, 30, len(weight))[:, None].to(weight.dtype), bias

    with patch.object(Router, "linear", larger):
        first = Verdict("", Layout(), checks_of(reference, tmp_path, CHOOSE)).first_difference
    assert first is not None and (first.row, first.step) == (Row.SCORES, 1), first
