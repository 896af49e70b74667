"""The name and the configuration of a run, as trackers show them."""

import os
import subprocess
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from titan_like import __version__
from titan_like.config.schema import JobConfig
from titan_like.models.config import TransformerConfig
from titan_like.parallel.layout import DEGREES, Layout

_VERSIONS = ("torch", "torchdata", "transformers", "torchao")


def run_name(config: JobConfig, layout: Layout) -> str:
    """`metrics.run_name`, WANDB_NAME, or the model and the degrees above 1, such as llama-1b-pp2-dp4-zero3."""
    degrees = [(degree.short, getattr(layout, degree.name)) for degree in DEGREES]
    parts = [config.model.family, config.model.flavor, *(f"{short}{size}" for short, size in degrees if size > 1)]
    if layout.weight_ranks > 1:
        parts.append(f"zero{config.parallelism.zero_stage}")
    return config.metrics.run_name or os.environ.get("WANDB_NAME") or "-".join(parts)


def run_facts(config: JobConfig, model: TransformerConfig, layout: Layout) -> dict[str, Any]:
    """The configuration with the model's shape, layout and versions: plain values in nested dictionaries."""
    versions = {"titan_like": __version__}
    for name in _VERSIONS:
        with suppress(ModuleNotFoundError):
            versions[name] = version(name)
    return config.model_dump(mode="json") | {
        "shape": model.model_dump(mode="json"),
        "parameters": model.num_parameters(),
        "world_size": layout.num_processes,
        "layout": asdict(layout),
        "commit": _commit(),
        "versions": versions,
    }


def measured_facts(model: TransformerConfig, layout: Layout) -> dict[str, Any]:
    """What a comparison or a diagnosis of metrics needs to know besides the settings; memory is None on a CPU."""
    import torch  # not needed to check settings

    from titan_like.metrics.hardware import device_name, memory_bytes

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "device": device_name(device) or "CPU",
        "device_memory_bytes": memory_bytes(device),
        "processes": layout.num_processes,
        "parameters": model.num_parameters(),
        "vocab_size": model.vocab_size,
    }


def _commit() -> str | None:
    """The commit of the git checkout that the job was started in."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    return None
