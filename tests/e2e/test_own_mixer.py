"""The page about families' mixer, as a user's package: linear attention in three layers of four."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.e2e.scripts import install
from tests.e2e.test_own_family import LAYOUT, SMALL, home, run, succeeded
from tests.float64 import bound, in_float64
from titan_like.commands import plan, verify
from titan_like.config.load import load_config
from titan_like.evaluate.inference import load
from titan_like.metrics.flops import model_flops_per_token
from titan_like.models.batch import Batch
from titan_like.models.decoder.model import Decoder
from titan_like.models.registry import model_config
from titan_like.parallel.layout import resolve_layout
from titan_like.planner import trace as traces
from titan_like.planner.memory import rank_memory
from titan_like.planner.workload import workload_of
from titan_like.verify import verify as verify_module
from titan_like.verify.compare import EXACT
from titan_like.verify.verify import Verifier

__all__ = ["home"]
HYBRID = ["--job.config_file=qwen3.toml", *SMALL, "--model.family=hybrid"]
MAPPING = """
from titan_like.models.fields import read_fields, renamed, write_fields
from titan_like.models.hugging_face import fused, linear, validated, whole
from my_models.hybrid.config import HybridConfig

MODEL_TYPE, ARCHITECTURE, PREFIX = "hybrid", "HybridForCausalLM", "model."
FIELDS = tuple(
    renamed(name, name, int)
    for name in ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "vocab_size", "max_seq_len")
) + (renamed("tied_embeddings", "tie_word_embeddings", False),)

def stored_parameters(config):
    hidden, ffn, table = config.hidden_size, config.ffn_hidden_size, (config.padded_vocab_size, config.hidden_size)
    yield whole("embedding.weight", "model.embed.weight", table, config.vocab_size)
    for i in range(config.num_layers):
        name, theirs = f"layers.{i}", f"model.layers.{i}"
        for norm in ("attention_norm", "mlp_norm"):
            yield from linear(f"{name}.{norm}", f"{theirs}.{norm}", (hidden,), has_bias=False)
        if config.kind_of(i) == "linear":
            shape = (3 * hidden, hidden)
            yield from linear(f"{name}.attention.qkv", f"{theirs}.linear_attention.qkv", shape, has_bias=False)
        else:
            sources = tuple(f"{theirs}.attention.{part}.weight" for part in ("q", "k", "v"))
            yield fused(config, f"{name}.attention.qkv.weight", (hidden,), sources)
        yield from linear(f"{name}.attention.proj", f"{theirs}.attention.o", (hidden, hidden), has_bias=False)
        for part in ("gate", "up"):
            yield from linear(f"{name}.mlp.{part}", f"{theirs}.mlp.{part}", (ffn, hidden), has_bias=False)
        yield from linear(f"{name}.mlp.down", f"{theirs}.mlp.down", (hidden, ffn), has_bias=False)
    yield from linear("norm", "model.norm", (hidden,), has_bias=False)
    yield whole("output.weight", "lm_head.weight", table, config.vocab_size)

def to_fields(config):
    return {"model_type": MODEL_TYPE, **write_fields(config, FIELDS)}

def from_fields(fields):
    kinds = {"linear": {"mixer": "linear", "rope_theta": 0.0, "options": {"head_size": 32}}}
    pattern = {"layer_pattern": ["linear", "linear", "linear", "full"], "kinds": kinds}
    return validated(HybridConfig, read_fields(HybridConfig, FIELDS, fields) | pattern)
"""


@pytest.fixture(scope="module", autouse=True)
def installed(home: Path) -> Iterator[None]:
    """The package's entry points, and a mapping of its own."""
    install(home, "my_hybrid", "titan_like.models", "hybrid = my_models.hybrid.config:HybridConfig")
    mixers = "linear = my_models.hybrid.mixer:LinearMixer\nhead_gated = my_models.gated.mixer:HeadGatedMixer"
    install(home, "my_mixers", "titan_like.mixers", mixers)
    (home / "my_models" / "hybrid" / "hugging_face.py").write_text(MAPPING)
    yield


