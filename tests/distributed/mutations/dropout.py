"""Bugs in dropout: masks that are equal or differ where they must not, rates, scales."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.distributed.mutations import bug
from titan_like.models.transformer import Transformer
from titan_like.parallel import activation_checkpoint, apply, tensor_styles
from titan_like.parallel.model import ParallelModel
from titan_like.train import trainer
from titan_like.train.seeds import dropout_stream
from titan_like.train.trainer import Trainer
from titan_like.train.training_state import TrainingState

_DROPOUT = F.dropout


@bug(trainer, "dropout_stream")
def same_dropout_everywhere(*_: Any) -> Any:
    """All processes draw dropout from one stream."""
    return 0


@bug(tensor_styles.SplitHeads, "forward")
def same_dropout_in_all_heads(_: Any, self: Any, *inputs: torch.Tensor) -> torch.Tensor:
    """Tensor-parallel processes drop the same probabilities of attention, each in its own heads."""
    return super(tensor_styles.SplitHeads, self).forward(*inputs)


@bug(activation_checkpoint, "checkpoint")
def dropout_drawn_anew_in_recomputation(original: Any, *args: Any, **options: Any) -> Any:
    """Recomputation does not put the random generator back."""
    return original(*args, **options | {"preserve_rng_state": False})


@bug(tensor_styles.SplitHeads, "split")
def dropout_halved_in_split_attention(original: Any, module: Any, *mesh: Any) -> None:
    """Under tensor parallelism attention drops half as much."""
    module.dropout /= 2
    original(module, *mesh)


@bug(Transformer, "keep_stage")
def dropout_halved_in_later_stages(original: Any, self: Any, layers: range, is_first: bool, is_last: bool) -> None:
    """Stages after the first drop half as much."""
    original(self, layers, is_first, is_last)
    for layer in self.layers.values():
        layer.dropout = layer.dropout / (1 if is_first else 2)


@contextmanager
def dropout_scale_lost_in_split_sequences() -> Iterator[None]:
    """What dropout keeps is not scaled up where sequences are split."""
    apply_tensor_parallel, dropout, is_split = apply.apply_tensor_parallel, F.dropout, [False]

    def note(model: Any, mesh: Any, sequence_parallel: bool) -> None:
        is_split[0] = sequence_parallel
        apply_tensor_parallel(model, mesh, sequence_parallel)

    def without_scale(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        kept = dropout(x, p, training, inplace)
        return kept * (1 - p) if is_split[0] and training else kept

    with patch.object(apply, "apply_tensor_parallel", note), patch.object(F, "dropout", without_scale):
        yield


@bug(F, "dropout")
def dropout_scale_lost_in_a_half_type(original: Any, x: Any, p: float, training: bool = True, *more: Any) -> Any:
    """What dropout keeps of numbers in bfloat16 is not scaled up."""
    kept = original(x, p, training, *more)
    return kept * (1 - p) if training and x.dtype == torch.bfloat16 else kept


@contextmanager
def dropout_scale_lost_in_bfloat16() -> Iterator[None]:
    """Under sequence parallelism, what dropout keeps of numbers in bfloat16 is not scaled up."""
    with dropout_scale_lost_in_split_sequences():
        wrong = F.dropout

        def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
            kept = wrong(x, p, training, inplace)
            return kept if x.dtype == torch.bfloat16 else _DROPOUT(x, p, training, inplace)

        with patch.object(F, "dropout", dropout):
            yield


@bug(torch, "compile")
def compiled_layers_never_drop(original: Any, forward: Any, **options: Any) -> Any:
    """Layers are compiled as if for validation."""
    for part in forward.__self__.modules():
        part.dropout = 0.0
    return original(forward, **options)


@bug(trainer, "seed_step")
def seed_ignored(original: Any, _seed: int, *others: Any) -> None:
    """Dropout is drawn from the same random numbers whatever the seed is."""
    original(1234, *others)


@bug(trainer, "seed_step")
def seeds_of_steps_and_ranks_added_up(_: Any, seed: int, step: int, stream: int) -> None:
    """One rank draws in a step what its neighbour draws in the next, or with the next seed."""
    torch.manual_seed(seed + step + stream)


@bug(trainer, "seed_step")
def same_dropout_in_every_step(original: Any, seed: int, _step: int, stream: int) -> None:
    """Every step draws what the first drew."""
    original(seed, 1, stream)


@contextmanager
def random_state_restored_by_rank() -> Iterator[None]:
    """Generators are seeded once. Checkpoints hold their state by global rank, and it is restored by that number."""
    save, resume = TrainingState.save, TrainingState._resume

    def file(self: TrainingState) -> Path:
        return self.run.checkpoint_folder / f"rng-{self.step}-{dist.get_rank()}.pt"

    def save_too(self: TrainingState, is_last: bool = False) -> None:
        save(self, is_last)
        torch.save(torch.get_rng_state(), file(self))

    def restore_too(self: TrainingState, is_usable: Any) -> bool:
        resumed = resume(self, is_usable)
        if resumed and file(self).exists():
            torch.set_rng_state(torch.load(file(self), weights_only=True))
        return resumed

    with (
        patch.object(trainer, "seed_step", lambda *_: None),
        patch.object(TrainingState, "save", save_too),
        patch.object(TrainingState, "_resume", restore_too),
    ):
        yield


@bug(Trainer, "__init__")
def resumed_ranks_share_no_dropout(original: Any, self: Trainer, *args: Any, **options: Any) -> None:
    """In a resumed run each process draws its own dropout, also where tensor ranks hold the same activations."""
    original(self, *args, **options)
    if self.state.resumed is not None:
        self.dropout_stream = dist.get_rank()


@contextmanager
def seed_of_each_trainer() -> Iterator[None]:
    """A second run with the same seed draws other dropout."""
    runs = [0]

    def stream_anew(*given: Any) -> int:
        runs[0] += 1
        return dropout_stream(*given) + 1000 * runs[0]

    with patch.object(trainer, "dropout_stream", stream_anew):
        yield


@bug(ParallelModel, "train")
def validation_in_training_mode(original: Any, self: Any, mode: Any = True) -> Any:
    """Validation drops activations."""
    return original(self, True)


@bug(F, "dropout")
def activations_dropped_in_validation(original: Any, x: torch.Tensor, p: float, *_: Any, **options: Any) -> Any:
    """Layers drop activations in evaluation mode too, but no probabilities of attention."""
    return original(x, p, True, **options)
