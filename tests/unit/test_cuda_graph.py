"""Training with CUDA graphs is the same, bit for bit. On a CPU, a tape of operators stands for a graph.

As a graph does, the tape repeats what ran when it was recorded on the same tensors, with new random numbers, and runs
no Python of the model. A recording leaves NaN in what it computes, because a graph's recording computes nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from titan_like.commands.verify import format_kind
from titan_like.config import load_config
from titan_like.config.load import edit
from titan_like.parallel import cuda_graph
from titan_like.parallel.layout import Layout
from titan_like.parallel.timeline import Timeline
from titan_like.planner.predict import predict
from titan_like.torch_private import TorchDispatchMode, tree_leaves
from titan_like.train.job import process_group
from titan_like.train.rules import resolve_settings
from titan_like.train.setup import prepare_run
from titan_like.train.trainer import Trainer
from titan_like.verify.compare import EXACT, SINGLE, Reference, combine
from titan_like.verify.observe import observe
from titan_like.verify.processes import Member
from titan_like.verify.reference import compute_reference
from titan_like.verify.shrink import Options, resolve, shrink
from titan_like.verify.verify import Verdict

SIZE = ["--training.micro_batch_size=2", "--training.seq_len=32", "--model.overrides.num_layers=2"]
BATCH = "--training.global_batch_size="
LLAMA = ["--job.config_file=debug_llama", *SIZE]
CASES = {
    "one microbatch": ["--job.config_file=debug_gpt", *SIZE, f"{BATCH}2", "--model.overrides.dropout=0.2"],
    "masked tokens": ["--job.config_file=debug_bert", *SIZE, f"{BATCH}4", "--model.overrides.dropout=0.2"],
    "spans": ["--job.config_file=debug_t5", *SIZE[:2], f"{BATCH}2", "--model.overrides.dropout=0.2"],
    "bfloat16, 3 microbatches": [*LLAMA, f"{BATCH}6", "--training.dtype=bfloat16"],
    "float16": [*LLAMA, f"{BATCH}4", "--training.dtype=float16", "--model.overrides.tied_embeddings=true"],
    "ramp-up": [*LLAMA, f"{BATCH}6", "--training.batch_size_rampup=[2, 2, 24]"],
}


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self.fresh: dict[int, torch.Tensor] = {}  # storage → the first tensor in it, of what the tape has made itself

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits"
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, found))
        inputs = {storage(x) for x in tensors((args, kwargs))} - self.fresh.keys()
        self.fresh = {storage(x): x for x in tensors(found) if storage(x) not in inputs} | self.fresh
        return found

    def poison(self) -> None:
        for tensor in self.fresh.values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, recorded in self.calls:
            for old, new in zip(tensors(recorded), tensors(func(*args, **kwargs)), strict=True):
                if storage(old) != storage(new):
                    old.copy_(new)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class TapeRecorder:
    log: list[str] = []  # noqa: RUF012  # of all recorders: what steps did

    def issue(self, work: Callable[[], None]) -> None:
        self.log.append("issue")
        work()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.log.append("record")
        with torch.random.fork_rng([]), Tape() as tape:  # recording draws no numbers
            work()
        with torch.no_grad():
            tape.poison()
        return lambda: (self.log.append("replay"), tape.replay())[0]


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    with process_group(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")):
        yield


def train(folder: Path, settings: list[str], steps: int, graphs: bool, between: Any = lambda *_: None) -> list[Any]:
    """Every step's loss and gradient norm, and the final weights. ``between(trainer, step)`` is called before steps."""
    always = ["--data.num_workers=0", "--job.deterministic=true", "--health.skip_nonfinite=true"]
    config = load_config([*settings, *always, f"--job.dump_folder={folder}"])
    run = prepare_run(resolve_settings(config, 1))
    tuning = replace(run.tuning, gradient_bytes=1 << 14)  # several units of copies, which backward passes could free
    trainer = Trainer(replace(run, config=edit(run.config, {"compile.cudagraphs": graphs}), tuning=tuning))
    data, figures = trainer.load_data(), list[Any]()
    for step in range(1, steps + 1):
        between(trainer, step)
        record = trainer.read_step(trainer.train_step(data))
        figures.append((record.loss, record.grad_norm))
    data.close()
    return [figures, [weight.detach().clone() for weight in trainer.model.parameters()]]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))


