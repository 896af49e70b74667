"""`mfu_causal` counts the attention that the masks of all samples of the global batch leave, in every layout."""

import pytest
import torch

from tests.distributed.launch import collect, trainer_of
from tests.distributed.layouts import pipeline, sizes, tensor
from titan_like.verify.watch import steps_alone

PEAK = 989.4e12  # the data sheet of the H100, in bfloat16
HIDDEN, LAYERS, SEQ = 32, 4, 64
RUN = sizes(SEQ, 2, 8, 2) | {"cluster.gpu": "H100", "training.dtype": "bfloat16", "checkpoint.enable": False}
RUN |= {"model.overrides": {"num_layers": LAYERS, "hidden_size": HIDDEN}}
DOCUMENTS = {"data.reset_attention_mask": True}


def context(method):
    return {"parallelism.context_parallel_degree": 2, "parallelism.context_parallel_method": method}


LAYOUTS = {
    "data": DOCUMENTS,
    "prefixes": DOCUMENTS | {"data.prefix_lm": True},
    "tensor": DOCUMENTS | tensor(),
    "pipeline": DOCUMENTS | pipeline(),
    "zero bubble": DOCUMENTS | pipeline(2, "zbv_zero_bubble"),
    **{method: DOCUMENTS | context(method) for method in ("all_gather", "ulysses", "ring")},
    "no masks": {},
}


def measured(rank, folder):
    """By layout: FLOPs of the second step as `mfu_causal` has them, and elements of its samples' masks."""
    found = {}
    for name, settings in LAYOUTS.items():
        trainer = trainer_of(folder, RUN | {"data.paths": [str(folder / "documents.jsonl")]} | settings)
        record = steps_alone(trainer, 2)[1]
        flops = record.throughput.mfu_causal * record.step_time_s * 2 * PEAK
        found[name] = flops, sum(elements(trainer, index) for index in range(8, 16))
    return found


def elements(trainer, index):
    """Count the pairs of a query and a key in sample ``index``: of one document, and not after the query but for
    prefixes.
    """
    tokens, masks = trainer.run.datasets["train"][index][0], trainer.run.masks
    documents = torch.cat((torch.zeros(1), (tokens[:-1] == 256).cumsum(0)))  # the byte tokenizer's end of a document
    dense = documents[:, None] == documents
    seen = torch.ones_like(dense).tril()
    if masks.section.prefix_lm:
        ends = masks.over(trainer.run.datasets["train"])[index].document_mask.end
        seen |= torch.arange(SEQ) < ends[:, None]
    return int((dense & seen).sum())


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 30, (4000,), generator=generator).tolist()
    documents = "".join(f'{{"text": "{"x" * length}"}}\n' for length in lengths)
    (folder / "documents.jsonl").write_text(documents)
    return collect(measured, 2, folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_causal_flops_are_those_of_the_masks(counted, layout):
    for flops, pairs in [of_rank[layout] for of_rank in counted]:
        if layout == "no masks":
            pairs = 8 * SEQ * SEQ / 2
        products = 8 * SEQ * (LAYERS * 12 * HIDDEN**2 + HIDDEN * 384)  # the vocabulary is 258 tokens, padded
        assert flops == pytest.approx(6 * products + 12 * LAYERS * HIDDEN * pairs, rel=1e-9)
        assert layout == "no masks" or pairs < 8 * SEQ * 32
