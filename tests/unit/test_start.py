"""`model.from` gives a run all that its folder says, and refuses settings that say something else."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from tests.unit.hugging_face_cases import bert_config, llama_config, random_model, save_checkpoint
from titan_like.checkpoint.loader import CheckpointWeights
from titan_like.commands import convert
from titan_like.config import ConfigError, load_config
from titan_like.config.load import edit
from titan_like.config.schema import JobConfig, LoRA
from titan_like.data.text.tokenizer import tokenizer_of
from titan_like.evaluate.inference import config_of_checkpoint, find_checkpoint, load_for_inference
from titan_like.hugging_face.origin import origin_files
from titan_like.models.registry import model_config
from titan_like.planner.commands.search import run_as_toml
from titan_like.search.trial import settings_of
from titan_like.train.initial_weights import base_state, check_initial_weights, initial_folder
from titan_like.train.setup import check_folders

LLAMA = llama_config(vocab_size=300, rope_theta=700.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder with the tokenizer of bytes."""
    save_checkpoint(tmp_path / "run", random_model(LLAMA).float())
    convert.main(["to-hf", "--checkpoint", str(tmp_path / "run"), "--output", str(tmp_path / "hf")])
    return tmp_path / "hf"


def from_(folder: Path, *settings: str) -> JobConfig:
    return load_config([f"--model.from={folder}", f"--job.dump_folder={folder.parent}/more", *settings])


@pytest.mark.parametrize("source", ["hf", "run/step-1", "run"])
def test_one_key_gives_model_tokenizer_and_weights(folder: Path, source: str) -> None:
    path = folder.parent / source
    settings = ["--model.overrides.max_seq_len=32", "--model.overrides.init_std=0.5", "--parallelism.zero_stage=1"]
    config = from_(path, *settings)
    model = model_config(config.model)
    assert model == LLAMA.model_copy(update={"max_seq_len": 32, "init_std": 0.5})
    assert tokenizer_of(config.data, model.vocab_size).eod_id == 256
    assert config.data.tokenizer == ("byte" if source != "hf" else f"{folder}/tokenizer.json")
    assert config.checkpoint.initial_load_path == str(path)
    check_initial_weights(config, model)
    # As a TOML it is short again, and as arguments complete.
    toml = folder.parent / "best.toml"
    toml.write_text(run_as_toml(config, 1, toml, []))
    assert "[model.flavors" not in toml.read_text()
    assert load_config([f"--job.config_file={toml}"]).model_dump()["model"] == config.model_dump()["model"]
    assert load_config(settings_of(config)).model == config.model


def test_what_contradicts_the_folder_is_refused_all_at_once(folder: Path) -> None:
    keys = ["model.family=gpt", "model.flavor=debug", "model.overrides.num_layers=2", "model.overrides.dropout=0.1"]
    with pytest.raises(ConfigError) as error:
        from_(folder, *(f"--{key}" for key in [*keys, "data.tokenizer=byte", "checkpoint.initial_load_path=x"]))
    lines = [line.strip() for line in str(error.value).splitlines()]
    assert lines == [
        f'model.family = "gpt": {folder} gives llama; leave it out',
        f'model.flavor = "debug": {folder} gives its own shape; leave it out',
        f'checkpoint.initial_load_path = "x": {folder} gives the weights; leave it out',
        lines[3],
        f'data.tokenizer = "byte": {folder} gives {folder}/tokenizer.json, which makes other tokens; leave it out',
    ]
    assert lines[3].startswith("model.overrides.dropout = 0.1: unknown field")
    with pytest.raises(ConfigError, match=r"^model\.overrides\.norm_eps = 0\.01: .* gives 1e-05; leave it out$"):
        from_(folder, "--model.overrides.norm_eps=0.01")
    same = shutil.copytree(folder, folder.parent / "copy")  # of the tokenizer, too
    kept = from_(folder, "--model.family=llama", "--model.overrides.num_layers=3", f"--data.tokenizer={same}")
    assert kept.data.tokenizer == str(same)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"^data\.tokenizer = \(not set\): .*/hf has no tokenizer, "):
        from_(folder)
    assert from_(folder, "--data.dataset=indexed").data.tokenizer == "byte"


YARN = {"type": "yarn", "factor": 4.0, "original_max_seq_len": 64}


