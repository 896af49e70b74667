"""Whether a model trains on some GPUs: layout, batch, days, cost, and a TOML to train from. It needs no file.

The global batch is the critical one, beyond which a larger batch saves few steps: 22.91 D^0.47 sequences of 512 tokens
for D million tokens (Zhang et al. 2024, arXiv 2410.21676), rounded down to a number that the GPUs share well. The peak
learning rate is 0.3118 C^-0.125 for C = 6ND FLOPs (DeepSeek LLM, arXiv 2401.02954). Without --tokens it is 20 tokens
for each active parameter (Chinchilla, arXiv 2203.15556). Any --section.key on the command line stays as it is.
"""

import argparse
import difflib
import re
import shlex
import tempfile
from math import log
from pathlib import Path
from typing import Any

from titan_like.config import ConfigError, JobConfig
from titan_like.config.entry_points import names_of
from titan_like.config.errors import require
from titan_like.config.load import edit, parse_overrides
from titan_like.config.options import OptionParser, as_installed, url_option, write_output_file
from titan_like.config.schema import Model
from titan_like.data.loading.batch_size import total_steps
from titan_like.metrics.console import ProgressLines
from titan_like.models.registry import flavors, model_config
from titan_like.planner.auto import described
from titan_like.planner.commands import microbenchmark, outcome, search
from titan_like.planner.commands.capacity import fewest_nodes
from titan_like.planner.profile import Profile
from titan_like.planner.search_space import SEARCHED, STAGE_SIZES, divisors
from titan_like.planner.stack import profile_of
from titan_like.train.environment import environment_number

_SIZE = re.compile(r"(\d+\.?\d*)([mbt])", re.IGNORECASE)
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
_SAME = 0.05  # a flavor whose parameters differ by less from the size is taken as it is
_CHINCHILLA = 20  # tokens per parameter
_SEQ_LEN = 4096
_BANDWIDTH = dict.fromkeys(("H100", "H200", "H800", "B200"), 400.0)  # GB/s of a node with eight cards of 400 Gb/s
_LENGTHS = frozenset(f"training.{name}" for name in ("steps", "samples", "tokens", "epochs", "batch_size_rampup"))


def add_options(parser: OptionParser) -> None:
    """Add the options that are not settings of the run."""
    search.add_options(parser)
    parser.description = __doc__
    parser.set_defaults(top=2)
    text = 'a size such as "7b", a flavor such as "llama3.1_8b", or a Hugging Face folder'
    parser.add_path("--model", text, "MODEL", type=url_option)
    parser.add_argument("--gpu", help='such as "A100-80GB" (default: this machine, which is measured)')
    text = "GB/s of all network cards of a node in one direction: 200 for a DGX A100, 400 for a DGX H100"
    parser.add_number("--bandwidth", float, least=1e-3, most=1e5, help=text)


def run(options: argparse.Namespace, settings: list[str]) -> outcome.Outcome:
    """Answer on one screen. The exit status is 1 if the model does not fit."""
    given, words = parse_overrides(settings), list[str]()
    for key in given.keys() & _LENGTHS:
        raise ConfigError(key, given[key], "use --tokens")
    names_model = given.keys() & {"model.flavor", "model.from", "job.config_file"}
    require(names_model or options.model or options.params, "--model", None, 'name one, such as "7b"')
    if options.model or not names_model:
        words = model_settings(options, str(given.get("model.family", "llama")))
    named = {"gpu": options.gpu, "node_bandwidth": options.bandwidth}
    words += [f"--cluster.{name}={value}" for name, value in named.items() if value]
    with tempfile.TemporaryDirectory() as folder:
        if not (options.gpu or options.profile or given.keys() & {"cluster.gpu", "cluster.profile", "job.config_file"}):
            path = Path(options.out or Path(folder) / "machine.toml").with_suffix(".profile.toml")
            measured = microbenchmark.run(argparse.Namespace(out=str(path)), [])
            if environment_number("RANK", 0):
                return measured
            write_output_file(path, measured.files[path])
            options.profile = str(path)
        return answer(options, given, [*words, *settings])


def model_settings(options: argparse.Namespace, family: str) -> list[str]:
    """The settings that --model stands for, or a size's nearest flavor; sets --params if that has to be scaled."""
    name = options.model or f"{options.params / 1e9:f}b"
    if not (size := _SIZE.fullmatch(name)):
        if "/" in name or Path(name).is_dir():
            return [f"--model.from={name}"]
        families = {flavor: family for family in names_of("model.family")[::-1] for flavor in flavors(family)}
        near = ", ".join(difflib.get_close_matches(name, families, 3, 0.3))
        require(name in families, "--model", name, f'no such flavor; near are {near}, or give a size such as "7b"')
        return [f"--model.family={families[name]}", f"--model.flavor={name}"]
    parameters = float(size[1]) * _UNITS[size[2].lower()]
    sections = [Model(family=family, flavor=flavor) for flavor in flavors(family) if "debug" not in flavor]
    sizes = {section.flavor: model_config(section).num_parameters() for section in sections}
    nearest = min(sizes, key=lambda flavor: abs(log(sizes[flavor] / parameters)))
    if abs(sizes[nearest] / parameters - 1) > _SAME:
        options.params = parameters
    return [f"--model.family={family}", f"--model.flavor={nearest}"]


