"""Every pair of features of decoders and of their training, against the definitions of tests/reference, in float64.

A covering array has each pair of values of two features in at least one of its rows. Each row is a tiny model, which
the trainer updates twice. ``pytest -m exhaustive`` trains random rows: PAIRS_SEED is the first one's seed, and
PAIRS_ROWS their number.
"""

import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn

from tests.distributed.launch import base_config
from tests.float64 import bound, exact_rope
from tests.reference.decoder import Output, Sample, decode
from tests.reference.linear import lora_linear
from tests.reference.optimizers import PlainOptimizer
from tests.reference.training import learning_rate
from tests.unit.decoder_cases import ALL, FEATURES, LEFT_OUT, SIZES, Row, cover, fields_of, random_row, settings_of
from titan_like.config.load import edit
from titan_like.models.batch import Batch
from titan_like.models.decoder.config import DecoderConfig
from titan_like.models.decoder.model import Decoder
from titan_like.models.layers.cross_entropy import IGNORED_LABEL
from titan_like.models.layers.experts import Router
from titan_like.models.layers.key_ranges import KeyRanges
from titan_like.models.small import small_fields
from titan_like.parallel import lora
from titan_like.parallel.mesh import build_mesh
from titan_like.train import trainer as trainer_module
from titan_like.train.job import process_group
from titan_like.train.rules import resolve_settings
from titan_like.train.setup import prepare_run
from titan_like.train.trainer import Trainer
from titan_like.verify.watch import Watch

