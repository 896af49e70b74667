"""Steps from a folder of transformers, in parallel layouts, are a plain loop over its own model."""

from pathlib import Path

import pytest
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

from tests.distributed.launch import base_config, collect
from tests.float64 import bound, exact_rope, in_float64
from tests.unit.plain_loop import plain_adamw
from tests.unit.test_decoder_hugging_face import CASES, exact_model, random_folder
from titan_like.config.load import load_config
from titan_like.models.registry import model_config
from titan_like.train.microbatches import take_microbatches
from titan_like.train.rules import resolve_settings
from titan_like.train.setup import prepare_run
from titan_like.train.trainer import Trainer
from titan_like.verify.watch import steps_alone

BATCH, MICRO_BATCH = 4, 2
TENSOR = ["--parallelism.tensor_parallel_degree=2", "--parallelism.sequence_parallel=true"]
LAYOUTS = {
    "tensor 2, pipeline 2": [*TENSOR, "--parallelism.pipeline_parallel_degree=2"],
    "context 2, ZeRO 3": ["--parallelism.context_parallel_degree=2", "--parallelism.zero_stage=3"],
}
EXPERT_LAYOUTS = {"experts 2, tensor 2": [*TENSOR, "--parallelism.expert_parallel_degree=2"]}


def arguments(folder: Path, steps: int) -> list[str]:
    """Settings of a run over made-up text, from a folder that has no tokenizer."""
    text = base_config(folder.parent, {}).data.paths[0]
    return [
        f"--model.from={folder}", f"--job.dump_folder={folder.parent}/run", "--data.dataset=text",
        f'--data.paths=["{text}"]', "--data.tokenizer=byte", "--training.seq_len=48", f"--training.steps={steps}",
        f"--training.micro_batch_size={MICRO_BATCH}", f"--training.global_batch_size={BATCH}", "--optimizer.lr=1e-3",
        "--optimizer.weight_decay=0", "--training.max_norm=1", "--lr_scheduler.decay=constant",
        "--lr_scheduler.warmup_steps=0", "--evaluation.interval=0", "--training.dtype=float64",
    ]  # fmt: skip


@exact_rope()
def train(rank: int, layouts: dict[str, list[str]]) -> dict[str, list[float]]:
    """The losses in each layout."""
    trainers = {name: Trainer(prepare_run(resolve_settings(load_config(of_one)))) for name, of_one in layouts.items()}
    return {
        name: [record.loss for record in steps_alone(trainer, trainer.state.total_steps)]
        for name, trainer in trainers.items()
    }


def plain_loop(rank: int, folder: Path, settings: list[str]) -> list[float]:
    """The losses of the model of transformers on the run's batches."""
    model = exact_model(folder).train()
    config = load_config(settings)
    trainer, losses = Trainer(prepare_run(resolve_settings(config))), list[float]()
    optimizer = plain_adamw(model, config.optimizer)
    data = trainer.load_data()
    for _ in range(trainer.state.total_steps):
        batches = take_microbatches(data, BATCH // MICRO_BATCH, trainer.cp_shard, trainer.run.device, trainer.observer)
        total = 0.0
        for batch in batches:
            with in_float64():
                logits = model(batch.tokens, use_cache=False).logits.flatten(0, 1)
            loss = F.cross_entropy(logits, batch.labels.flatten(), reduction="sum") / (BATCH * batch.labels.shape[1])
            loss.backward()
            total += loss.item()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    data.close()
    return losses


IN_CI = pytest.param("deepseek_v3", 5)


@pytest.mark.parametrize(
    ("name", "steps"), [IN_CI, *(pytest.param(name, 30, marks=pytest.mark.exhaustive) for name in CASES)]
)
def test_training_from_a_folder_is_a_plain_loop(name: str, steps: int, tmp_path: Path) -> None:
    model_type, fields = CASES[name]
    # Two, or a multiple, for two ranks.
    even = {"num_key_value_heads": 2} if fields.get("num_key_value_heads") == 1 else {}
    even |= {"num_local_experts": 4} if "num_local_experts" in fields else {}
    random_folder(model_type, fields | even | {"vocab_size": 257}, tmp_path / "hf")
    settings = arguments(tmp_path / "hf", steps)
    shape = model_config(load_config(settings).model)
    layouts = LAYOUTS
    if getattr(shape, "num_experts", 0):
        layouts = EXPERT_LAYOUTS | LAYOUTS
    expected = collect(plain_loop, 1, tmp_path / "hf", settings)[0]
    found = collect(train, 4, {name: [*settings, *layout] for name, layout in layouts.items()})[0]
    for layout, losses in found.items():
        worst = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
        print(f"{name}, {layout}: {worst:.1e}, loss {losses[0]:.4f} to {losses[-1]:.4f}")
        assert worst <= bound(4096 * steps), layout
