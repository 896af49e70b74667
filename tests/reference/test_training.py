"""The product on one process trains as its definition says, and every planted bug of one process shows here."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.distributed.bugs import (
    BERT,
    BUGS,
    DOCUMENTS,
    FLOAT8_EXPERTS,
    FLOAT16,
    GPT,
    LATENT,
    LLAMA_MASKS,
    MOE,
    ONE,
    PAIRS,
    RACE,
    RAMPUP,
    T5,
    Z_LOSS,
    kind_of,
)
from tests.distributed.mutations import dropout, experts, gradients, runs, updates
from tests.float64 import bound
from tests.reference.training import train_by_definition
from tests.unit import test_compute_copies, test_schedule
from titan_like.config import load_config
from titan_like.models.layers import interval_attention
from titan_like.parallel.axes import on_one_process
from titan_like.parallel.layout import Layout
from titan_like.train import trainer as trainer_module
from titan_like.train.job import process_group
from titan_like.train.rules import resolve_settings
from titan_like.train.setup import prepare_run
from titan_like.train.trainer import Trainer
from titan_like.verify.compare import DROPOUT, EXACT, Check, Reference, Row, combine
from titan_like.verify.observe import observe, observe_dropout
from titan_like.verify.processes import Member, Prepare
from titan_like.verify.reference import compute_reference
from titan_like.verify.shrink import Options, resolve, shrink
from titan_like.verify.verify import Verdict
from titan_like.verify.watch import Watch, steps_alone

BFLOAT16 = [*ONE, "--training.dtype", "bfloat16"]
SAME = {
    "gpt": ([*DOCUMENTS, *ONE], [EXACT, "float32"]),
    "llama": ([*LLAMA_MASKS, *RAMPUP], [EXACT, "float32"]),
    "bert": ([*BERT, *ONE], [EXACT]),
    "pairs": ([*PAIRS, *BFLOAT16], [EXACT, "bfloat16"]),
    "t5": ([*T5, *BFLOAT16], [EXACT, "bfloat16"]),
    "race": ([*RACE, *ONE], [EXACT]),
    "latent attention and two tokens": ([*LATENT, *ONE], [EXACT]),
    "experts and their losses": ([*MOE, *Z_LOSS, *ONE, "--lr_scheduler.decay", "wsd"], [EXACT]),
    "experts in float8": ([*MOE, *FLOAT8_EXPERTS, "--float8.recipe", "rowwise", *ONE], [EXACT]),
    "float16": (FLOAT16, ["float16"]),
    "float16 without clipping": ([*FLOAT16, "--training.max_norm", "0"], ["float16"]),
}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with process_group(torch.device("cpu")):
        yield


def member() -> Member:
    return Member(0, 1, Path(mkdtemp(prefix="definition-")), 0, "cpu")


@cache
def defined(settings: tuple[str, ...], kind: str) -> Reference:
    """What the definitions make of a run on one process."""
    config = load_config(["--job.config_file", GPT, *settings])
    small = shrink(config, resolve(config, None), Options(3))
    alone = member()
    made = compute_reference(alone, small, [kind], alone.folder / "reference.safetensors", train_by_definition)
    assert isinstance(made, Reference), made
    return made


def problem_of(settings: list[str], kind: str, bug: Prepare | None = None) -> Check | None:
    """How the product on one process differs from its definition."""
    reference = defined(tuple(settings), kind)
    config, observed = on_one_process(reference.small.config), observe_dropout if kind == DROPOUT else observe
    # Attention takes several blocks, of a query each in the longer sequences. RACE has many samples of four sequences.
    blocks = patch.object(interval_attention, "BLOCK_BYTES", 2048 if config.data.dataset != "race" else 32768)
    with bug() if bug is not None else nullcontext(), blocks:
        checks = combine(reference, [[observed(member(), reference, config, kind)]])
        return Verdict("", Layout.of(config.parallelism), checks).first_difference


SLOW = ("race", "latent attention and two tokens", "experts in float8", "float16")


def cases() -> Iterator[Any]:
    """Every case; those of 16 bits, and the ones that take longest, are left out of the quick tests."""
    for name, (settings, kinds) in SAME.items():
        for kind in kinds:
            is_slow = kind in ("bfloat16", "float32") or name in SLOW
            yield pytest.param(settings, kind, marks=[pytest.mark.slow] * is_slow)


@pytest.mark.parametrize(("settings", "kind"), list(cases()))
def test_product_is_as_defined(settings: list[str], kind: str) -> None:
    assert problem_of(settings, kind) is None


def cases_of_bugs() -> Iterator[Any]:
    """Every bug of one process that is not found before the reference is. The first of each row always runs."""
    seen = set[Row]()
    for bug, settings, axis, row, _ in BUGS:
        if axis == "one_process" and row != Row.RUNS:
            yield pytest.param(bug, settings, row, id=bug.__name__, marks=[pytest.mark.exhaustive] * (row in seen))
            seen.add(row)


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "settings", "row"), list(cases_of_bugs()))
def test_bugs_are_found(bug: Prepare, settings: list[str], row: Row) -> None:
    found = problem_of(settings, kind_of(bug, settings, "one_process", row), bug)
    assert found is not None and found.row == row, found


def _run(*settings: str, steps: int = 2, begins: Callable[[Trainer], object] = lambda _: None) -> Trainer:
    """A short run on one process, without a group of others."""
    folder = mkdtemp(prefix="bugs-")
    given = ["--job.dump_folder", folder, "--training.steps", str(steps), "--evaluation.interval", "0"]
    sizes = ["--training.global_batch_size", "4", "--training.micro_batch_size", "4", "--training.seq_len", "16"]
    config = load_config(["--job.config_file", GPT, "--lr_scheduler.warmup_steps", "0", *given, *sizes, *settings])
    trainer = Trainer(prepare_run(resolve_settings(config)))
    begins(trainer)
    trainer.train()
    return trainer


def _loop_takes_all_steps() -> None:
    assert _run().state.step == 2


def _loss_scale_begins_large() -> None:
    _run(*FLOAT16, begins=lambda trainer: check(trainer.state.loss_scale == 2.0**16))


def _validation_drops_nothing() -> None:
    _run(
        "--model.overrides.dropout",
        "0.5",
        begins=lambda trainer: check(trainer.validator.validate() == trainer.validator.validate()),
    )


def _small_gradients_stay() -> None:
    """With SGD, whose first step is the learning rate times the gradient."""

    def begin(trainer: Trainer) -> None:
        before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
        watch = Watch()
        watch.attach(trainer)
        trainer.observer = watch
        steps_alone(trainer, 1)
        moved = [before[name] - dict(trainer.model.named_parameters())[name] for name, _ in watch.gradients]
        whole = torch.cat([gradient.flatten() for _, gradient in watch.gradients]).norm()
        check(abs(torch.cat([move.flatten() for move in moved]).norm() / whole - 1e-3) < bound())

    sgd = ["--optimizer.name", "sgd", "--optimizer.lr", "1e-3", "--optimizer.weight_decay", "0"]
    sgd += ["--lr_scheduler.decay", "constant"]
    _run(*sgd, "--training.max_norm", "1e4", "--training.dtype", "float64", begins=begin)


def check(holds: object) -> None:
    """Assert in an expression."""
    assert holds


def _biases_follow_loads() -> None:
    """Loads above, below and exactly at the mean."""
    bias = ["--model.overrides.balance", "bias", "--training.steps", "1"]
    balance = _run("--job.config_file", MOE[1], *bias).experts
    counts, rate = torch.full_like(balance.counts, 3), balance.routers[0].config.bias_update_rate
    counts[:, 0], counts[:, -1] = 5, 1
    wanted = balance.bias.clone()
    wanted[:, 0] -= rate
    wanted[:, -1] += rate
    balance.counts.copy_(counts)
    balance.finish(torch.tensor(False))
    torch.testing.assert_close(balance.bias, wanted)


def _seeds_differ() -> None:
    """Every seed, step and stream draws its own random numbers."""
    drawn = set()
    for numbers in product(range(3), repeat=3):
        trainer_module.seed_step(*numbers)
        drawn.add(torch.rand(1, dtype=torch.float64).item())
    assert len(drawn) == 27


def _validation_takes_the_latest_weights() -> None:
    """It computes with copies in bfloat16. Twice the weights, because some have moved by less than that type shows."""
    trainer, copies = _run("--training.dtype", "bfloat16"), 0
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(2)
    trainer.validator.validate()
    for module in trainer.model.stages[0].module.modules():
        for name, master in module.named_parameters(recurse=False):
            assert torch.equal(vars(module)[name], master.bfloat16())
            copies += 1
    assert copies


_COPIES = partial(test_compute_copies.test_gradients_are_those_of_casts, torch.bfloat16, 1 << 20)

# Bugs that small runs of this kind do not show, with the test that does.
BY_TESTS: list[tuple[Prepare, Callable[[], object]]] = [
    (runs.loop_ends_a_step_early, _loop_takes_all_steps),
    (updates.loss_scale_begins_at_1, _loss_scale_begins_large),
    (
        updates.loss_scale_never_grows,
        test_schedule.test_loss_scale_halves_on_overflow_and_doubles_after_a_quiet_interval,
    ),
    (updates.small_gradients_scaled_up, _small_gradients_stay),
    (dropout.validation_in_training_mode, _validation_drops_nothing),
    (experts.mean_loads_count_as_small, _biases_follow_loads),
    (gradients.validation_an_update_behind, _validation_takes_the_latest_weights),
    (dropout.seeds_of_steps_and_ranks_added_up, _seeds_differ),
    (dropout.seed_ignored, _seeds_differ),
    (
        gradients.gradients_summed_in_bfloat16,
        partial(test_compute_copies.test_gradients_are_those_of_casts, torch.bfloat16, 1 << 20),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "test"), BY_TESTS, ids=lambda value: getattr(value, "__name__", ""))
def test_bugs_are_found_by_other_tests(bug: Prepare, test: Callable[[], Any]) -> None:
    test()
    with bug(), pytest.raises(AssertionError):
        test()
