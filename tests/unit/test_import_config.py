"""titan-import on files in the formats of five tools: what a run then has, and a line for every key."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.e2e.scripts import write_llama
from titan_like.commands.import_config import main
from titan_like.config import ConfigError, load_config
from titan_like.config.formulas import evaluate, names_in, parsed
from titan_like.config.load import setting
from titan_like.config.synonyms import tools
from titan_like.data.loading.batch_size import total_steps
from titan_like.models.registry import model_config
from titan_like.train.rules import resolve_settings

FILES = Path(__file__).parent / "foreign"
# File => number of processes, if it does not say it; settings that a person would write
RUNS = {
    "torchtitan_0.1_llama3_8b.toml": (64, {
        "model.flavor": "llama3.1_8b", "training.micro_batch_size": 1, "training.global_batch_size": 64,
        "training.dtype": "bfloat16", "lr_scheduler.decay": "linear", "parallelism.zero_stage": 3,
        "activation_checkpoint.mode": "selective", "data.paths": ["allenai/c4:en"], "metrics.tensorboard": True,
    }),
    "torchtitan_0.2_llama3_70b.toml": (64, {
        "model.flavor": "llama3.1_70b", "training.global_batch_size": 64, "parallelism.tensor_parallel_degree": 8,
        "parallelism.sequence_parallel": True, "lr_scheduler.decay": "linear", "float8.enable": True,
        "activation_checkpoint.mode": "full", "compile.enable": True, "evaluation.interval": 0,
    }),
    "torchtitan_0.3_debugmodel.json": (2, {
        "model.overrides": {"max_seq_len": 2048}, "training.global_batch_size": 16, "lr_scheduler.decay": "linear",
        "checkpoint.keep_latest": 10, "parallelism.pipeline_schedule": "1f1b", "health.hang_timeout_seconds": 100.0,
    }),
    "megatron_gpt3_175b.sh": (None, {
        "model.family": "gpt", "training.batch_size_rampup": [16, 16, 5859375], "training.dtype": "float16",
        "optimizer.betas": (0.9, 0.95), "lr_scheduler.warmup_steps": 430, "lr_scheduler.decay_steps": 430000,
        "lr_scheduler.min_lr_ratio": pytest.approx(0.1), "parallelism.pipeline_parallel_degree": 16,
        "data.tokenizer": "gpt2:VOCAB_FILE,MERGE_FILE", "data.dataset": "indexed", "checkpoint.enable": True,
    }),
    "megatron_llama3_8b_fp8.sh": (None, {
        "model.family": "llama", "training.samples": 1953125000, "lr_scheduler.warmup_steps": 30518,
        "training.reduce_dtype": "bfloat16", "float8.enable": True, "parallelism.sequence_parallel": False,
        "parallelism.zero_stage": 1, "checkpoint.folder": "checkpoints/llama3_8b_fp8", "profiling.trace_steps": [4],
    }),
    "megatron_mixtral_8x7b.sh": (None, {
        "model.family": "moe", "parallelism.expert_parallel_degree": 8, "optimizer.betas": (0.9, 0.999),
        "lr_scheduler.warmup_steps": 500, "metrics.wandb_project": "Mixtral", "metrics.run_name": "Mixtral_8x7B",
    }),
    "transformers_run_clm.json": (8, {
        "training.global_batch_size": 4 * 8 * 8, "lr_scheduler.warmup_steps": 60, "training.steps": 2000,
        "data.paths": ["wikitext:wikitext-2-raw-v1"], "parallelism.zero_stage": 3, "evaluation.interval": 200,
        "activation_checkpoint.mode": "full", "optimizer.betas": (0.9, 0.95), "metrics.wandb": True,
    }),
    "transformers_training_arguments.json": (1, {
        "training.epochs": 1.0, "optimizer.betas": (0.9, 0.999), "optimizer.weight_decay": 0.0, "job.seed": 42,
        "lr_scheduler.decay": "linear", "lr_scheduler.warmup_steps": 100, "checkpoint.interval": 500,
    }),
    "nanogpt_train_gpt2.py.txt": (None, {
        "training.global_batch_size": 480, "optimizer.lr": 6e-4, "lr_scheduler.min_lr_ratio": pytest.approx(0.1),
        "lr_scheduler.warmup_steps": 2000, "optimizer.betas": (0.9, 0.95), "compile.enable": True,
        "training.dtype": "bfloat16", "evaluation.steps": 5,
    }),
    "nanogpt_shakespeare_char.py.txt": (None, {
        "training.global_batch_size": 64, "data.tokenizer": "byte", "optimizer.betas": (0.9, 0.99),
        "training.seq_len": 256, "evaluation.steps": 200, "metrics.wandb": False,
    }),
    "nanogpt_finetune.py.txt": (None, {
        "model.from_": "openai-community/gpt2-xl", "lr_scheduler.decay": "constant", "training.global_batch_size": 32,
    }),
    "axolotl_fft_8b.yaml": (8, {
        "training.global_batch_size": 64, "data.split": "980,20,0", "optimizer.lr": 2e-5, "training.epochs": 1.0,
        "data.dataset": "conversations", "data.reset_attention_mask": True, "parallelism.zero_stage": 3,
    }),
    "axolotl_lora_1b.yml": (1, {
        "lora.rank": 16, "lora.alpha": 32.0, "lora.dropout": 0.05, "training.global_batch_size": 4,
        "training.dtype": "bfloat16", "optimizer.name": "adamw", "parallelism.zero_stage": 0,
    }),
}  # fmt: skip
SHAPES = {
    "megatron_gpt3_175b.sh": {"num_layers": 96, "hidden_size": 12288, "vocab_size": 50257, "dropout": 0.1,
                              "tied_embeddings": True},
    "megatron_llama3_8b_fp8.sh": {"num_kv_heads": 8, "rope_theta": 1e6, "norm": "layer", "norm_offset": True,
                                  "mlp_bias": False, "attention_bias": "none", "activation": "silu"},
    "megatron_mixtral_8x7b.sh": {"num_experts": 8, "experts_per_token": 2, "norm": "rms", "balance": "auxiliary"},
    "nanogpt_shakespeare_char.py.txt": {"num_layers": 6, "hidden_size": 384, "dropout": 0.2, "vocab_size": 257},
}  # fmt: skip
PROCESSES = {"megatron_gpt3_175b.sh": 128, "megatron_llama3_8b_fp8.sh": 8, "megatron_mixtral_8x7b.sh": 64}
FOLDERS = ("NousResearch/Meta-Llama-3.1-8B", "NousResearch/Llama-3.2-1B")


def keys_of(path):
    """The names of a file's settings, read in a simpler way."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".sh":
        return {name.replace("-", "_") for name in re.findall(r"(?<![\w-])--([a-z][\w-]*)", text)}
    if path.suffix == ".txt":
        return set(re.findall(r"^(\w+) ?=", text, re.MULTILINE))
    tree = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)

    def leaves(value, name):
        value = value[0] if isinstance(value, list) and value and isinstance(value[0], dict) else value
        if not isinstance(value, dict) or not value:
            return {name}
        return set().union(*(leaves(item, f"{name}.{key}".lstrip(".")) for key, item in value.items()))

    return leaves(tree, "")


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_the_settings_of_the_file(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder in FOLDERS:
        write_llama(tmp_path / folder)
    gpus, expected = RUNS[name]
    arguments = [str(FILES / name), "--output=my.toml", *([f"--gpus={gpus}"] if gpus else [])]
    assert main(arguments) == 0
    told = capsys.readouterr()
    parts = re.split(r"\n(?=\S)", told.out)
    lines = [line for part in parts if "defaults" not in part for line in part.splitlines() if line.startswith("  ")]
    keys = [re.match(r"  ([\w.]+)( = |: )", line)[1] for line in lines if not line.startswith("  bias")]
    assert len(keys) == len(set(keys)) and set(keys) ^ keys_of(FILES / name) <= {"model_name_or_path"}
    assert "not a key that" not in told.out
    tree = tomllib.loads((tmp_path / "my.toml").read_text(encoding="utf-8"))
    if (source := tree["model"].get("from") if "model" in tree else None) and source not in FOLDERS:
        assert f"(not checked with its model: {source} is not a folder here)" in told.err
        del tree["model"]["from"]
        expected = {key: value for key, value in expected.items() if key != "model.from_"}
    config = load_config([], stored=tree)
    assert {key: setting(config, key) for key in expected} == expected
    if name in SHAPES:
        assert SHAPES[name].items() <= model_config(config.model).model_dump().items()
    if config.training.epochs is None:
        assert total_steps(config.training) > 0
    if source is None or source in FOLDERS:
        resolve_settings(config, gpus or PROCESSES.get(name, 1))


def imported(tmp_path, text, *arguments):
    (tmp_path / "settings").write_text(text, encoding="utf-8")
    main([str(tmp_path / "settings"), f"--output={tmp_path / 'my.toml'}", *arguments])
    return tomllib.loads((tmp_path / "my.toml").read_text(encoding="utf-8"))


def test_a_shell_script_s_variables_are_resolved(tmp_path):
    script = """
    N=$((2 * 2)) ; export LR=${LR:-"3e-4"}
    ARGS="--num-layers 4 --hidden-size=64 \\
        --num-attention-heads 4 --seq-length ${SEQ:-${LEN:-32}} --max-position-embeddings 32  # comment --fp16
    "
    DATA=( --data-path 0.3 $WEB/a 0.7 $1 --split '9,1,0' "--save out" )
    torchrun --nproc_per_node=$N pretrain_gpt.py $ARGS --micro-batch-size 2 --train-iters 7 --lr $LR "${DATA[@]}" &> x
    """.replace(" ; export", "\n    export")
    tree = imported(tmp_path, script)
    assert tree["training"] == {"seq_len": 32, "micro_batch_size": 2, "global_batch_size": 8, "steps": 7}
    assert tree["data"]["paths"] == [0.3, "WEB/a", 0.7, "ARGUMENT_1"]
    assert (tree["data"]["split"], tree["optimizer"]["lr"], tree["checkpoint"]["folder"]) == ("9,1,0", 3e-4, "out")


def test_python_is_computed_but_never_run(tmp_path, capsys):
    code = f"""
batch_size = (n := 4)
block_size = 2 ** 5
learning_rate = 3 * 1e-4
gradient_accumulation_steps = 5 * 8 // 4 - 2
max_iters = lr_decay_iters = 100
warmup_iters = max_iters // 10
out_dir = "a" + "b"
wandb_run_name = open({str(tmp_path / "made")!r}, "w").name
dropout = 9 ** 9 ** 9
"""
    tree = imported(tmp_path, code)
    assert tree["training"] == {"seq_len": 32, "micro_batch_size": 12, "global_batch_size": 96, "steps": 100,
                                "dtype": "bfloat16"}  # fmt: skip
    assert (tree["optimizer"]["lr"], tree["lr_scheduler"]["warmup_steps"]) == (pytest.approx(3e-4), 10)
    assert tree["job"]["dump_folder"] == "ab" and not (tmp_path / "made").exists()
    told = capsys.readouterr().out
    assert all(f"{name}: is not a literal" in told for name in ("batch_size", "wandb_run_name", "dropout"))


REFUSED = {
    "hello": "is no file with settings of torchtitan, Megatron-LM",
    "": "is no file with settings of",
    "on: push\njobs: {a: {steps: []}}": "is no file with settings of",
    "config = Trainer.Config(training=1)": "is torchtitan's Python code; set debug.save_config_file",
    "[training]\nsteps = 1\nseq_len = 8\n[data]\ndataset = 'text'": "is a TOML of titan_like already",
    '{"learning_rate": 1e-4, "output_dir": "x", "max_steps": 5}': "--gpus 8",
    "--micro-batch-size 1 --global-batch-size 2": "training.steps = (not set): the file gives the run no length",
    "n_layer = [[None]]\nn_head = 2\nmax_iters = 3": "model.flavors.imported.num_layers = (not set): field required",
    "a: &a [x]\nbase_model: *a\nlora_r: 1": "is no file with settings of",
    "[model]\nname = 'llama4'\nflavor = '17bx16e'\n[training]\nglobal_batch_size = 8": "unknown flavor of decoder",
    "A=x\n" + "A=$A$A\n" * 60 + "run --num-layers $A --lr 1 --seq-length 2": "is no file with settings of",
    "a = 'x'\n" + "a = a + a\n" * 60 + "max_iters = a\n": "is no file with settings of",
}


@pytest.mark.parametrize("text", REFUSED)
def test_other_files_get_one_sentence(text, tmp_path):
    with pytest.raises(ConfigError) as error:
        imported(tmp_path, text)
    assert REFUSED[text] in str(error.value)


def test_what_cannot_be_taken_is_told(tmp_path, capsys):
    arguments = {"max_steps": 10, "learning_rate": 1e-4, "optim": "lion_32bit", "lr_scheduler_type": "polynomial",
                 "label_smoothing_factor": 0.1, "hub_token": "hf_abc", "someday": 1}  # fmt: skip
    tree = imported(tmp_path, json.dumps(arguments), "--gpus=1")
    told = capsys.readouterr().out.partition("not there:")[2]
    words = ['optim = "lion_32bit": optimizer.name', "lr_scheduler_type = ", "label_smoothing_factor = 0.1: the loss"]
    assert all(word in told for word in [*words, "someday = 1: is not a key", "hub_token = …"])
    assert "hf_abc" not in told + (tmp_path / "my.toml").read_text() and "name" not in tree["optimizer"]


BATCH = '"per_device_train_batch_size": 1, "learning_rate": 1e-4, "train_file": "a.txt", "block_size": 8'
MEGATRON = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8\\\n"
MEGATRON += "--micro-batch-size 1 --global-batch-size 1 --train-iters 9 --lr 1e-3"
UNKNOWN = "the length in steps is not known; set"
AXOLOTL = "base_model: a/b\nsequence_len: 8\nmicro_batch_size: 1\ngradient_accumulation_steps: 1\nlearning_rate: 1e-4\n"
IN_OTHER_UNITS = {
    f'{{{BATCH}, "warmup_ratio": 0.1}}': (f"warmup_ratio = 0.1: {UNKNOWN} lr_scheduler.warmup_steps", {}),
    f'{{{BATCH}, "save_strategy": "epoch", "eval_strategy": "epoch"}}': (
        "eval_strategy = \"epoch\": the length of an epoch in steps is not known; set evaluation.interval", {}),
    f'{{{BATCH}, "max_steps": 200, "save_steps": 0.25, "eval_strategy": "steps", "eval_steps": 0.1}}': (
        "checkpoint.interval = 50", {"checkpoint.interval": 50, "evaluation.interval": 20}),
    f'{{{BATCH}, "fsdp": "hybrid_shard auto_wrap"}}': ("", {"parallelism.zero_stage": 3}),
    f"{AXOLOTL}save_steps: 0.5\neval_steps: 0.05": (f"save_steps = 0.5: {UNKNOWN} checkpoint.interval", {}),
    f"{AXOLOTL}val_set_size: 500": ("val_set_size = 500: a number of records is no share", {}),
    "max_iters = 2000\nn_layer = 2\nlearning_rate = 1e-3\nbatch_size = 2\nwarmup_iters = 5": (
        "lr_scheduler.decay_steps = 600000", {"lr_scheduler.decay_steps": 600000}),
    f"{MEGATRON} --position-embedding-type none": ('"gpt"; positions are learned (gpt) or rotary', {}),
    f"{MEGATRON} --num-experts 4 --swiglu --disable-bias-linear": ("rotary_fraction: positions are learned", {}),
    f"{MEGATRON} --load elsewhere": ("the weights of Megatron's own checkpoints are not read", {}),
}  # fmt: skip


@pytest.mark.parametrize("text", IN_OTHER_UNITS)
def test_shares_and_epochs_are_not_taken_for_steps_nor_left_out_in_silence(text, tmp_path, capsys):
    told, settings = IN_OTHER_UNITS[text]
    config = load_config([], stored=imported(tmp_path, text, "--gpus=1") | {"model": {}})
    assert told in capsys.readouterr().out
    assert {key: setting(config, key) for key in settings} == settings


def test_formulas_are_pythons(tmp_path):
    values = {"a": 3, "b.c": 4.0, "s": "x y", "n": None}
    plain = {"a": 3, "b": type("b", (), {"c": 4.0}), "s": "x y", "n": None}
    arithmetic = ("a * b.c - 1", "a // 2 if a > 2 else None", "-a % 2", "round(a / 7)", "max(1, a)", "a ** 2 <= 9")
    for formula in (
        *arithmetic,
        "n or a",
        "n and a",
        "not n",
        "'x' in s",
        "[a, b.c, 'q']",
        "a not in [1]",
        "a is True",
    ):
        assert evaluate(parsed(formula), values.__getitem__) == eval(formula, {}, plain)
    assert names_in("max(a, b.c) if s in [n, a] else round(1)") == ["s", "n", "a", "b.c"]
    for formula in ("__import__('os')", "[x for x in s]", "a.__class__()", "'x' * 10 ** 9", "'%9d' % a", "lambda: 1"):
        with pytest.raises((ValueError, KeyError)):
            evaluate(parsed(formula), values.__getitem__)


def test_the_tables_are_whole():
    for tool in tools().values():
        used = {name for formula in tool.keys.values() for name in names_in(formula)}
        assert tool.defaults.keys() <= used | {name.removeprefix("!") for name in tool.missing}
        assert not tool.needless.keys() & used
        assert all(tool.knows(name) for name in tool.same.values())
