import math
from contextlib import suppress

import pytest
import torch

from tests.float64 import bound
from tests.unit.hugging_face_cases import moe_config
from titan_like.config import ConfigError, load_config
from titan_like.config.schema import LoRA
from titan_like.models.batch import Batch
from titan_like.models.bert.config import BertConfig
from titan_like.models.gpt.config import GPTConfig
from titan_like.models.gpt.model import GPT
from titan_like.models.layers.experts import Router
from titan_like.models.layers.init import standard_rows
from titan_like.models.layers.norms import make_norm
from titan_like.models.layers.positions import apply_rope
from titan_like.models.llama.config import LlamaConfig
from titan_like.models.registry import build_model, config_class, flavors, model_config
from titan_like.parallel.lora import add_adapters

TINY = {
    "gpt": GPTConfig(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=97, max_seq_len=24),
    "bert": BertConfig(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=97, max_seq_len=24),
    "llama": LlamaConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_kv_heads=2, vocab_size=97, max_seq_len=24
    ),
}


def flavor(family, name):
    return config_class(family).model_validate(flavors(family)[name])


def tiny_model(family, seed=1):
    model = build_model(TINY[family], family)
    model.init_weights(seed)
    return model


SIZES = [
    (family, name)
    for family in ("gpt", "llama", "moe", "bert", "t5")
    for name, field in config_class(family).model_fields.items()
    if field.annotation is int
]


@pytest.mark.parametrize(("family", "name"), SIZES)
@pytest.mark.parametrize("size", [10**9, 2**62])
def test_a_size_is_counted_or_refused_whatever_it_is(family, name, size):
    """Bytes of a matrix fit into 63 bits, and layers can be built one by one."""
    with suppress(ConfigError):
        settings = [f"--model.family={family}", "--model.flavor=debug", f"--model.overrides.{name}={size}"]
        assert model_config(load_config(settings).model).num_parameters() > 0


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family in ("gpt", "llama", "bert", "t5", "moe") for name in flavors(family)]
)
def test_analytic_count_equals_the_built_model(family, name):
    config = flavor(family, name)
    with torch.device("meta"):
        model = build_model(config, family)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.num_parameters()


def test_same_seed_and_name_give_the_same_weights_and_others_do_not():
    first, again, other = (dict(tiny_model("gpt", seed).named_parameters()) for seed in (1, 1, 2))
    drawn = [name for name, parameter in first.items() if parameter.ndim == 2]
    assert len(drawn) == 2 + 4 * 2
    for name in drawn:
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])
    assert not torch.equal(first["layers.0.attention.qkv.weight"], first["layers.1.attention.qkv.weight"])
    for name in set(first) - set(drawn):
        assert (first[name] == (0 if name.endswith("bias") else 1)).all()


@pytest.mark.parametrize(
    ("family", "changes", "residual", "plain"),
    [
        ("gpt", {}, ("attention.proj", "mlp.fc2"), ("attention.qkv", "mlp.fc1")),
        ("llama", {}, ("attention.proj", "mlp.down"), ("attention.qkv", "mlp.gate", "mlp.up")),
        ("bert", {"norm_placement": "pre"}, ("attention.proj", "mlp.fc2"), ("attention.qkv", "mlp.fc1")),
        ("bert", {"norm_placement": "post"}, (), ("attention.proj", "mlp.fc2", "attention.qkv", "mlp.fc1")),
    ],
)
def test_weights_have_the_standard_deviation_of_gpt2(family, changes, residual, plain):
    config = TINY[family].model_copy(update={"hidden_size": 256, "ffn_hidden_size": 512, "num_layers": 8} | changes)
    model = build_model(config, family)
    model.init_weights(5)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        kind = name.removesuffix(".weight").split(".", 2)[-1]
        assert kind in residual + plain or not name.startswith("layers.")
        std = 0.02 / math.sqrt(2 * 8) if kind in residual else 0.02
        # A sample's standard deviation has the standard error σ/√(2n), its mean σ/√n; 5 of them.
        values = parameter.detach().double()
        assert abs(values.std().item() - std) < 5 * std / math.sqrt(2 * values.numel()), name
        assert abs(values.mean().item()) < 5 * std / math.sqrt(values.numel()), name