@pytest.mark.parametrize("source", ["hf", "run/step-1"])
def test_rotary_positions_may_be_others_to_extend_the_context(folder: Path, source: str) -> None:
    yarn = [f"--model.overrides.rope_scaling.{key}={value}" for key, value in YARN.items()]
    config = from_(
        folder.parent / source, "--model.overrides.rope_theta=1e6", *yarn, "--model.overrides.max_seq_len=256"
    )
    model = model_config(config.model)
    assert model == type(LLAMA).model_validate(
        LLAMA.model_dump() | {"rope_theta": 1e6, "rope_scaling": YARN, "max_seq_len": 256}
    )
    check_initial_weights(config, model)
    loaded = load_for_inference(config, find_checkpoint(config), torch.device("cpu"))
    weights = CheckpointWeights(folder.parent / "run/step-1")
    assert torch.equal(loaded.state_dict()["norm.weight"], weights.read("norm.weight"))
    save_checkpoint(folder.parent / "longer", loaded)
    convert.main(
        ["to-hf", f"--checkpoint={folder.parent}/longer", f"--output={folder.parent}/back", "--tokenizer=none"]
    )
    fields = json.loads((folder.parent / "back/config.json").read_text())
    assert (fields["rope_theta"], fields["rope_scaling"]["factor"], fields["max_position_embeddings"]) == (
        1e6,
        4.0,
        256,
    )


def test_rotary_positions_of_kinds_of_layers_are_set_by_kind(tmp_path: Path) -> None:
    kinds = {"full": {"rope_theta": 1e6}, "near": {"window": 8, "rope_theta": 1e4}}
    shape = LLAMA.model_dump() | {"layer_pattern": ["near", "full"], "kinds": kinds}
    path = save_checkpoint(tmp_path / "run", random_model(type(LLAMA).model_validate(shape)).float())
    with pytest.raises(ConfigError, match=r"rope_theta = 5: .*; for rotary positions set rope_theta of model\.overr"):
        from_(path, "--model.overrides.rope_theta=5")
    keys = ["full.rope_theta=5e6", "near.rope_theta=1e4"]
    config = from_(path, *(f"--model.overrides.kinds.{key}" for key in [*keys, "near.window=8"]))
    check_initial_weights(config, model := model_config(config.model))
    assert model.kinds["full"].rope_theta == 5e6
    with pytest.raises(ConfigError, match=r"model\.overrides\.kinds = .*; leave it out$"):
        from_(path, *(f"--model.overrides.kinds.{key}" for key in [*keys, "near.window=9"]))


def test_fields_of_config_json_can_be_left_out(folder: Path, capsys: pytest.CaptureFixture) -> None:
    """All that is refused is named at once, as it has to be named to be left out."""
    fields = json.loads((folder / "config.json").read_text())
    scaling = {"rope_type": "ntk", "factor": 2.0}
    strange = {"hidden_act": "mish", "rope_scaling": scaling, "attention_chunk_size": 64, "architectures": ["X"]}
    (folder / "config.json").write_text(json.dumps(fields | strange | {"attn_factor": 2, "resid_pdrop": 0.1}))
    with pytest.raises(ConfigError) as error:
        from_(folder)
    reasons = str(error.value).split("; ")
    assert "\n" not in str(error.value) and len([text for text in reasons if " has " in text]) == 4
    assert all(f" {name} = " in str(error.value) for name in ("hidden_act", "rope_scaling.rope_type", "architectures"))
    names = ["hidden_act", "rope_scaling.rope_type", "attention_chunk_size", "architectures"]
    setting = f"--model.ignore_fields={json.dumps(names)}"
    config = from_(folder, setting)
    check_initial_weights(config, model := model_config(config.model))
    assert model == LLAMA
    said = [line for line in capsys.readouterr().err.splitlines() if "ignored" in line]
    assert said == [
        f"{folder}/config.json: ignored {', '.join(names)} (ignore_fields); resid_pdrop = 0.1 (decoders here have no "
        "dropout); attn_factor = 2, rope_scaling.factor = 2.0 (transformers' LlamaForCausalLM does not read it)"
    ]
    with pytest.raises(ConfigError, match=r"config\.json has no hiden_act, which ignore_fields names"):
        from_(folder, '--model.ignore_fields=["hiden_act"]')
    with pytest.raises(ConfigError, match=r"ignore_fields = .*/run/step-1 is a checkpoint, which has no config\.json"):
        from_(folder.parent / "run", setting)
    files = origin_files(folder, config.data, names)
    files = {name: content for name, content in files.items() if name == "hugging_face.json"}
    options = ["--input", str(folder), "--output", f"{folder.parent}/imported", "--ignore_fields", *names]
    assert convert.main(["from-hf", *options]) == 0
    for content in ((folder.parent / "imported/step-0/hugging_face.json").read_bytes(), *files.values()):
        kept = json.loads(content)["config"]  # and goes out again with an export
        assert kept["attn_factor"] == 2 and not kept.keys() & set(names) and "rope_type" not in kept["rope_scaling"]


