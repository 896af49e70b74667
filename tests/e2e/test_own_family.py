"""The families that docs/families.md writes, in a package of their own: trained, verified, planned, converted."""

import json
import math
import re
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

from tests.e2e.jobs import short
from tests.e2e.scripts import REPO, Script, install
from tests.float64 import bound, in_float64
from tests.traces import microbatch_flops, microbatch_tokens
from tests.whole_step import whole_step
from titan_like.commands import plan, verify
from titan_like.config.load import load_config
from titan_like.evaluate.inference import load
from titan_like.metrics.flops import model_flops_per_token
from titan_like.models.batch import Batch
from titan_like.models.registry import model_config
from titan_like.parallel.layout import resolve_layout
from titan_like.planner import trace as traces
from titan_like.planner.memory import rank_memory
from titan_like.planner.workload import workload_of
from titan_like.train.rules import broken_rules
from titan_like.verify import verify as verify_module
from titan_like.verify.compare import EXACT
from titan_like.verify.verify import Verifier

ENTRY_POINTS = """qwen3 = my_models.qwen3.config:Qwen3Config
scaled = my_models.scaled.config:ScaledConfig
mixing = my_models.mixing.config:MixingConfig
absent = my_models.absent.config:AbsentConfig
function = my_models.scaled.model:build
"""
MIXING = {
    "config.py": """
from titan_like.models.decoder.config import DecoderConfig

class MixingConfig(DecoderConfig):
    mixer: str = "none"
""",
    "flavors.toml": """
[debug]
num_layers = 4
hidden_size = 128
num_attention_heads = 4
vocab_size = 257
max_seq_len = 1024
""",
    "model.py": """
import torch
import torch.nn.functional as F
from torch import nn
from titan_like.models.decoder.model import Decoder, DecoderLayer
from titan_like.models.layers.attention import AttentionCore
from titan_like.models.layers.experts import Router, SparseMLP
from titan_like.models.layers.mlp import GatedMLP

class Mixer(nn.Module):
    def __init__(self, hidden, kind):
        super().__init__()
        self.kind, self.gate = kind, nn.Parameter(torch.zeros(hidden))
        if kind == "convolution":
            self.conv = nn.Conv1d(hidden, hidden, 3, padding=2, groups=hidden)
        if kind == "recurrence":
            self.rnn = nn.GRU(hidden, hidden, batch_first=True)

    def forward(self, x):
        n = x.shape[1]
        if self.kind == "convolution":
            mixed = self.conv(x.transpose(1, 2))[..., :n].transpose(1, 2)
        elif self.kind == "recurrence":
            mixed = self.rnn(x)[0]
        elif self.kind == "mean":
            mixed = x.mean(1, keepdim=True)
        elif self.kind == "blocks":
            mixed = x.unflatten(1, (-1, 16)).amax(2).repeat_interleave(16, 1)
        elif self.kind == "sum":
            mixed = x.cumsum(1)
        elif self.kind == "attention":
            mixed = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        elif self.kind == "counting":
            mixed = torch.arange(n, device=x.device)[:, None] / 100
        elif self.kind == "first":
            mixed = x[:, :1]
        elif self.kind == "far":
            mixed = F.pad(x, (0, 0, 500, 0))[:, :n]
        elif self.kind == "training":
            mixed = x.roll(1, 1) if self.training else x
        elif self.kind == "largest":
            mixed = x / x.abs().max()
        else:
            mixed = F.dropout(x.sin(), 0.1, self.training)
        return x + self.gate * mixed

class MixingLayer(DecoderLayer):
    def forward(self, x, context):
        if self.shifts:
            x = x + F.pad(x, (0, 0, 1, 0))[:, :-1] * 0.5
        return super().forward(self.mixer(x), context)

class MixingMLP(GatedMLP):
    def forward(self, x):
        return super().forward(x.cumsum(1))

class Diagonal(AttentionCore):
    def attend(self, q, k, v, document_mask, bias):
        return v

class Smeared(AttentionCore):
    def forward(self, q, k, v, *masks):
        return super().forward(q, k + k.roll(1, 2), v, *masks)

class Rotated(AttentionCore):
    def forward(self, q, k, v, *masks):
        n = torch.arange(q.shape[2])[:, None]
        return super().forward(q * n.cos() - q.flip(3) * n.sin(), k * n.cos() - k.flip(3) * n.sin(), v, *masks)

class Choice(Router):
    def choose(self, scores):
        best = scores.topk(len(scores) // 4, 0).indices
        return super().choose(scores.scatter_add(0, best, torch.ones_like(scores[: len(best)])))

class Mixing(Decoder):
    def new_layer(self, number):
        kind, config = self.config.mixer, self.config
        attention = self.new_attention(number)
        attention.core = {"own core": Diagonal, "keys": Smeared, "rotation": Rotated}.get(kind, AttentionCore)(0.0)
        last = number == config.num_layers - 1
        layer = DecoderLayer
        mlp = MixingMLP if kind == "in the MLP" else GatedMLP
        mlp = mlp(config.hidden_size, config.ffn_hidden_size, "silu")
        if kind == "experts choose":
            mlp = SparseMLP(config, Choice(config))
        layer = (MixingLayer if last else DecoderLayer)(config, attention, mlp)
        layer.shifts = kind == "shift"
        if last:
            layer.mixer = Mixer(config.hidden_size, kind)
        return layer

    def embed(self, batch):
        x = super().embed(batch)
        return x + x.roll(1, 1) if self.config.mixer == "embedding" else x

    def before_output(self, x):
        x = super().before_output(x)
        return x - x.amax(1, keepdim=True) if self.config.mixer == "head" else x

    def loss(self, x, *given):
        loss = super().loss(x, *given)
        return loss + (x[:, 1:] - x[:, :-1]).square().sum() if self.config.mixer == "loss" else loss

build = Mixing
""",
}
SMALL = short(4, batch=4)
SCALED = ["--model.family=scaled"]
DEGREES = ("tensor_parallel_degree=2", "pipeline_parallel_degree=2", "zero_stage=3", "sequence_parallel=true")
LAYOUT = [f"--parallelism.{degree}" for degree in DEGREES]
# Of the scaled family's debug flavor. Each token's two experts of eight are three matrices each.
HIDDEN, VOCABULARY, SEQ_LEN = 128, 384, 256  # the vocabulary is padded
MATRICES = 4 * HIDDEN * HIDDEN + 8 * HIDDEN
EXPERT = 3 * HIDDEN * 64
LAYER = MATRICES + 8 * EXPERT + 4 * HIDDEN
PARAMETERS = 4 * LAYER + VOCABULARY * HIDDEN + HIDDEN


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on the path with the page's package, installed as far as Python can tell."""
    folder = tmp_path_factory.mktemp("home")
    page = (REPO / "docs" / "families.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"```(?:python|toml)\n# (my_models/\S+)\n(.*?)```", page, re.DOTALL):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    (config,) = re.findall(r"```toml\n(\[model\]\n.*?)```", page, re.DOTALL)
    (folder / "qwen3.toml").write_text(config, encoding="utf-8")
    for name, text in MIXING.items():
        file = folder / "my_models" / "mixing" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    install(folder, "my_models", "titan_like.models", ENTRY_POINTS)
    return folder


def run(home: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script, in the folder."""
    return Script(script, arguments, cwd=home, path=[home]).wait(timeout=400)


def succeeded(home: Path, script: str, *arguments: str) -> str:
    done = run(home, script, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_trains_and_converts_to_hugging_face_and_back(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["--checkpoint.enable=true", "--checkpoint.interval=4"]
    succeeded(home, "train.py", "--job.config_file=qwen3.toml", *SMALL, *settings)
    lines = (home / "outputs" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 4
    assert all(0 < loss < math.log(VOCABULARY) for loss in losses)
    succeeded(home, "scripts/convert.py", "to-hf", "--checkpoint=outputs/checkpoint", "--output=exported")
    assert json.loads((home / "exported" / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    monkeypatch.syspath_prepend(home)
    model, _ = load(home / "outputs", device="cpu")
    with in_float64():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(home / "exported", dtype=torch.float64)
    tokens = torch.randint(257, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), in_float64():
        ours, wanted = model.double()(Batch(tokens))[..., :257], theirs(tokens).logits
    assert type(theirs).__name__ == "Qwen3ForCausalLM" and wanted.abs().max() > 0.1
    assert (ours - wanted).abs().max() < bound() * wanted.abs().max()
    shown = succeeded(home, "scripts/convert.py", "from-hf", "--input=exported", "--output=imported")
    assert 'from = "imported/step-0"' in shown
    run_file = json.loads((home / "imported" / "step-0" / "run.json").read_text())
    assert run_file["config"]["model"]["family"] == "decoder"  # which reads Qwen3's folders
    succeeded(home, "scripts/convert.py", "to-hf", "--checkpoint=imported", "--output=again")
    first, second = ((home / name / "model.safetensors").read_bytes() for name in ("exported", "again"))
    assert first == second


@pytest.mark.parametrize(
    ("family", "processes", "kinds"),
    [
        ("scaled", 4, [EXACT]),
        pytest.param("qwen3", 4, [EXACT], marks=pytest.mark.exhaustive),
        *(pytest.param(one, 8, [], marks=pytest.mark.exhaustive) for one in ("qwen3", "scaled")),
    ],
)
def test_they_are_verified_in_three_axes(
    home: Path, family: str, processes: int, kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On four processes each shard is a whole."""
    monkeypatch.syspath_prepend(home)
    monkeypatch.chdir(home)
    monkeypatch.setattr(verify_module, "Verifier", partial(Verifier, kinds=kinds))
    options = ["--job.config_file=qwen3.toml", "--steps=2", "--timeout=300", f"--processes={processes}"]
    layout = LAYOUT if family == "scaled" else LAYOUT[:-1]  # norms of heads differ between ranks in any case
    assert verify.main([*options, *SMALL, f"--model.family={family}", *layout]) == 0


def test_it_is_planned_and_run_dry(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step holds is that of the whole step of the recipe, and its products are those of the page's matrices."""
    monkeypatch.syspath_prepend(home)
    monkeypatch.setattr(traces, "default_folder", lambda: tmp_path)
    settings = [f"--job.config_file={home / 'qwen3.toml'}", *SMALL, *SCALED, "--training.global_batch_size=16"]
    settings += [f"--training.seq_len={SEQ_LEN}", "--cluster.gpus_per_node=8"]
    searched = [*settings, "--gpus=2", "--activation_checkpoint.mode=none", "--parallelism.zero_stage=3"]
    for profile in ("fsdp_a100", "titan_h100", "dgx2_v100"):  # which share the traces
        for command, options in (("predict", [*settings, *LAYOUT]), ("search", searched)):
            assert plan.main([command, *options, f"--profile={profile}", f"--json={tmp_path / 'plan.json'}"]) == 0
            assert json.loads((tmp_path / "plan.json").read_text())[command]
    config = load_config([*settings, *LAYOUT])
    model, layout = model_config(config.model), resolve_layout(config.parallelism, 8)
    work = workload_of(config, model, layout)
    for rank in range(2):
        whole = whole_step(config, model, layout, 4 * rank).peak
        assert rank_memory(work, rank).total == pytest.approx(whole, rel=0.05)
    matrices, scores = 4 * (MATRICES + 2 * EXPERT) + VOCABULARY * HIDDEN, 4 * 2 * SEQ_LEN * HIDDEN
    assert model.num_parameters() == PARAMETERS
    assert sum(microbatch_flops(work, rank) for rank in range(2)) == 6 * microbatch_tokens(work) / 2 * (
        matrices + scores
    )
    assert model_flops_per_token(model, SEQ_LEN) == 6 * (matrices + scores)
    degrees = ["--cluster.nodes=1", "--job.dry_run=true", "--json=dry.json"]
    succeeded(home, "train.py", *settings, *LAYOUT, *degrees)
    assert json.loads((home / "dry.json").read_text())["num_parameters"] == PARAMETERS


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("qwen4", "unknown name; did you mean qwen3?"),
        ("absent", "its entry point, my_models.absent.config:AbsentConfig, cannot be imported (No module named"),
        ("function", "its entry point, my_models.scaled.model:build, is not a family; it must be a subclass of"),
    ],
)
def test_a_wrong_name_or_entry_point_is_one_sentence(home: Path, family: str, wanted: str) -> None:
    done = run(home, "train.py", f"--model.family={family}", "--training.steps=1")
    assert done.returncode == 2
    assert done.stderr.startswith(f'error: model.family = "{family}": {wanted}')
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("there", "instead", "wanted"),
    [
        (', "layers.*.mlp_scale": ReplicatedScale', "", "leaves out the parameter layers.0.mlp_scale.weight"),
        (
            "DECODER(config) | scales",
            'DECODER(config) | {"layers.*": "region"} | scales',
            "layers.0.attention_norm, which is in a region, a norm; use head_norm",
        ),
    ],
)
def test_a_wrong_plan_is_one_sentence(home: Path, there: str, instead: str, wanted: str) -> None:
    sharding = home / "my_models" / "scaled" / "sharding.py"
    whole = sharding.read_text()
    try:
        sharding.write_text(whole.replace(there, instead))
        settings = ["--job.dry_run=true", "--parallelism.tensor_parallel_degree=2", *SCALED]
        settings += ["--parallelism.sequence_parallel=true"]
        done = run(home, "train.py", "--job.config_file=qwen3.toml", *SMALL, *settings)
    finally:
        sharding.write_text(whole)
    assert done.returncode == 2
    assert done.stderr.startswith('error: model.family = "scaled": the tensor-parallel plan')
    assert done.stderr.count("\n") == 1 and wanted in done.stderr
    assert done.stderr.endswith("correct the family's sharding module\n")


