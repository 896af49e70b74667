"""Every scaling configuration passes all rules for the cluster that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_like.config import load_config
from titan_like.train.rules import resolve_settings

FOLDER = Path(__file__).parents[2] / "train_configs"
GPT_GPUS = {
    "3.6b": 64,
    "7.5b": 128,
    "18b": 256,
    "39b": 512,
    "76b": 1024,
    "145b": 1536,
    "310b": 1920,
    "530b": 2520,
    "1t": 3072,
}  # arXiv 2104.04473, Table 1
GPUS = {f"gpt_{size}": gpus for size, gpus in GPT_GPUS.items()}
GPUS |= {"gpt3_175b": 1024, "llama3.1_70b": 256, "llama3.1_405b": 16384}


@pytest.mark.parametrize("name", GPUS)
def test_scaling_configuration_passes_the_rules(name: str) -> None:
    config = load_config(["--job.config_file", str(FOLDER / f"{name}.toml")])
    cluster = config.cluster
    assert cluster.nodes is not None and cluster.gpus_per_node is not None
    world_size = cluster.nodes * cluster.gpus_per_node
    assert world_size == GPUS[name]
    layout = resolve_settings(config, world_size).layout
    assert layout.pipeline * layout.data_parallel * layout.tensor * layout.context == world_size