def test_a_run_stands_for_its_newest_checkpoint(folder: Path) -> None:
    """What --checkpoint takes: the dump folder, its checkpoints, one of them; complete ones, at any start."""
    (folder.parent / "empty/step-1").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r'empty": neither a checkpoint.* dump folder$'):
        from_(folder.parent / "empty")
    steps = folder.parent / "dump/checkpoint"
    shutil.copytree(folder.parent / "run", steps)
    newest = save_checkpoint(steps, random_model(LLAMA, seed=7).float(), step=30)
    (steps / "step-31.unfinished").mkdir()
    shutil.copytree(newest, folder.parent / "best")
    for source, path in {steps.parent: newest, steps: newest, newest: newest, "best": folder.parent / "best"}.items():
        config = from_(folder.parent / source)
        checked = check_folders(config, model_config(config.model), make=False)
        assert checked.checkpoint.initial_load_path == str(path), source
        model, weights = (
            load_for_inference(config, find_checkpoint(config), torch.device("cpu")),
            CheckpointWeights(path),
        )
        assert all(torch.equal(parameter, weights.read(name)) for name, parameter in model.named_parameters())


def test_another_length_is_a_new_run_whose_weights_the_message_names(folder: Path) -> None:
    shape = LLAMA.model_dump(mode="json", exclude_none=True)
    run = {"model": {"family": "llama", "flavor": "x", "flavors": {"x": shape}}, "training": {"seq_len": 32}}
    saved = save_checkpoint(folder.parent / "long/checkpoint", random_model(LLAMA).float(), **run)
    again = JobConfig.model_validate(
        run | {"job": {"dump_folder": str(folder.parent / "long")}, "checkpoint": {"enable": True}}
    )
    longer = edit(again, {"training.seq_len": 512, "model.overrides": {"max_seq_len": 512}})
    with pytest.raises(
        ConfigError, match=rf'; keep that, or .*: model\.from = "{saved}", another job\.dump_fol'
    ) as error:
        check_folders(longer, model_config(longer.model), make=False)
    words = ["--training.seq_len=512", "--model.overrides.max_seq_len=512"]
    config = from_(Path(re.findall(r'model\.from = "(.*?)"', str(error.value))[0]), *words)
    check_folders(config, model_config(config.model), make=False)
    assert model_config(config.model).max_seq_len == 512


def peft(folder: Path, **fields: Any) -> Path:
    """A PEFT folder for two of the modules in each layer of ``folder``."""
    path, tensors, rows = folder.parent / "peft", dict[str, torch.Tensor](), {"q_proj": 64, "v_proj": 32}
    for layer in range(LLAMA.num_layers):
        for name, size in rows.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora"
            tensors |= {f"{prefix}_A.weight": torch.ones(4, 64), f"{prefix}_B.weight": torch.ones(size, 4)}
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 12, "base_model_name_or_path": str(folder)}
    (path / "adapter_config.json").write_text(json.dumps(settings | fields))
    return path


@pytest.mark.parametrize("targets", [["v_proj", "q_proj"], "all-linear", r".*self_attn\.[qv]_proj", None])
def test_a_peft_folder_gives_its_adapters(folder: Path, targets: Any) -> None:
    modules = ["q_proj", "v_proj"] if isinstance(targets, list) else ["self_attn.q_proj", "self_attn.v_proj"]
    path = peft(folder, target_modules=targets)
    config = from_(path, "--parallelism.zero_stage=1")
    assert config.lora == LoRA(rank=4, alpha=12, modules=modules)
    check_initial_weights(config, model_config(config.model))
    toml = folder.parent / "run.toml"  # what is written out is short
    toml.write_text(run_as_toml(config, 1, toml, []))
    assert "[lora]" not in toml.read_text() and load_config([f"--job.config_file={toml}"]).lora == config.lora
    for setting in ("lora.rank=8", "lora.alpha=16", "lora.rank=0"):
        key, value = setting.split("=")
        with pytest.raises(ConfigError, match=rf"^{key} = {value}(\.0)?: {path} gives (4|12\.0); leave it out$"):
            from_(path, f"--{setting}")
    same = from_(path, '--lora.modules=["self_attn.q_*", "v_proj"]')
    check_initial_weights(same, model_config(same.model))
    other = from_(path, "--lora.modules=q_proj", "--lora.dropout=0.1")
    with pytest.raises(
        ConfigError, match=rf"^lora\.modules = \['q_proj'\]: {path} has adapters of {', '.join(modules)}; na"
    ):
        check_initial_weights(other, model_config(other.model))