def answer(options: argparse.Namespace, given: dict[str, Any], settings: list[str]) -> outcome.Outcome:
    """The answer, once the model and the machine are known."""
    config, profile, tokens = search.asked(options, settings)
    model, stack = model_config(config.model), profile_of(config, profile)
    options.tokens = tokens or float(_CHINCHILLA * model.active_parameters)
    options.gpus = options.gpus or stack.gpus_per_node
    config = completed(search.asked(options, settings)[0], stack, options)
    training, device, critical = config.training, stack.device, critical_batch(options.tokens)
    samples, steps = training.global_batch_size, total_steps(training)
    batch = samples * training.seq_len
    require(steps, "--tokens", options.tokens, f"is less than a batch of {batch:,}")
    name, length = f"{config.model.family} {config.model.flavor}", outcome.billions(options.tokens)
    notes = [
        f"{name}: {outcome.sized(model)}, sequences of {training.seq_len:,} tokens, {training.dtype}",
        f"batch: {samples:,} sequences = {outcome.billions(batch)} tokens, {steps:,} steps; critical "
        f"for {length} tokens: {outcome.billions(critical)} (Zhang et al. 2024, arXiv 2410.21676)",
    ]
    if options.gpus > 1:
        node = config.cluster.node_bandwidth or stack.node_bandwidth / 1e9
        within = f"network assumed: {device.nvlink_bandwidth / 1e9:.4g} GB/s of a GPU within a node"
        notes.append(f"{within}, {node:.4g} GB/s of a node; --bandwidth sets this")
    on = f"{outcome.gpus(options.gpus)} ({device.name})"
    figures: dict[str, Any] = {"parameters": model.num_parameters(), "tokens": training.tokens, "steps": steps}
    figures |= {"global_batch_size": samples, "critical_batch_tokens": critical}
    try:
        found = search.answer(options, (config, profile, options.tokens), frozenset(given), notes)
    except ConfigError as error:
        if error.key != "cluster.gpu":
            raise
        lines = [f"NO, it does not fit on {on}: {str(error).partition(': ')[2]}", *notes]
        nodes = edit(config, {"cluster.gpus_per_node": stack.gpus_per_node})
        fixed = given.keys() & {*SEARCHED, STAGE_SIZES}
        if fewest := fewest_nodes(nodes, profile, frozenset(fixed), ProgressLines()):
            days, figures["predict"] = outcome.length(fewest, options.tokens, options.price)[0], fewest.as_dict()
            lines += [f"it fits on {outcome.gpus(fewest.work.num_gpus)}: {described(fewest.work)}: {fewest}{days}"]
        return outcome.Outcome("\n".join(lines), {"ask": figures}, status=1)
    lines = [f"YES, it fits on {on}", found.text]
    if options.out:
        start = f"torchrun --nproc_per_node {config.cluster.gpus_per_node} train.py"
        lines.append(as_installed(f"to train: {start} --job.config_file {shlex.quote(options.out)}"))
    return outcome.Outcome("\n".join(lines), {"ask": figures} | found.json, files=found.files)


def completed(config: JobConfig, stack: Profile, options: argparse.Namespace) -> JobConfig:
    """The run with the settings that neither its file nor the command line has."""
    model = model_config(config.model)
    training, given = config.training, config.training.model_fields_set
    seq_len = training.seq_len if "seq_len" in given else min(_SEQ_LEN, model.max_seq_len)
    batch = global_batch(options.tokens, seq_len, options.gpus)
    batch = training.global_batch_size if "global_batch_size" in given else batch
    rate = config.optimizer.lr if config.model.from_ else learning_rate(model.active_parameters, options.tokens)
    values = {
        "job.dump_folder": f"outputs/{Path(options.out or 'run').stem}",
        "training.seq_len": seq_len,
        "training.global_batch_size": batch,
        "training.dtype": next(name for name in ("bfloat16", "float16", "float32") if name in stack.device.peak),
        "optimizer.lr": rate,
        "lr_scheduler.warmup_steps": min(2000, int(options.tokens) // (20 * batch * seq_len)),
        "lr_scheduler.decay": "cosine",
        "lr_scheduler.min_lr_ratio": 0.1,
        "compile.enable": not stack.device.is_cpu,
        "checkpoint.enable": True,
        "checkpoint.interval": 1000,
        "checkpoint.keep_latest": 2,
        "cluster.gpus_per_node": max(n for n in divisors(options.gpus) if n <= stack.gpus_per_node),
        "cluster.node_bandwidth": _BANDWIDTH.get(stack.device.name.partition("-")[0]),
    }
    sections = {key: getattr(config, key.partition(".")[0]) for key in values}
    unset = [key for key in values if key.partition(".")[2] not in sections[key].model_fields_set]
    return edit(config, {key: values[key] for key in unset})


def critical_batch(tokens: float) -> float:
    """The critical batch, in tokens, of a run. The fit is on runs of 1.7 to 25 billion."""
    return 512 * 22.91 * (tokens / 1e6) ** 0.47


def learning_rate(parameters: float, tokens: float) -> float:
    """The peak rate of a run from scratch, to two digits."""
    return float(f"{0.3118 * (6 * parameters * tokens) ** -0.125:.1e}")


def global_batch(tokens: float, seq_len: int, gpus: int) -> int:
    """The critical batch in sequences, rounded down to 2^k or 3·2^k for each GPU, or to a part of the GPUs."""
    most = max(1, int(critical_batch(tokens) / seq_len))
    share = max(n for n in divisors(gpus) if n <= most)
    return share * max(n << k for k in range(most.bit_length()) for n in (1, 3) if n << k <= most // share)