@pytest.fixture
def log(group: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(cuda_graph, "Recorder", TapeRecorder)
    TapeRecorder.log.clear()
    return TapeRecorder.log


def test_the_planner_leaves_the_host_out() -> None:
    """Before the other tests, because it makes a process group of its own."""
    settings = ["--job.config_file=debug_gpt", "--cluster.gpu=H100", "--cluster.nodes=1", "--cluster.gpus_per_node=1"]
    eager, graphs = (predict(load_config([*settings, f"--compile.cudagraphs={on}"])) for on in ("false", "true"))
    assert eager.is_host_bound and not graphs.is_host_bound and graphs.time.total < eager.time.total / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(settings, id=name, marks=[pytest.mark.exhaustive] * (name in ("one microbatch", "masked tokens")))
        for name, settings in CASES.items()
    ],
)
def test_training_is_the_same(tmp_path: Path, log: list[str], settings: list[str]) -> None:
    ramps = any("rampup" in setting for setting in settings)
    steps = 18 if ramps else 5
    found = train(tmp_path / "graphs", settings, steps, graphs=True)
    assert_equal(found, train(tmp_path / "none", settings, steps, graphs=False))
    shown = ["issue", "issue", "record", "replay"]
    assert log.count("record") == 3 if ramps else log == [*shown, "replay", "replay"]


@pytest.mark.slow
def test_what_happens_between_steps(tmp_path: Path, log: list[str]) -> None:
    """Validation, weights that are loaded or moved, spoiled gradients and a step whose passes are timed."""

    def between(trainer: Trainer, step: int) -> None:
        weights = list(trainer.model.parameters())
        with torch.no_grad():
            if step == 5:
                trainer.validator.validate()
                weights[1].mul_(1.5)
                trainer.model.mark_changed()
            if step == 7:
                weights[2].data = weights[2].clone()
        timeline = Timeline(trainer.run.device, torch.distributed.group.WORLD)
        trainer.pipeline.timeline = timeline if step == 6 else None

    settings = CASES["bfloat16, 3 microbatches"]
    found = train(tmp_path / "graphs", settings, 10, graphs=True, between=between)
    assert log == ["issue", "issue", "record", *["replay"] * 3, "issue", *["issue"] * 2, "record", *["replay"] * 2]
    assert_equal(found, train(tmp_path / "none", settings, 10, graphs=False, between=between))


@pytest.mark.slow
def test_progress_is_counted_and_host_waits_are_noticed(tmp_path: Path, log: list[str]) -> None:
    counts = []
    settings = CASES["one microbatch"]
    train(tmp_path, settings, 5, graphs=True, between=lambda trainer, _: counts.append(trainer.pipeline.num_actions))
    assert counts == [0, 2, 4, 8, 10]  # recording counts once, and so does its first launch
    with pytest.raises(AssertionError, match="the host waits"), Tape():
        torch.ones(1).item()


VERIFIED = {
    "gpt": ["--job.config_file=debug_gpt", f"{BATCH}16"],
    "llama": ["--job.config_file=debug_llama", f"{BATCH}4", "--training.micro_batch_size=4"],
    "t5": ["--job.config_file=debug_t5"],
}


def verdict_of(folder: Path, settings: list[str], kind: str) -> Verdict:
    """How a small run with graphs differs from the reference, which has none."""
    config = load_config([*settings, "--compile.cudagraphs=true", "--parallelism.data_parallel_shard_degree=1"])
    small, alone = shrink(config, resolve(config, 1), Options(4, on_gpus=True)), Member(0, 1, folder, 0, "cpu")
    reference = compute_reference(alone, small, [kind], folder / "reference.safetensors")
    assert isinstance(reference, Reference) and not TapeRecorder.log
    return Verdict("", Layout(), combine(reference, [[observe(alone, reference, small.config, kind)]]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [EXACT, pytest.param(SINGLE, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("settings", VERIFIED.values(), ids=VERIFIED)
def test_verify_finds_no_difference(tmp_path: Path, log: list[str], settings: list[str], kind: str) -> None:
    verdict = verdict_of(tmp_path, settings, kind)
    assert verdict.first_difference is None, verdict.first_difference
    assert log.count("record") == 1 and log.count("replay") > 3
    print(format_kind(verdict.checks, kind))


@pytest.mark.slow
def test_verify_finds_inputs_that_stay(tmp_path: Path, log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "copy_all_", lambda *_: None)
    first = verdict_of(tmp_path, VERIFIED["llama"], EXACT).first_difference
    assert first is not None and first.step == 4 and log.count("replay") > 1  # the graph was recorded in step 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_training_on_a_gpu_is_the_same(
    tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch, settings: list[str], compiles: bool
) -> None:
    records: list[Any] = []
    original = cuda_graph.Recorder.record
    monkeypatch.setattr(cuda_graph.Recorder, "record", lambda *given: (records.append(1), original(*given))[1])
    compared = partial(train, settings=[*settings, f"--compile.enable={str(compiles).lower()}"], steps=18)
    found = compared(tmp_path / "graphs", graphs=True, between=lambda t, step: step == 9 and t.validate())
    assert_equal(found, compared(tmp_path / "none", graphs=False, between=lambda t, step: step == 9 and t.validate()))
    assert records