EVERYWHERE = ("context_parallel_degree", "sequence_parallel")


@pytest.mark.parametrize(
    ("mixer", "module", "refusing"),
    [
        *((kind, "layers.3.mixer", EVERYWHERE) for kind in ("convolution", "mean", "blocks", "sum", "attention")),
        *((kind, "layers.3.mixer", EVERYWHERE) for kind in ("counting", "first", "far", "training", "largest")),
        ("recurrence", "layers.3.mixer.rnn", EVERYWHERE),
        ("shift", "layers.3", EVERYWHERE),
        ("embedding", "Mixing", EVERYWHERE),
        ("head", "Mixing", EVERYWHERE),
        ("loss", "Mixing", EVERYWHERE),
        ("experts choose", "layers.0.mlp", EVERYWHERE),
        ("in the MLP", "layers.0.mlp", EVERYWHERE[:1]),  # a TP block has the whole sequence
        ("keys", "layers.0.attention", EVERYWHERE[:1]),
        ("rotation", "layers.0.attention", EVERYWHERE[:1]),
        ("own core", "layers.0.attention.core", EVERYWHERE[:1]),
        ("none", "", ()),
    ],
)
def test_what_mixes_positions_outside_of_attention_is_refused_where_they_are_split(
    home: Path, mixer: str, module: str, refusing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(home)
    experts = {"num_experts": 8, "experts_per_token": 2} if mixer == "experts choose" else {}
    overrides = [f"--model.overrides.{name}={json.dumps(value)}" for name, value in {"mixer": mixer, **experts}.items()]
    settings = [f"--job.config_file={home / 'qwen3.toml'}", *SMALL, "--model.family=mixing", *overrides]
    for key, values in {
        EVERYWHERE[0]: {EVERYWHERE[0]: 2},
        EVERYWHERE[1]: {"tensor_parallel_degree": 2, EVERYWHERE[1]: "true"},
        "tensor_parallel_degree": {"tensor_parallel_degree": 2},
        "zero_stage": {"zero_stage": 3},
    }.items():
        config = load_config([*settings, *(f"--parallelism.{name}={value}" for name, value in values.items())])
        errors = [
            str(error)
            for error in broken_rules(config, model_config(config.model), resolve_layout(config.parallelism, 2))
        ]
        errors = [error for error in errors if "whole sequences" in error]
        if key in refusing:
            (sentence,) = errors
            assert sentence.startswith(f"parallelism.{key} = "), sentence
            assert f": mixing: {module} needs whole sequences, but " in sentence, sentence
        else:
            assert not errors