def test_a_run_of_a_peft_folder_goes_on_without_it(folder: Path) -> None:
    config = from_(peft(folder), "--checkpoint.enable=true")
    state: dict[str, Any] = json.loads((folder.parent / "run/step-1/run.json").read_text())
    state |= {"config": config.model_dump(mode="json"), "base": base_state(str(folder.parent / "peft"))}
    saved = Path(shutil.copytree(folder.parent / "run/step-1", folder.parent / "more/checkpoint/step-1"))
    (saved / "run.json").write_text(json.dumps(state))
    shutil.rmtree(folder.parent / "peft")
    again = from_(folder.parent / "peft", "--checkpoint.enable=true")
    assert again.lora == config.lora
    checked = check_folders(again, model_config(again.model), make=False)
    assert checked.checkpoint.initial_load_path == str(folder)


def test_a_head_that_the_folder_lacks_may_be_added(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "run", random_model(bert_config(norm_placement="post", vocab_size=300)).float())
    untied = "--model.overrides.tied_embeddings=false"  # without an output matrix
    config = from_(tmp_path / "run/step-1", "--model.overrides.sentence_head=choice", untied)
    model = model_config(config.model)
    assert model.predictions == ("choice",)
    check_initial_weights(config, model)


def test_a_run_goes_on_without_the_folder(folder: Path) -> None:
    enable = ["--checkpoint.enable=true", "--model.overrides.vocab_multiple=64"]
    config = from_(folder, *enable, "--model.overrides.init_std=0.5")
    state: dict[str, Any] = json.loads((folder.parent / "run/step-1/run.json").read_text())
    state["config"] = config.model_dump(mode="json")
    state.pop("crc32", None)
    saved = Path(shutil.copytree(folder.parent / "run/step-1", folder.parent / "more/checkpoint/step-1"))
    (saved / "run.json").write_text(json.dumps(state))
    shutil.copy(folder / "tokenizer.json", saved)
    shutil.rmtree(folder)
    again = from_(folder, *enable)
    assert model_config(again.model) == LLAMA.model_copy(
        update={"vocab_multiple": 64}
    )  # without the override, which the run now lacks
    assert again.data.tokenizer == f"{saved}/tokenizer.json"
    with pytest.raises(ConfigError, match=rf'^model\.from = "{folder}": neither a checkpoint'):
        from_(folder)  # which would begin anew
    read = config_of_checkpoint(str(saved.parent), [])
    assert model_config(read.model) == model_config(config.model) and read.model.from_ is None


def test_a_folder_is_read_as_a_checkpoint_is(folder: Path) -> None:
    weights = CheckpointWeights(folder.parent / "run/step-1")
    for config in (config_of_checkpoint(str(folder), []), from_(folder)):
        path = find_checkpoint(config)
        model = load_for_inference(config, path, torch.device("cpu"))
        assert path == folder
        for name, parameter in model.named_parameters():
            rows = LLAMA.vocab_size if name in ("embedding.weight", "output.weight") else None
            assert torch.equal(parameter[:rows], weights.read(name)[:rows]), name


def test_of_the_hub_only_small_files_are_fetched_until_weights_are_needed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, asked = folder.parent / "cache", list[list[str]]()

    def download(name: str, allow_patterns: list[str], local_files_only: bool = False) -> str:
        if not local_files_only:
            asked.append(allow_patterns)
            cache.mkdir(exist_ok=True)
            for pattern in allow_patterns:
                for file in folder.glob(pattern):
                    shutil.copy(file, cache)
        return str(cache)

    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    config = load_config(["--model.from=org/name"])
    assert model_config(config.model) == LLAMA
    assert (cache / "config.json").is_file() and not list(cache.glob("*.safetensors*"))
    assert (initial_folder("org/name") / "model.safetensors").is_file() and len(asked) == 2