def test_adapters_begin_as_peft_s_do():
    """A is uniform between ±1/√inputs, which is kaiming_uniform_ with a = √5, and B is 0."""
    model = build_model(TINY["llama"], "llama")
    add_adapters(model, LoRA(rank=64))
    model.init_weights(5)
    adapters = {name: value for name, value in model.named_parameters() if "lora" in name}
    assert len(adapters) == 2 * 2 * 5
    for name, value in adapters.items():
        if name.endswith("lora_b"):
            assert not value.any()
            continue
        scaled = value.detach().double() * value.shape[1] ** 0.5
        assert 0.99 < scaled.abs().max() < 1
        # Means of uniform numbers and of their squares, within 5 standard errors.
        assert abs(scaled.mean()) < 5 / math.sqrt(3 * value.numel())
        assert abs(scaled.square().mean() - 1 / 3) < 5 * math.sqrt(4 / 45 / value.numel())


@pytest.mark.parametrize("shape", [(5000, 7), (1000, 3, 2), (12, 300), (977,)])
def test_rows_drawn_alone_equal_rows_of_the_whole(shape):
    shape = torch.Size(shape)
    whole = standard_rows(3, "weight", shape, range(shape[0]), 256)  # many blocks in a small parameter
    assert whole.shape == shape
    ranges = torch.randint(shape[0] + 1, (60, 2), generator=torch.Generator().manual_seed(0)).sort().values.tolist()
    for start, stop in [*ranges, [0, 0], [0, 1], [shape[0] - 1, shape[0]], [5, 5]]:
        rows = standard_rows(3, "weight", shape, range(start, stop), 256)
        assert torch.equal(rows, whole[start:stop])
    assert len(torch.unique(whole)) > 0.999 * whole.numel()  # no block repeats another


@pytest.mark.parametrize(
    ("what", "name", "problem"),
    [
        ("residual_outputs", "mlp.down", "no matrix 'mlp.down'.* attention.proj, attention.qkv, mlp.fc1, mlp.fc2"),
        ("entry", "embeding", "no module 'embeding', which entry names"),
    ],
)
def test_a_model_names_parts_that_it_has(monkeypatch: pytest.MonkeyPatch, what: str, name: str, problem: str) -> None:
    monkeypatch.setattr(GPT, what, (name,))
    with torch.device("meta"), pytest.raises(ConfigError, match=problem):
        build_model(model_config(load_config([]).model), "gpt")


def computed_from(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What layers compute from the same bfloat16 numbers in ``dtype``."""
    x = torch.randn(42, 32, generator=torch.Generator().manual_seed(0)).bfloat16().to(dtype)
    router, norm = Router(moe_config(hidden_size=32)), make_norm(32, 1e-5, offset=True).to(dtype)
    router.to(torch.promote_types(dtype, torch.float32)).weight.data.copy_(x[:5])
    norm.weight.data.copy_(x[5])
    model, positions = build_model(TINY["llama"], "llama").to(dtype), torch.arange(1000, 1042)
    (table,) = model.rotary_tables(Batch(positions, positions=positions)).values()
    rotated = apply_rope(x.view(1, 42, 4, 8), *table)
    return {"weights": router(x).weights, "losses": router.loss_sums, "rotated": rotated, "norm": norm(x)}


def test_layers_round_to_bfloat16_once_and_routers_never():
    results = zip(computed_from(torch.float64).items(), computed_from(torch.bfloat16).values(), strict=True)
    for (name, exact), found in results:
        rounding = 2**-8 * exact.abs() if name in ("rotated", "norm") else 0  # half a unit at most
        allowed = rounding + bound(64, torch.float32) * exact.abs().max()
        assert ((found.double() - exact).abs() <= allowed).all(), name