BATCH, SEQ_LEN, STEPS = 2, 11, 2
COMMON: dict[str, Any] = {
    "model.family": "decoder", "model.flavor": "row", "training.dtype": "float64", "training.seq_len": SEQ_LEN,
    "training.global_batch_size": BATCH, "training.steps": 5, "optimizer.lr": 0.05, "evaluation.interval": 0,
}  # fmt: skip
# Linear attention, and a layer with an output gate; chunks end within documents and with them.
DELTA = {"key_heads": 2, "value_heads": 4, "key_head_size": 3, "value_head_size": 5, "conv_size": 3, "chunk_size": 4}
HYBRID: dict[str, Any] = {
    "heads": {"num_attention_heads": 4, "num_kv_heads": 2},
    "layers": {
        "num_layers": 3, "layer_pattern": ["linear", "linear", "full"],
        "kinds": {
            "linear": {"mixer": "gated_delta_net", "rope_theta": 0.0, "options": DELTA},
            "full": {"options": {"gate": True}},
        },
    },
}  # fmt: skip
KIMI: dict[str, Any] = {
    "heads": {"num_attention_heads": 4, "num_kv_heads": 2},
    "layers": {
        "num_layers": 2, "layer_pattern": ["linear", "full"],
        "kinds": {
            "linear": {
                "mixer": "kimi_delta", "rope_theta": 0.0,
                "options": {"heads": 3, "head_size": 5, "conv_size": 3, "chunk_size": 4},
            },
            "full": {"rope_theta": 0.0},
        },
    },
}  # fmt: skip
MAMBA = {"heads": 6, "head_size": 3, "groups": 3, "state_size": 4, "conv_size": 3, "min_step": 0.5, "chunk_size": 4}
ONE_GROUP = MAMBA | {"groups": 1, "min_step": 0.0, "bias": True, "conv_bias": False}
STATE_SPACE: dict[str, Any] = {  # layers of one block among them
    "heads": {"num_attention_heads": 4, "num_kv_heads": 2},
    "layers": {
        "num_layers": 4, "layer_pattern": ["mamba", "mlp", "both", "attention"],
        "kinds": {
            "mamba": {"mixer": "mamba2", "rope_theta": 0.0, "options": MAMBA, "parts": "mixer"},
            "mlp": {"rope_theta": 0.0, "parts": "mlp"},
            "both": {"mixer": "mamba2", "rope_theta": 0.0, "options": ONE_GROUP},
            "attention": {"parts": "mixer"},
        },
    },
}  # fmt: skip
FIRST_SEED = int(os.environ.get("PAIRS_SEED", random.randrange(10**6)))
RANDOM_ROWS = int(os.environ.get("PAIRS_ROWS", "200"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One process group and its mesh for all rows."""
    with process_group(torch.device("cpu")), patch.object(trainer_module, "build_mesh", cache(build_mesh)):
        yield tmp_path_factory.mktemp("pairs")


def rows() -> list[Row]:
    # Only a Llama's files have queries, keys and values apart, so that each has an adapter of its own.
    llama = {name: options[name == "lora"] for name, options in ALL.items()}
    documents = ALL["documents"][1:]
    hybrids = [llama | mixers | {"lora": {}, "documents": one} for mixers in (HYBRID, KIMI) for one in documents]
    blocks = [{"block": {"block": name}} for name in ("pre", "post", "sandwich")]
    state_space = [llama | STATE_SPACE | {"lora": {}, "documents": documents[0]} | block for block in blocks]
    return [*cover(), llama, *hybrids, *state_space, state_space[0] | {"experts": ALL["experts"][3]}]


def batch_of(row: Row, step: int, generator: torch.Generator) -> tuple[Batch, Sample]:
    """The same sequences for the product and for the definition."""

    def draw() -> torch.Tensor:
        return torch.randint(0, SIZES["vocab_size"], (BATCH, SEQ_LEN), generator=generator)

    tokens, nexts, labels, next_labels = draw(), draw(), draw(), draw()
    which = row["labels"]["labels"]
    if which != "all":
        labels[0, 3], next_labels[1, -2:], next_labels[0, 3] = IGNORED_LABEL, IGNORED_LABEL, IGNORED_LABEL
    if which == "answers":
        labels[0], labels[1, :7], next_labels[0], next_labels[1, :6] = (IGNORED_LABEL,) * 4
    if which == "none at first" and step == 1:
        labels[:] = IGNORED_LABEL
    if which == "none ahead at first" and step == 1:
        next_labels[:] = IGNORED_LABEL
    documents, starts = row["documents"], torch.zeros(BATCH, SEQ_LEN, dtype=torch.int64)
    if documents.get("packed"):
        starts[0, 4:], starts[1, 1:], starts[1, 7:] = 4, 1, 7
    order = torch.arange(SEQ_LEN).expand(BATCH, -1)
    positions = order - starts if documents.get("resets") else order
    batch = Batch(tokens, labels, positions, KeyRanges(starts, order + 1) if documents.get("packed") else None)
    if row["mtp_layers"]:
        batch = batch._replace(next_tokens=nexts, next_labels=next_labels)
    return batch, Sample(tokens, starts, positions, labels, nexts, next_labels)


@torch.no_grad()
def randomise(model: Decoder, generator: torch.Generator) -> None:
    """Make every parameter and router's state random, the ones that begin as 0 or 1 too."""
    for name, parameter in model.named_parameters():
        offset = 1.0 if "norm" in name and name.endswith("weight") and not model.config.norm_offset else 0.0
        is_clamped = model.config.activation == "clamped_swiglu" and name.endswith(("gate.weight", "up.weight"))
        std = 1.8 if is_clamped else 0.3  # so that a third of what enters clamped SwiGLU is clamped
        parameter.copy_(offset + std * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    for module in model.modules():
        if isinstance(module, Router):
            module.load.copy_(torch.rand(module.load.shape, generator=generator))
            module.load.div_(module.load.sum())
            if module.bias is not None:
                # Most scores with it are negative: those of groups that are left out must not be larger.
                module.bias.copy_(torch.randn(module.bias.shape, generator=generator) - 2)


class Dropped:
    """Dropout of adapters' inputs by masks of its own, which it keeps by the name of the linear layer."""

    def __init__(self, adapted: Mapping[str, nn.Module], generator: torch.Generator) -> None:
        self.masks: dict[str, list[torch.Tensor]] = {}  # of each microbatch
        self.generator, self.name = generator, ""
        self.rates: set[float] = set()
        for name, module in adapted.items():
            module.register_forward_pre_hook(partial(self.begin, name))

    def begin(self, name: str, *_: Any) -> None:
        self.name = name

    def dropout(self, x: torch.Tensor, p: float) -> torch.Tensor:
        self.rates.add(p)
        keeps = torch.rand(x.shape, generator=self.generator) >= p
        self.masks.setdefault(self.name, []).append(keeps.double() / (1 - p))
        return x * self.masks[self.name][-1]


class Trained:
    """A row's trainer, and its definition, which begins each step with the trainer's weights."""

    def __init__(self, row: Row, seed: int, folder: Path) -> None:
        self.row, self.watch, self.generator = row, Watch(), torch.Generator().manual_seed(seed)
        fields, settings = fields_of(row), COMMON | settings_of(row)
        if row["lora"] and fields.get("balance") == "bias":
            fields["bias_update_rate"] = 0.0  # adapters go with frozen routers
        settings["model.flavors"] = {"row": DecoderConfig(**fields).model_dump()}
        run = prepare_run(resolve_settings(base_config(folder, settings)))
        run = replace(run, config=edit(run.config, row["lora"]))  # they would need a file with weights
        self.trainer = Trainer(run, observer=self.watch)
        self.model: Any = self.trainer.model.stages[0].module
        self.fields, self.config = self.model.config.model_dump(), self.trainer.config
        randomise(self.model, self.generator)
        modules = dict(self.model.named_modules())
        self.adapted = {name: module for name, module in modules.items() if isinstance(module, lora.AdaptedLinear)}
        self.routers = {name: module for name, module in modules.items() if isinstance(module, Router)}
        self.names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        stacks = {name: self.fields["num_experts"] for name in self.names if ".experts." in name and "bias" not in name}
        max_norm = self.config.training.max_norm
        self.optimizer = PlainOptimizer(self.config.optimizer.model_dump(), stacks, max_norm)
        if self.config.lora.rank:  # routers are frozen, so nothing balances them
            self.fields |= {"balance_coefficient": 0.0, "z_loss_coefficient": 0.0}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def defined(self, weights: Mapping[str, torch.Tensor], sample: Sample, masks: Mapping[str, torch.Tensor]) -> Output:
        section = self.config.lora
        if not section.rank:
            return decode(self.fields, weights, sample)
        each = {name: list(module.adapter.rows) for name, module in self.adapted.items()}
        groups = {name: rows for name, rows in each.items() if len(rows) > 1}
        linear = Mock(side_effect=lora_linear(weights, section.alpha / section.rank, groups, masks))
        output, names = decode(self.fields, weights, sample, linear), {call.args[0] for call in linear.mock_calls}
        wanted = {name for name in names if not section.modules or name.split(".")[-1] in section.modules}
        assert self.adapted.keys() == wanted, "linear layers with adapters"
        return output

    def compare_step(self, step: int) -> None:
        """Logits, losses, routers' statistics, every gradient, the norm and every weight after the update."""
        batch, sample = batch_of(self.row, step, self.generator)
        weights = self.weights()
        trained = {name: weights[name].requires_grad_() for name in self.names}
        logits = self.model.eval()(batch._replace(next_tokens=None, next_labels=None))
        self.model.train()
        dropped = Dropped(self.adapted, self.generator)
        pieces = batch_pieces(batch, self.config.training.micro_batch_size)
        with patch.object(lora.F, "dropout", dropped.dropout):
            record = self.trainer.read_step(self.trainer.train_step(iter(pieces)))
        rate = self.config.lora.dropout
        assert (dropped.rates, dropped.masks.keys()) == (({rate}, self.adapted.keys()) if rate else (set(), set()))
        masks = {name: torch.cat(parts) for name, parts in dropped.masks.items()}
        expected = self.defined(weights, sample, masks)
        plain = self.defined(weights, sample, {}).logits if masks else expected.logits
        check(logits[..., : self.model.config.vocab_size], plain, "logits")
        rate = learning_rate(self.config, step, self.config.training.steps or 0)
        assert record.lr == pytest.approx(rate, rel=bound())
        labels = (sample.labels, sample.next_labels)[: 1 + self.fields["mtp_layers"]]
        if not all((of_head >= 0).any() for of_head in labels):
            assert record.nan == 1
            for name, value in self.weights().items():
                assert torch.equal(value, weights[name]), f"{name} of a skipped step"
            return
        loss = expected.loss(self.fields, sample)
        check(record.loss, expected._replace(experts={}).loss(self.fields, sample), "loss")
        loss.backward()
        gradients = dict(self.watch.gradients)
        assert gradients.keys() == trained.keys()
        theirs = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in trained.items()}
        largest = max(float(gradient.abs().max()) for gradient in theirs.values())
        for name, gradient in gradients.items():
            check(gradient, theirs[name], name, least=1e-3 * largest)
        norm = torch.stack([gradient.norm() for gradient in theirs.values()]).norm()
        check(record.grad_norm, norm, "gradient norm")
        self.compare_routers(weights, expected, record.experts)
        updated = self.optimizer.step({name: weights[name].detach() for name in self.names}, gradients, rate)
        after = self.weights()
        for name, value in updated.items():
            check(after[name], value, f"{name} after the update")
        assert all(torch.equal(after[name], weights[name]) for name, _ in self.frozen()), "frozen weights"

    def frozen(self) -> Iterator[tuple[str, nn.Parameter]]:
        return (named for named in self.model.named_parameters() if not named[1].requires_grad)

    def compare_routers(
        self, weights: Mapping[str, torch.Tensor], expected: Output, figures: Mapping[str, float]
    ) -> None:
        """Loads and biases for the next step, and the figures of this one."""
        balance = z = torch.zeros((), dtype=torch.float64)
        for name, router in self.routers.items():
            seen = expected.experts[name.removesuffix(".router")]
            share = seen.sent.double() / seen.sent.sum()
            assert torch.equal(router.load.double(), share.to(router.load.dtype).double()), name
            if router.bias is not None:
                missing = (seen.sent.double().mean() - seen.sent).sign()
                moved = weights[f"{name}.bias"] + (self.fields["bias_update_rate"] * missing)
                check(router.bias, moved, f"{name}.bias")
            tokens = seen.sent.sum() / self.fields["experts_per_token"]
            balance, z = balance + seen.balance / tokens, z + seen.z / tokens
        if self.routers:
            check(figures["balance_loss"], balance, "balance_loss")
            check(figures["router_z_loss"], z, "router_z_loss")


def batch_pieces(batch: Batch, size: int) -> list[Batch]:
    def split(value: Any, start: int) -> Any:
        if isinstance(value, torch.Tensor):
            return value[start : start + size]
        return KeyRanges(*(split(part, start) for part in value)) if isinstance(value, KeyRanges) else value

    return [Batch(*(split(value, start) for value in batch)) for start in range(0, BATCH, size)]


def check(ours: torch.Tensor | float, theirs: torch.Tensor, what: str, least: float = 1e-3) -> None:
    """The largest difference, as a share of the largest value or of ``least``, is rounding."""
    theirs = theirs.detach().double()
    error = (torch.as_tensor(ours, dtype=torch.float64) - theirs).abs().max() / theirs.abs().max().clamp(min=least)
    assert error < bound(), f"{what}: {error:.2e}"


def compare(row: Row, seed: int, folder: Path) -> None:
    with exact_rope():
        trained = Trained(row, seed, folder)
        for step in range(1, STEPS + 1):
            trained.compare_step(step)


@pytest.mark.parametrize(("row", "seed"), [pytest.param(row, seed, id=str(seed)) for seed, row in enumerate(rows())])
def test_pairs_of_features(folder: Path, row: Row, seed: int) -> None:
    compare(row, seed, folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(RANDOM_ROWS))
def test_random_features(folder: Path, number: int) -> None:
    seed = FIRST_SEED + number
    print(f"PAIRS_SEED={seed} PAIRS_ROWS=1: {random_row(seed)}")
    compare(random_row(seed), seed, folder)


@pytest.mark.parametrize("seed", range(20))
def test_a_small_copy_of_any_shape_is_valid(seed: int) -> None:
    config = DecoderConfig(**fields_of(random_row(seed)))
    small = small_fields(config, 1, 1, 1, on_gpus=False, float8=False) | config.shrunk(16)
    assert DecoderConfig.model_validate(config.model_dump() | small).hidden_size == small["hidden_size"]


def test_every_field_of_the_model_is_in_the_array() -> None:
    varied = {name for options in FEATURES.values() for value in options for name in value}
    assert varied | LEFT_OUT.keys() | SIZES.keys() == DecoderConfig.model_fields.keys()
