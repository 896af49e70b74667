"""Adapters train as PEFT trains them, in every layout, and go from and to PEFT's folders."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from tests.distributed.launch import Case, base_config, collect, losses_of_layouts, run_cases, trainer_of
from tests.distributed.layouts import pipeline, sizes, tensor, zero
from tests.float64 import bound, exact_rope, in_float64
from tests.unit.hugging_face_cases import gpt_config, llama_config, moe_config, reference_model
from tests.unit.test_decoder_hugging_face import exact_model, random_folder
from tests.unit.transformers_cases import CASES as CLASSES
from tests.unit.transformers_cases import SMALL
from titan_like.commands import convert
from titan_like.config import ConfigError
from titan_like.config.load import load_config
from titan_like.evaluate.inference import load
from titan_like.hugging_face.folder import read_model
from titan_like.hugging_face.peft import base_of
from titan_like.models.batch import Batch
from titan_like.models.layers.experts import Router
from titan_like.train.job import process_group
from titan_like.train.rules import resolve_settings
from titan_like.train.setup import prepare_run
from titan_like.train.trainer import Trainer

RANK, ALPHA, STEPS, BATCH, SEQ = 4, 12.0, 20, 8, 32
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one process": {}},
    2: {
        "tensor 2": tensor(2, True) | {"checkpoint.enable": True},
        "pipeline 2": pipeline(2),
        "context 2": {"parallelism.context_parallel_degree": 2},
        "ZeRO 3": zero(3),
    },
}
# Family → modules in transformers that have an adapter, by the ends of their names, and [lora] modules.
CASES: dict[str, tuple[list[str], list[str]]] = {
    "llama": (
        ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
        ["q_proj", "v_proj", "proj", "mlp.gate", "down"],
    ),
    "gpt": (["c_attn", "c_fc"], ["attention.qkv", "mlp.fc1"]),
    # GLM-4, whose rotated rows are stored in pairs.
    "decoder": (["q_proj", "k_proj", "o_proj"], ["q_proj", "k_proj", "attention.proj"]),
}


class Plain(nn.Module):
    """A linear module, or GPT-2's transposed one, with an adapter."""

    def __init__(self, base: nn.Module, generator: torch.Generator) -> None:
        super().__init__()
        weight = base.weight if isinstance(base, nn.Linear) else base.weight.t()
        self.base = base
        self.a = nn.Parameter(torch.randn(RANK, weight.shape[1], generator=generator) / 8)
        self.b = nn.Parameter(torch.randn(weight.shape[0], RANK, generator=generator) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + ALPHA / RANK * F.linear(F.linear(x, self.a), self.b)


def plain(folder: Path, ends: list[str]) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model of a folder with random adapters, which are also returned under PEFT's names."""
    model = exact_model(folder).train()
    generator, tensors = torch.Generator().manual_seed(5), dict[str, torch.Tensor]()
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in ends:
            new = Plain(module, generator).float().double()  # files hold float32, and so does our run's start
            setattr(model.get_submodule(parent), last, new)
            tensors |= {f"base_model.model.{name}.lora_{key.upper()}.weight": getattr(new, key) for key in ("a", "b")}
    return model, tensors


def prepared(tmp_path: Path, family: str, **peft: Any) -> tuple[dict[str, Any], nn.Module, dict[str, torch.Tensor]]:
    """The settings of a run from a PEFT folder, the same model as a plain one, and its adapters."""
    ends, modules = CASES[family]
    if family == "decoder":
        random_folder("glm4", CLASSES["glm4"][1] | {"vocab_size": 257}, tmp_path / "hf")
        shape = read_model(tmp_path / "hf", "model.from")[2]
    else:
        shape = {"llama": llama_config, "gpt": gpt_config}[family](hidden_size=64, num_layers=2, vocab_size=257)
        reference_model(shape).save_pretrained(tmp_path / "hf")
    model, tensors = plain(tmp_path / "hf", ends)
    (tmp_path / "peft").mkdir()
    save_file(
        {name: tensor.detach().float() for name, tensor in tensors.items()}, tmp_path / "peft/adapter_model.safetensors"
    )
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": 12, "base_model_name_or_path": str(tmp_path / "hf")} | peft
    (tmp_path / "peft/adapter_config.json").write_text(json.dumps(fields))
    overrides = shape.model_dump(mode="json", exclude_none=True) | ({"dropout": 0.0} if family == "gpt" else {})
    settings = sizes(SEQ, 2, BATCH, STEPS) | {
        "model.family": family, "model.overrides": overrides, "optimizer.lr": 1e-3, "training.max_norm": 0.0,
        "checkpoint.initial_load_path": str(tmp_path / "peft"),
        "lora.rank": RANK, "lora.alpha": ALPHA, "lora.modules": modules, "training.dtype": "float64",
    }  # fmt: skip
    return settings, model, tensors


@pytest.mark.parametrize("family", CASES)
def test_steps_are_those_of_a_plain_loop_and_go_to_peft_and_merged(tmp_path: Path, family: str) -> None:
    torch.manual_seed(3)
    settings, model, adapters = prepared(tmp_path, family)
    found = {}
    for ranks, layouts in LAYOUTS.items() if family == "llama" else [(1, LAYOUTS[1])]:
        found |= collect(losses_of_layouts, ranks, tmp_path, layouts, settings)[0]
    run = prepare_run(resolve_settings(base_config(tmp_path, settings), 1))
    section = run.config.optimizer
    options = {"betas": section.betas, "eps": section.eps, "weight_decay": section.weight_decay}
    optimizer, losses = torch.optim.AdamW(adapters.values(), lr=section.lr, **options), []
    for dropout in (module for module in model.modules() if isinstance(module, nn.Dropout)):
        dropout.p = 0.0
    for step in range(STEPS):
        samples = [run.datasets["train"][index] for index in range(step * BATCH, step * BATCH + BATCH)]
        tokens, labels = (
            torch.stack([torch.as_tensor(one).long() for one in s])
            for s in zip(*((s[0], s.labels) for s in samples), strict=True)
        )
        with in_float64():
            logits = model(input_ids=tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for layout, ours in found.items():
        assert ours == pytest.approx(losses, rel=bound(4096 * STEPS)), layout
    with process_group(torch.device("cpu")):
        trainer = trainer_of(tmp_path, settings | {"checkpoint.enable": True, "job.dump_folder": str(tmp_path / "run")})
        with exact_rope():
            trainer.train()
    whole = ["to-hf", "--checkpoint", str(tmp_path / "run"), "--tokenizer", "none"]
    convert.main([*whole, "--output", str(tmp_path / "out")])
    convert.main([*whole, "--output", str(tmp_path / "merged"), "--merge"])
    written = load_file(tmp_path / "out/adapter_model.safetensors")
    assert written.keys() == adapters.keys()
    # AdamW divides the rounding of gradients by no less than its epsilon.
    rounding = {"rtol": 0.0, "atol": STEPS * section.lr * bound() / section.eps}
    for name, value in written.items():
        torch.testing.assert_close(value, adapters[name].detach().float(), **rounding, msg=name)
    merged, loaded = exact_model(tmp_path / "merged"), load(tmp_path / "run", device="cpu")[0].double()
    with in_float64():
        expected = model.eval()(input_ids=tokens).logits
        found = {"merged": merged(input_ids=tokens).logits, "loaded": loaded(Batch(tokens))[..., : expected.shape[-1]]}
    for logits in found.values():  # of weights that were rounded to float32
        torch.testing.assert_close(logits, expected, rtol=0, atol=bound(256, torch.float32))


def test_a_run_goes_on_with_its_own_base_alone_and_keeps_adapters_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, *_ = prepared(tmp_path, "llama")
    settings |= {"checkpoint.enable": True, "checkpoint.interval": 2, "training.steps": 4}
    losses = []
    plain_run = collect(losses_of_layouts, 1, tmp_path, {"x": {}}, settings | {"checkpoint.enable": False})[0]["x"]
    for steps in (2, 4):
        with process_group(torch.device("cpu")), exact_rope():
            trainer = trainer_of(tmp_path, settings | {"training.steps": steps})
            trainer.log.callback = lambda record: losses.append(record.loss)
            trainer.train()
        shutil.rmtree(tmp_path / "peft", ignore_errors=True)
    assert losses == pytest.approx(plain_run, rel=bound(4096 * 4))
    size = sum(file.stat().st_size for file in (tmp_path / "checkpoint/step-4").glob("*.distcp"))
    assert size < 8 * 3 * 1.5 * sum(p.numel() for p in trainer.model.parameters()) + 100_000
    weights = load_file(tmp_path / "hf/model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"adapters of step 4 were trained on .*others"):
        prepare_run(resolve_settings(base_config(tmp_path, settings), 1))
    with pytest.raises(ConfigError, match="has changed; restore it"):
        whole = ["to-hf", "--checkpoint", str(tmp_path), "--tokenizer", "none", "--merge"]
        convert.main([*whole, "--output", str(tmp_path / "merged")])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert base_of(url := f"file://{tmp_path}/hf", "model.from") == url  # and not a copy of it
    shutil.rmtree(tmp_path / "hf")
    with pytest.raises(ConfigError, match=r"trained on .*/hf, which is not there.*restore it"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["phi3", "deepseek_v3"])
def test_a_peft_folder_has_the_modules_of_its_base(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Phi-3 fuses what Llama, a class of the same shape, does not; DeepSeek-V3 has dense MLPs next to experts."""
    base = tmp_path / "hf"
    model = random_folder(name, CLASSES[name][1] | {"vocab_size": 257}, base)
    if name == "deepseek_v3":
        add_mtp(base)
    shape = read_model(base, "model.from")[2].model_dump(mode="json", exclude_none=True)
    if name == "phi3":
        convert.main(["from-hf", "--input", str(base), "--output", str(tmp_path / "base")])
        base = tmp_path / "base/step-0"
    settings = sizes(SEQ, 2, BATCH, 3) | {
        "model.family": "decoder", "model.overrides": shape, "training.max_norm": 0.0,
        "checkpoint.initial_load_path": str(base), "lora.rank": RANK, "lora.alpha": ALPHA, "optimizer.lr": 1e-2,
        "training.dtype": "float64",
    }  # fmt: skip
    one = run_cases([Case("one", settings)], 1, tmp_path)["one"]
    for layout in (tensor(2, True), pipeline(2)) if name == "deepseek_v3" else ():
        split = run_cases([Case("split", settings | layout)], 2, tmp_path)["split"]
        assert split.losses == pytest.approx(one.losses, rel=bound(4096 * 3))
        assert split.grad_norms == pytest.approx(one.grad_norms, rel=bound(4096 * 3))
    with process_group(torch.device("cpu")):
        trainer_of(tmp_path, settings | {"checkpoint.enable": True}).train()
    whole = ["to-hf", "--checkpoint", str(tmp_path), "--tokenizer", "none"]
    convert.main([*whole, "--output", str(tmp_path / "out")])
    assert ("transformers cannot open" in capsys.readouterr().err) == (name == "phi3")
    convert.main([*whole, "--output", str(tmp_path / "merged"), "--merge"])
    fields = json.loads((tmp_path / "out/adapter_config.json").read_text())
    if name == "deepseek_v3":  # PEFT would take a module "mlp.up_proj" for the experts'
        assert "mlp.up_proj.weight" in fields["target_parameters"] and "mlp.up_proj" not in fields["target_modules"]
    written = load_file(tmp_path / "out/adapter_model.safetensors")
    for key in (key for key in written if ".lora_A." in key and ".layers.4." not in key):  # the fifth is for MTP
        module, a, b = key[len("base_model.model.") :].split(".lora_A")[0], written[key], written[key.replace("A", "B")]
        rank, alpha = (
            fields[f"{k}_pattern"].get(module, fields[f]) for k, f in (("rank", "r"), ("alpha", "lora_alpha"))
        )
        assert len(a) == rank
        model.get_submodule(module).weight.data += alpha / rank * b @ a
    tokens = torch.arange(SEQ)[None] + 65
    options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float64}
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", **options).eval()
    with in_float64():
        found, expected = (one(input_ids=tokens).logits for one in (merged, model.double()))
    torch.testing.assert_close(found, expected, rtol=0, atol=bound(256, torch.float32))  # files hold float32


FUSED = {
    "phi3": ("phi3", SMALL, ["qkv_proj", "gate_up_proj"]),
    "phi3, partly rotated": ("phi3", CLASSES["phi3, long"][1], ["qkv_proj", "gate_up_proj", "o_proj"]),
    "glm4": ("glm4", CLASSES["glm4"][1], ["q_proj", "gate_up_proj"]),
}


@pytest.mark.parametrize("name", FUSED)
def test_adapters_of_fused_tensors_are_read_from_one_pair_or_from_one_for_each_matrix(
    tmp_path: Path, name: str
) -> None:
    model_type, fields, ends = FUSED[name]
    base, folder = tmp_path / "hf", tmp_path / "peft"
    random_folder(model_type, fields | {"vocab_size": 257}, base)
    model, tensors = plain(base, ends)
    folder.mkdir()
    written = {name: tensor.detach().float() for name, tensor in tensors.items()}
    save_file(written, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 12, "base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ends}))
    tokens = torch.arange(SEQ)[None] + 65
    with in_float64():
        expected = model.eval()(input_ids=tokens).logits
    for number in range(2):  # the second time from what the first wrote
        settings = sizes(SEQ, 2, BATCH, 1) | {
            "model.from": str(folder), "optimizer.lr": 1e-30, "training.dtype": "float64", "checkpoint.enable": True,
            "checkpoint.interval": 1, "job.dump_folder": str(tmp_path / f"run{number}"), "data.tokenizer": "byte",
        }  # fmt: skip
        words = [f"--{key}={value}".lower() if value is True else f"--{key}={value}" for key, value in settings.items()]
        config = load_config(words)
        assert config.lora.rank == RANK
        with process_group(torch.device("cpu")):
            Trainer(prepare_run(resolve_settings(config, 1))).train()
        whole = ["to-hf", "--checkpoint", str(tmp_path / f"run{number}"), "--tokenizer", "none"]
        folder = tmp_path / f"out{number}"
        convert.main([*whole, "--output", str(folder)])
        convert.main([*whole, "--output", str(tmp_path / f"merged{number}"), "--merge"])
        merged = exact_model(tmp_path / f"merged{number}")
        with in_float64():
            found = merged(input_ids=tokens).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=bound(256, torch.float32))  # files hold float32
    first, second = (load_file(tmp_path / f"out{number}/adapter_model.safetensors") for number in range(2))
    assert first.keys() == second.keys() == tensors.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    fields = json.loads((folder / "adapter_config.json").read_text())
    module = next(module for module in fields["rank_pattern"] if module.endswith("gate_up_proj"))
    path, words = folder / "adapter_config.json", [*words, f"--model.from={folder}"]
    path.write_text(json.dumps(fields | {"alpha_pattern": fields["alpha_pattern"] | {module: 7}}))
    with pytest.raises(ConfigError, match=f"its alpha_pattern gives {module} 7, but only 24 can be read, of a fused"):
        prepare_run(resolve_settings(load_config(words), 1))
    path.write_text(json.dumps(fields))
    second[f"base_model.model.{module}.lora_B.weight"][0, -1] = 1  # of the gate by A of up
    save_file(second, folder / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=f"its {module} adapts rows that lora.modules leaves out, or"):
        prepare_run(resolve_settings(load_config(words), 1))


def add_mtp(folder: Path) -> None:
    """Add a layer of multi-token prediction to a folder of DeepSeek-V3, of four layers."""
    tensors = load_file(folder / "model.safetensors")
    hidden = len(tensors["model.norm.weight"])
    tensors |= {name.replace(".3.", ".4.", 1): t.clone() for name, t in tensors.items() if ".layers.3." in name}
    tensors |= {f"model.layers.4.{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors["model.layers.4.eh_proj.weight"] = torch.randn(hidden, 2 * hidden) / 8
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(fields))


def test_a_frozen_router_has_no_auxiliary_loss() -> None:
    router = Router(moe_config(balance="auxiliary", z_loss_coefficient=1.0)).double().train()
    nn.init.normal_(router.weight)
    router.loss_factor.fill_(1.0)
    gradients = []
    for is_trained in (True, False):
        router.weight.requires_grad_(is_trained)
        x = torch.ones(3, router.weight.shape[1], dtype=torch.float64, requires_grad=True)
        router(x).weights.sum().backward()  # 1, whatever x is
        gradients.append(x.grad.norm().item())
    assert gradients[0] > 1e-2 and gradients[1] < bound()


@pytest.mark.parametrize(
    ("peft", "changed", "words"),
    [
        ({"use_dora": True}, {}, "use_dora = true cannot be read"),
        ({"r": 8}, {}, "lora.rank = 4: .* has r = 8"),
        ({"use_bdlora": {"nblocks": 2}}, {}, "use_bdlora = .* cannot be read"),
        ({"revision": "v2"}, {}, 'revision = "v2" cannot be read'),
        ({"base_model_name_or_path": "/gone"}, {}, "its base /gone is neither"),
        ({"init_lora_weights": "pissa"}, {}, "changes the base"),
        (
            {},
            {"lora.modules": ["q_proj"]},
            r"lora.modules = .* has adapters of mlp\.down_proj, .*q_proj, .*; name these",
        ),
        ({}, {"lora.rank": 0, "lora.alpha": 16.0, "lora.modules": []}, "holds adapters; set it to 4"),
        ({}, {"checkpoint.initial_load_path": None}, "lora.rank = 4: adapters need the weights"),
    ],
)
def test_other_adapters_are_refused(tmp_path: Path, peft: dict[str, Any], changed: dict[str, Any], words: str) -> None:
    settings, *_ = prepared(tmp_path, "llama", **peft)
    with pytest.raises(ConfigError, match=words):
        prepare_run(resolve_settings(base_config(tmp_path, settings | changed), 1))
