"""Conversion holds a few shards in memory, however large the model is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SHARD = 16_000_000  # bytes; the largest tensor has 7 MB
# 141 MB in float32: nine shards
CONFIG = {
    "model_type": "llama",
    "vocab_size": 3001,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 9,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
}

# How far an import and an export of a model in one file raise the memory of a fresh process, each for itself.
PROGRAM = """
import json, sys
from pathlib import Path
import torch
from titan_like.checkpoint.loader import CheckpointWeights
from titan_like.hugging_face.folder import open_hugging_face
from titan_like.hugging_face.convert import from_hugging_face
from titan_like.hugging_face.convert import TensorSpec, write_safetensors
from titan_like.hugging_face.convert import to_hugging_face
from titan_like.models.hugging_face import Fields, family_module

folder, shard = Path(sys.argv[1]), int(sys.argv[2])
fields = json.loads((folder / "config.json").read_text())
module = family_module("llama")
model = module.from_fields(Fields(fields))
sources = [item for stored in module.stored_parameters(model) for item in stored.sources.items()]
specs = [TensorSpec(name, shape, torch.float32) for name, shape in sources]

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

def rise(action):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    result = action()
    return memory("VmHWM") - before, result

def export():
    return to_hugging_face(CheckpointWeights(folder / "run" / "step-0"), folder / "out", None, shard, None)

write_safetensors(folder / "model.safetensors", specs, (torch.randn(spec.shape) for spec in specs))
imported, _ = rise(lambda: from_hugging_face(open_hugging_face(folder, "--input"), folder / "run", shard))
exported, files = rise(export)
everything, _ = rise(lambda: [torch.ones(spec.shape) for spec in specs])
total = sum(spec.num_bytes for spec in specs)
print(json.dumps(
    {"import": imported, "export": exported, "whole": everything, "bytes": total, "files": len(files)}
))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells a process its peak memory")
def test_peak_memory_is_a_few_shards_in_both_directions(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    # Every tensor is a mapping of its own, given back when it is freed, so that no phase lives on another's leavings.
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPO),
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(SHARD)]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["bytes"] > 8 * SHARD and found["files"] > 8
    assert found["whole"] > 8 * SHARD  # a model that is whole in memory is seen
    assert found["import"] < 4 * SHARD
    assert found["export"] < 4 * SHARD