def test_a_hybrid_trains_and_is_exported_by_its_own_mapping(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    succeeded(home, "train.py", *HYBRID, "--checkpoint.enable=true", "--optimizer.lr=0.003")
    losses = [json.loads(line)["loss"] for line in (home / "outputs" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 4 and losses[-1] < losses[0]
    succeeded(home, "scripts/convert.py", "to-hf", "--checkpoint=outputs/checkpoint", "--output=hybrid_hf")
    succeeded(home, "scripts/convert.py", "from-hf", "--input=hybrid_hf", "--output=hybrid_again")
    mapping = home / "my_models" / "hybrid" / "hugging_face.py"
    mapping.rename(mapping.with_suffix(".away"))
    done = run(home, "scripts/convert.py", "to-hf", "--checkpoint=outputs/checkpoint", "--output=none")
    mapping.with_suffix(".away").rename(mapping)
    assert done.returncode == 2 and "no class of transformers has the mixer linear" in done.stderr, done.stderr
    monkeypatch.syspath_prepend(home)
    tokens = torch.randint(257, (2, 64), generator=torch.Generator().manual_seed(1))
    models = [load(home / name, device="cpu")[0].double() for name in ("outputs", "hybrid_again")]
    with torch.no_grad(), in_float64():
        first, second = (model(Batch(tokens))[..., :257] for model in models)
        alone = models[0](Batch(tokens[:, :40]))[..., :257]
    assert torch.equal(first, second)
    assert (alone - first[:, :40]).abs().max() < bound() * first.abs().max()  # no position sees later ones


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(LAYOUT, marks=pytest.mark.exhaustive, id="tensor, pipeline, zero 3"),
        pytest.param(["--parallelism.context_parallel_degree=2", "--parallelism.zero_stage=3"], id="context, zero 3"),
    ],
)
def test_a_layout_computes_the_training_of_one_process(
    home: Path, layout: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(home)
    monkeypatch.chdir(home)
    monkeypatch.setattr(verify_module, "Verifier", partial(Verifier, kinds=[EXACT]))
    assert verify.main([*HYBRID, "--steps=2", "--timeout=300", "--processes=4", *layout]) == 0


PLAIN = ["--job.config_file=qwen3.toml", *SMALL]
GATED = [*PLAIN, "--model.overrides.kinds.full.mixer=head_gated", "--model.overrides.kinds.full.rope_theta=1e6"]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["--parallelism.tensor_parallel_degree=2"], id="tensor"),
        pytest.param(["--parallelism.tensor_parallel_degree=4"], marks=pytest.mark.exhaustive, id="shared kv heads"),
        pytest.param([*LAYOUT[:1], *LAYOUT[3:]], marks=pytest.mark.exhaustive, id="sequence"),
    ],
)
def test_a_gate_of_heads_is_verified(home: Path, layout: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(home)
    monkeypatch.chdir(home)
    monkeypatch.setattr(verify_module, "Verifier", partial(Verifier, kinds=[EXACT]))
    assert verify.main([*GATED, "--steps=2", "--timeout=300", "--processes=4", *layout]) == 0


def test_gates_of_one_half_are_half_the_output_matrix(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(home)
    monkeypatch.chdir(home)
    torch.manual_seed(0)
    tokens = torch.randint(257, (2, 64))
    with in_float64(), torch.no_grad():
        gated, plain = (Decoder(model_config(load_config(settings).model)) for settings in (GATED, PLAIN))
        for parameter in gated.parameters():
            parameter.normal_(0, 0.1)
        values = gated.state_dict()
        for name in [name for name in values if ".head_gate." in name]:
            values.pop(name).zero_()
        plain.load_state_dict({key: v / 2 if key.endswith("attention.proj.weight") else v for key, v in values.items()})
        result, expected = (model(Batch(tokens))[..., :257] for model in (gated, plain))
    assert (result - expected).abs().max() < bound() * expected.abs().max()


def test_it_is_planned_and_searched(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(home)
    monkeypatch.chdir(home)
    monkeypatch.setattr(traces, "default_folder", lambda: tmp_path)
    settings = [
        *HYBRID,
        "--training.global_batch_size=16",
        "--training.seq_len=256",
        "--cluster.gpus_per_node=8",
        "--cluster.gpu=H100",
    ]
    for command, options in (("predict", LAYOUT), ("search", ["--gpus=2"])):
        assert plan.main([command, *settings, *options, f"--json={tmp_path / 'plan.json'}"]) == 0
        assert json.loads((tmp_path / "plan.json").read_text())[command]
    config = load_config([*settings, *LAYOUT])
    model, matrix = model_config(config.model), 128 * 128
    linear, matrices = 3 * 2 * 4 * 32**2, 4 * (4 * matrix + 3 * 128 * model.ffn_hidden_size) + 384 * 128
    assert model_flops_per_token(model, 256) == 6 * (matrices + linear + 2 * 256 * 128)
    work = workload_of(config, model, resolve_layout(config.parallelism, 8))
    assert all(rank_memory(work, rank).total > 0 for rank in range(2))


def test_without_a_way_across_shards_context_parallelism_is_refused(home: Path) -> None:
    file = home / "my_models" / "hybrid" / "mixer.py"
    whole = file.read_text()
    try:
        file.write_text(whole.replace("def shard_context", "def _shard_context"))
        done = run(home, "train.py", *HYBRID, "--job.dry_run=true", "--parallelism.context_parallel_degree=2")
    finally:
        file.write_text(whole)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "hybrid: layers.0.attention needs whole sequences, but " in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("def build(", "def built(", "my_models.hybrid.mixer:LinearMixer has no method build; add it"),
        ("def plan(", "def planned(", "LinearMixer has no method plan, which tensor parallelism needs; add it"),
        ("return LinearAttention(", "{}['x'](", "LinearMixer raises KeyError ('x'); correct the package"),
        ('return {"": "region"', 'return {}["x"], {"": "region"', "LinearMixer raises KeyError ('x'); correct"),
        ("return LinearAttention(", "return (", "LinearMixer builds a tuple, not a torch.nn.Module; correct"),
    ],
    ids=["no build", "no plan", "build raises", "plan raises", "no module"],
)
def test_a_broken_mixer_is_one_sentence(home: Path, old: str, new: str, sentence: str) -> None:
    file = home / "my_models" / "hybrid" / "mixer.py"
    whole = file.read_text()
    try:
        file.write_text(whole.replace(old, new))
        done = run(home, "train.py", *HYBRID, "--job.dry_run=true", "--parallelism.tensor_parallel_degree=2")
    finally:
        file.write_text(whole)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f'kinds.linear.mixer = "linear": {sentence}' in done.stderr
