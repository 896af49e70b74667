"""Host reads, collectives and state of Adafactor and Muon.

`test_layout_matrix` has their training, and `test_checkpoint_layouts` their checkpoints.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.launch import collect, trainer_of
from tests.distributed.layouts import sizes, tensor, with_rule, zero
from tests.distributed.test_host_reads import CountReads
from titan_like.checkpoint.loader import optimizer_tensors
from titan_like.optim.shards import local, matrices_here
from titan_like.optim.state_size import optimizer_state
from titan_like.train.trainer import Trainer

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {  # of four processes
    "zero 3 of 4": ("llama", zero(3)),
    "zero 1, tensor with SP": ("gpt", zero(1) | tensor(2, True)),
    "zero 3, experts on 2": ("moe", zero(3) | {"parallelism.expert_parallel_degree": 2}),
}
# Adafactor has an all-reduce of squares and one of updates, for the layers and for each of two tables, in each group.
# Tensor parallelism splits the first of GPT's tables, but not the second.
TABLES = 2  # llama: the embedding and the output; GPT: token and position embeddings
CALLS = {
    "adafactor zero 3 of 4": {"allreduce_": 2 * (1 + TABLES)},
    "adafactor zero 1, tensor with SP": {"allreduce_": 2 * (1 + TABLES) + 2 * 2},
    # ZeRO cuts experts on two of the processes, and everything else on four.
    "adafactor zero 3, experts on 2": {"allreduce_": 2 * (1 + TABLES) + 2},
    **{f"muon {name}": {"alltoall_base_": 2 + 2 * ("experts" in name)} for name in LAYOUTS},
}
RUN = sizes(16, 2, 8, 12) | {"metrics.log_interval": 100}


class CountUpdates(TorchDispatchMode):
    """Counts the collectives of the optimizer's update alone."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.inside, self.bytes, self.counts = False, 0, Counter[str]()
        trainer.state.optimizer.register_step_pre_hook(lambda *_: setattr(self, "inside", True))
        trainer.state.optimizer.register_step_post_hook(lambda *_: setattr(self, "inside", False))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and self.inside:
            name = func._schema.name.removeprefix("c10d::")
            self.counts[name] += 1
            handed_over = args[1] if name == "alltoall_base_" else args[0][0]
            self.bytes += handed_over.numel() * handed_over.element_size()
        return func(*args, **(kwargs or {}))


def watch_steps(rank: int, folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for name, (family, layout) in LAYOUTS.items():
        for rule in ("adafactor", "muon"):
            settings = RUN | with_rule(rule, family) | layout | {"lr_scheduler.warmup_steps": 0}
            trainer = trainer_of(folder, settings)
            data = trainer.load_data()
            for _ in range(2):
                trainer.train_step(data)
            with CountReads() as reads, CountUpdates(trainer) as counted:
                trainer.train_step(data)
            data.close()
            kept, traffic = optimizer_state(trainer.run.config.optimizer), trainer.state.optimizer.traffic()
            state = [
                local(one) for one in optimizer_tensors(trainer.model, trainer.state.optimizer).values() if one.ndim
            ]
            state = [value for value in state if value.shape != (3,)]  # Adafactor's means of each expert's matrix
            shapes = [(name, local(one).shape, matrices_here(one)) for name, one in trainer.model.named_parameters()]
            found[f"{rule} {name}"] = {
                "reads": dict(reads.seen),
                "calls": dict(counted.counts),
                "planned calls": sum(each.calls for each in traffic),
                "held": sum(value.numel() * value.element_size() for value in state),
                "planned state": sum(4 * kept.of(*each) for each in shapes),
                "bytes": counted.bytes,
                "planned bytes": sum(each.bytes for each in traffic),
            }
    return found


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """By rank and run."""
    return collect(watch_steps, 4, tmp_path_factory.mktemp("optimizers"))


@pytest.mark.parametrize("name", CALLS)
def test_an_update_sends_and_keeps_what_is_planned(watched: list[dict[str, dict[str, Any]]], name: str) -> None:
    ranks = [of_rank[name] for of_rank in watched]
    reads = {"tolist": 2 * (1 + 9)} if "experts" in name else {}  # of 2 layers: an exchange and the experts' products
    for one in ranks:
        assert one["reads"] == reads and one["calls"] == CALLS[name]
        assert sum(one["calls"].values()) == one["planned calls"] and one["held"] == one["planned state"]
        # Muon's owners send back what they own, which is about what each process has.
        assert "muon" in name or one["bytes"] == one["planned bytes"]
    assert sum(one["bytes"] for one in ranks) == sum(one["planned bytes"] for one in ranks)
