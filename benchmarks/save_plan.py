"""What rank 0 does to plan a checkpoint of many thousand ranks, without these ranks.

    python benchmarks/save_plan.py --ranks 256 1024 4096 --json benchmarks/results/save_plan_cpu.json

In a save, torch.distributed.checkpoint sends each rank's list of tensors to rank 0, which joins them to one plan,
checks it and sends each rank its part. When all have written, it receives where every tensor is, and writes the
metadata. This script builds rank 0 of Llama 3.1 405B in the layout of its TOML on the meta device, takes its list for
all ranks, with other names and offsets, and does rank 0's part, in a run's first save and in a later one, and then
reads the metadata, as every rank does in a load. Bytes are of pickles, as they are sent. The network's time is left
out, and that of the files.
"""

from __future__ import annotations

import pickle
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.runs import ROOT, machine, origin, parser_of, write
from titan_like.checkpoint.loader import in_parts, model_tensors, optimizer_tensors
from titan_like.checkpoint.reader import TensorReader
from titan_like.config import load_config
from titan_like.parallel.apply import build_parallel_model
from titan_like.parallel.mesh import build_mesh
from titan_like.planner.dry_run import built_optimizer
from titan_like.planner.trace.run import fake_process_group
from titan_like.torch_private import save_planner, storage_info
from titan_like.train.rules import resolve_settings

UNCHANGED = SavePlan([], usable=False)  # what a rank sends if its list is that of the save before
RUN = f"--job.config_file={ROOT / 'train_configs' / 'llama3.1_405b.toml'}"


def own_plan(ranks: int) -> SavePlan:
    """Rank 0's list of tensors in the layout of 405B; ``ranks`` are a multiple of its model-parallel ones."""
    config = load_config([RUN, f"--parallelism.data_parallel_shard_degree={ranks // 128}"])
    settings = resolve_settings(config, ranks)
    with fake_process_group(0, ranks):
        mesh = build_mesh(settings.layout, "cpu")
        model = build_parallel_model(config, settings.model, mesh, torch.device("meta"))
        tensors = model_tensors(model) | optimizer_tensors(model, built_optimizer(config, model))
        planner = DefaultSavePlanner()
        planner.set_up_planner(in_parts(tensors), None, is_coordinator=True)
        return planner.create_local_plan()


def plans_of(own: SavePlan, ranks: int, shards: int) -> Iterator[SavePlan]:
    """All ranks' lists: every ``shards`` ranks have the chunks of tensors with names of their own."""
    for rank in range(ranks):
        group, shard = divmod(rank, shards)
        items = []
        for item in own.items:
            name = f"{group}.{item.index.fqn}"
            data = item.tensor_data
            if data is None or not data.chunk.sizes:  # numbers, which only rank 0 writes
                continue
            rows, *others = data.chunk.sizes
            offsets = torch.Size([rows * shard, *[0] * len(others)])
            chunk = ChunkStorageMetadata(offsets, data.chunk.sizes)
            index = replace(item.index, fqn=name, offset=offsets, index=shard)
            size = torch.Size([rows * shards, *others])
            items.append(replace(item, index=index, tensor_data=replace(data, chunk=chunk, size=size)))
        yield SavePlan(items, planner_data={name: (name,) for name in {item.index.fqn for item in items}})


def measure(ranks: int) -> dict[str, Any]:
    """Rank 0's seconds and bytes in the first save of this many ranks, and in a later one."""
    own = own_plan(ranks)
    row: dict[str, Any] = {"ranks": ranks, "tensors_of_a_rank": len(own.items)}
    for name, plans in ("first", plans_of(own, ranks, ranks // 128)), ("later", iter([UNCHANGED] * ranks)):
        sent, planner, laps = [pickle.dumps(plan) for plan in plans], save_planner(str(ranks)), [time.process_time()]
        planner.is_coordinator = True
        received = [pickle.loads(plan) for plan in sent]  # this script's own bytes
        laps.append(time.process_time())
        parts, metadata = planner.create_global_plan(received)
        laps.append(time.process_time())
        answers = sum(len(pickle.dumps(part)) for part in parts)
        laps.append(time.process_time())
        seconds = dict(zip(("unpickle", "join and check", "pickle"), map(seconds_of, pairwise(laps)), strict=True))
        row[name] = {"seconds": seconds, "bytes_received": sum(map(len, sent)), "bytes_sent": answers}
    where = [results_of(plan) for plan in planner.global_plan]
    results, laps = [pickle.dumps(of_rank) for of_rank in where], [time.process_time()]
    stored = {result.index: result.storage_data for of_rank in results for result in pickle.loads(of_rank)}
    laps.append(time.process_time())
    content = pickle.dumps(replace(metadata, storage_data=stored))
    laps.append(time.process_time())
    seconds = dict(zip(("unpickle", "pickle the metadata"), map(seconds_of, pairwise(laps)), strict=True))
    row["every"] = {"seconds": seconds, "bytes_received": sum(map(len, results)), "bytes_of_metadata": len(content)}
    with TemporaryDirectory() as folder:
        Path(folder, ".metadata").write_bytes(content)
        began = time.process_time()
        TensorReader(Path(folder)).read_metadata()
        row["load"] = {"seconds": {"read the metadata": seconds_of((began, time.process_time()))}}
    row["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return row


def results_of(plan: SavePlan) -> list[WriteResult]:
    """What a rank sends when it has written its tensors."""
    return [
        WriteResult(item.index, 1 << 20, storage_info()("__0_0.distcp", n << 20, 1 << 20))
        for n, item in enumerate(plan.items)
    ]


def seconds_of(lap: tuple[float, float]) -> float:
    """Seconds from one clock reading to the next."""
    return round(lap[1] - lap[0], 3)


def main() -> None:
    """Measure each number of ranks, the smallest first."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 1024, 4096], help="multiples of 128")
    options = parser.parse_args()
    result: dict[str, Any] = {**origin(), "machine": machine(), "rows": []}
    for ranks in sorted(options.ranks):
        result["rows"].append(measure(ranks))
        print(result["rows"][-1], flush=True)
        write(options.json, result)


if __name__ == "__main__":
    main()
