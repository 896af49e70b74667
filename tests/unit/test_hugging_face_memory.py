"""Conversion holds a few tensors in memory, however large the model and its files are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SHARD = 16_000_000  # bytes; the largest tensor has 7 MB

# How far an export of 141 MB to nine files and the import of that raise the memory of a fresh process, each for itself.
PROGRAM = """
import json, sys
from pathlib import Path
import torch
from tests.unit.hugging_face_cases import llama_config, save_checkpoint
from titan_like.checkpoint.loader import CheckpointWeights
from titan_like.hugging_face.convert import from_hugging_face, to_hugging_face
from titan_like.hugging_face.folder import open_hugging_face
from titan_like.models.registry import build_model

folder, shard = Path(sys.argv[1]), int(sys.argv[2])
shape = {"num_layers": 9, "hidden_size": 576, "num_attention_heads": 9, "num_kv_heads": 3}
config = llama_config(**shape, vocab_size=3001, ffn_hidden_size=1536)
save_checkpoint(folder / "run", build_model(config, "llama"))

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

def rise(action):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    result = action()
    return memory("VmHWM") - before, result

weights = CheckpointWeights(folder / "run" / "step-1")
exported, files = rise(lambda: to_hugging_face(weights, folder / "hf", None, shard, "none"))
in_one, one = rise(lambda: to_hugging_face(weights, folder / "one", None, 10**10, "none"))
imported, _ = rise(lambda: from_hugging_face(open_hugging_face(folder / "hf", "--input"), folder / "again"))
everything, _ = rise(lambda: [torch.ones(config.num_parameters())])
sizes = {"import": imported, "export": exported, "export in one file": in_one, "whole": everything}
print(json.dumps(sizes | {"files": len(files), "one": len(one)}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells a process its peak memory")
def test_peak_memory_is_a_few_shards_in_both_directions(tmp_path: Path) -> None:
    # Every tensor is a mapping of its own, given back when it is freed, so that no phase lives on another's leavings.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(SHARD)]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["whole"] > 8 * SHARD and found["files"] > 8  # a model that is whole in memory is seen
    assert found["import"] < 4 * SHARD
    assert found["export"] < 2 * SHARD and found["export in one file"] < 2 * SHARD and found["one"] == 1
