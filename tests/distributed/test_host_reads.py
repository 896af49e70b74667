"""A step that nothing looks at never reads a value of the device; what the host does with its numbers comes later."""

import json
from collections import Counter
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.launch import collect, trainer_of
from tests.distributed.layouts import pipeline, sizes, tensor, zero
from titan_like.metrics.record import StepRecord

QUIET = sizes(16, 2, 8, 7) | {"metrics.log_interval": 100, "checkpoint.enable": False}
QUIET |= {"model.overrides": {"num_layers": 2, "hidden_size": 32}}
EXPERTS = {
    "model.family": "moe",
    "training.dtype": "bfloat16",
    "model.overrides": {"num_layers": 2, "hidden_size": 32, "expert_ffn_hidden_size": 16, "balance": "bias"},
}
LAYOUTS = {
    "zero 0": zero(0),
    "zero 3": zero(3),
    "tensor, sequence": tensor(2, True),
    "pipeline": pipeline(),
    "pipeline, tied, zero bubble": pipeline(2, "zbv_zero_bubble")
    | {"model.overrides": {"num_layers": 4, "hidden_size": 32}},
    "float16": {"training.dtype": "float16", "training.micro_batch_size": 4},
    "experts": EXPERTS,
    "expert parallel": EXPERTS | {"parallelism.expert_parallel_degree": 2},
    "spikes": {"health.loss_spike_factor": 6.0, "health.loss_spike_window": 4},
}


# As docs/experts.md says, the host reads how many rows an all-to-all sends: of two layers and two microbatches.
EXPECTED = {"expert parallel": {"tolist": 2 * 2}}


class CountReads(TorchDispatchMode):
    """Counts the operators by which Python learns a value, and whole tensors that it reads."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()
        read = torch.Tensor.tolist
        self.patch = patch.object(torch.Tensor, "tolist", lambda tensor: self.seen.update(["tolist"]) or read(tensor))

    def __enter__(self):
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.stop()
        super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.nonzero):
            self.seen[str(func)] += 1
        return func(*args, **kwargs or {})


def count(rank, folder):
    found = {}
    for name, settings in LAYOUTS.items():
        trainer = trainer_of(folder, QUIET | settings)
        data = trainer.load_data()
        for _ in range(2):  # what is made once
            trainer.train_step(data)
        with CountReads() as reads:
            trainer.train_step(data)
        data.close()
        found[name] = dict(reads.seen)
    return found


@pytest.fixture(scope="module")
def reads(tmp_path_factory):
    """By rank and layout."""
    return collect(count, 2, tmp_path_factory.mktemp("host_reads"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_reads_nothing(reads, layout):
    assert [of_rank[layout] for of_rank in reads] == [EXPECTED.get(layout, {})] * 2


def train_whole(rank, folder, interval):
    """Train, with a NaN among the gradients of the fifth step."""
    own = {"metrics.log_interval": interval, "job.dump_folder": str(folder / f"{interval}")}
    trainer = trainer_of(folder, QUIET | own)
    complete = trainer._complete_gradients

    def spoil():
        complete()
        if trainer.state.step == 4:
            next(trainer.model.parameters()).grad.fill_(float("nan"))

    trainer._complete_gradients = spoil
    seen: list[StepRecord] = []
    note = trainer._log_step
    trainer._log_step = lambda record, is_last=False: (seen.append(record), note(record, is_last))
    trainer.train()
    weights = [parameter.detach().flatten()[:8].tolist() for parameter in trainer.model.parameters()]
    return {
        "records": [(r.step, r.loss, r.grad_norm, r.lr, r.consumed_samples, r.nan, r.skipped) for r in seen],
        "weights": weights,
        "skipped": trainer.state.skipped_steps,
        "times": [r.step_time_s for r in seen],
    }


def train_both(rank, folder):
    return [train_whole(rank, folder, interval) for interval in (1, 100)]


def test_steps_read_later_are_those_read_at_once(tmp_path):
    for at_once, later in collect(train_both, 2, tmp_path):
        assert [record[0] for record in later["records"]] == list(range(1, 8))
        assert str(later["records"]) == str(at_once["records"])  # as text: NaN is equal to NaN there
        assert later["weights"] == at_once["weights"]
        assert later["skipped"] == at_once["skipped"] == 1
        assert [record[0] for record in later["records"] if record[5]] == [5]
        assert min(later["times"]) > 0
    lines = [json.loads(line) for line in (tmp_path / "100" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 8))
