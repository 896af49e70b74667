"""What the data layer costs: random access, tokenization, memory, the loader, and a step's wait for data.

    python benchmarks/data.py --json benchmarks/results/data_cpu.json
    python benchmarks/data.py --only access loader
    python benchmarks/data.py --only streams --json benchmarks/results/streams_cpu.json

| section | measures | goal |
|---|---|---|
| access | which source, which of its samples and at which position, for random samples near number 10^11 of 10^12 | 20 µs, 1 MiB |
| index | opening 10 million documents (10^9 tokens), next to the index files that megatron-core 0.16.1 builds for them | – |
| tokenize | `scripts/preprocess_data.py` on 1 and 2 workers, next to bare loops over `encode_batch_fast` | 1.8 ×, 0.9 × |
| memory | peak resident memory of its processes on a .jsonl of 1 GB, with --long also a .txt of one document | 300 MiB |
| loader | samples that one loader thread gives at 1,024 tokens, next to those that GPT-2 124M trains on here | 50 × |
| sources | tokens that the loader gives of each kind of source, in microbatches of 16 × 1,024 | 500,000/s |
| streams | bytes that a reader reads ÷ its share, and its tokens per second of processor time ÷ those of the only reader | 1.1 small, 1.3 big shards; 0.9 |
| step | share of a step of `debug_gpt` in which it waits for a blend's samples | 1 % |

Sizes are multiplied by --scale. The text is the standard library's source, repeated with the lines of each file rotated,
until it has the wanted size; the tokenizer is a BPE of 8,192 tokens, trained on it. --input and --tokenizer replace them.
No process uses more than one thread: TOKENIZERS_PARALLELISM is false everywhere.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # measure the code next to this file

from data_streams import streams
from data_tokenize import memory, peak_of, text_of, tokenize
from runs import machine, parser_of, train, write

WEIGHTS = [0.4, 0.3, 0.2, 0.1]
GPT2 = [
    "--model.family=gpt", "--model.flavor=gpt2_124m", "--model.overrides.dropout=0.0", "--training.seq_len=1024",
    "--training.micro_batch_size=1", "--training.global_batch_size=1", "--training.steps=4",
    "--lr_scheduler.warmup_steps=0", "--evaluation.interval=0", "--checkpoint.enable=false",
]  # fmt: skip


def access(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Time and state of random access, through the classes that training uses; no tokens are read."""
    from titan_like.config.schema import Data
    from titan_like.data.loading.blend import BlendedSource
    from titan_like.data.source import DataRequest, Source

    class Positions(Source):
        """A source whose samples are their positions."""

        fingerprint = ""

        def __len__(self) -> int:
            return 10**12 // len(WEIGHTS)

        def sample(self, position: int) -> Any:
            return position

    def request(part: int) -> DataRequest:
        return DataRequest(Data(dataset="indexed", paths=[f"source {part}"]), "train", 1024, 0, 50304, folder, part)

    wanted = random.Random(0)
    numbers = [10**11 + wanted.randrange(10**10) for _ in range(options.sized(100_000))]
    tracemalloc.start()
    source = BlendedSource(request(0), [Positions(request(part)) for part in range(len(WEIGHTS))], WEIGHTS)
    for number in numbers[:1000]:
        source[number]
    state = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    def median_us(indices: list[int]) -> float:
        times = []
        for index in indices:
            began = time.perf_counter_ns()
            source[index]
            times.append(time.perf_counter_ns() - began)
        return statistics.median(times) / 1000

    found = {
        "random_us": median_us(numbers),
        "in_order_us": median_us(list(range(10**11, 10**11 + len(numbers)))),
        "state_bytes": state,
    }
    print(
        f"access: {found['random_us']:.1f} µs at random (goal 20), {found['in_order_us']:.1f} µs in order; "
        f"state {state:,} bytes (goal 1 MiB)"
    )
    return found


def index(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Time, files and memory until the first sample is known, of both."""
    import numpy as np

    from titan_like.data.readers.indexed import DTYPES, write_index

    lengths = np.random.default_rng(0).integers(1, 200, options.sized(10_000_000), np.int32)
    write_index(folder / "corpus.idx", DTYPES[8], lengths, range(len(lengths) + 1))
    with open(folder / "corpus.bin", "wb") as file:
        file.truncate(2 * int(lengths.sum()))  # sparse: the index is built without a look at the tokens
    found: dict[str, Any] = {"documents": len(lengths), "tokens": int(lengths.sum())}
    for name in ("titan_like", "megatron-core"):
        command = [sys.executable, __file__, "worker", name, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"index: {name} cannot run here ({done.stderr.strip().splitlines()[-1]})")
            continue
        found[name] = json.loads(done.stdout.splitlines()[-1])
        print(
            f"index: {name}: {found[name]['seconds']:.2f} s, {found[name]['file_bytes']:,} bytes of index files, "
            f"{found[name]['more_bytes'] / 2**20:,.0f} MiB more memory at the peak"
        )
    return found


def index_worker(name: str, folder: Path) -> None:
    """Open the corpus in this process; the last line of output is what it took."""
    opened = _open_titan_like(folder) if name == "titan_like" else _open_megatron(folder)
    next(opened)  # imports
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before, began = peak_of(os.getpid()), time.perf_counter()
    parts = dict(opened)
    seconds = time.perf_counter() - began
    files = sum(path.stat().st_size for path in folder.glob("cache/*"))
    result = {"seconds": seconds, "file_bytes": files, "more_bytes": peak_of(os.getpid()) - before} | parts
    print(json.dumps(result))


def _open_titan_like(folder: Path) -> Iterator[Any]:
    from titan_like.config.schema import Data
    from titan_like.data.loading.open_source import open_source
    from titan_like.data.source import DataRequest

    yield
    section = Data(dataset="indexed", paths=[str(folder / "corpus")], split="1,0,0")
    source = open_source(DataRequest(section, "train", 1024, 0, 50304, folder))
    source[10**6]


def _open_megatron(folder: Path) -> Iterator[Any]:
    """`GPTDataset.__init__`, which builds document, sample and shuffle index, and `BlendedDataset.__init__`."""
    import warnings

    warnings.simplefilter("ignore")  # of packages that it does without
    import numpy as np
    import torch.distributed as dist
    from megatron.core.datasets import utils
    from megatron.core.datasets.blended_dataset import BlendedDataset
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    try:
        from megatron.core.datasets import helpers  # noqa: F401
    except ImportError:
        utils.compile_helpers()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    class Tokens:
        """The part of a tokenizer that it asks for."""

        eod, pad, vocab_size = 0, 0, 50304
        unique_identifiers: dict[str, str] = {}  # noqa: RUF012

    config = GPTDatasetConfig(
        random_seed=0, sequence_length=1024, path_to_cache=str(folder / "cache"), tokenizer=Tokens(), split="1,0,0",
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
    )  # fmt: skip
    yield
    began = time.perf_counter()
    dataset = IndexedDataset(str(folder / "corpus"))
    documents = np.arange(len(dataset), dtype=np.int32)
    gpt = GPTDataset(dataset, str(folder / "corpus"), documents, None, utils.Split.train, config)
    yield "gpt_dataset_seconds", time.perf_counter() - began
    began = time.perf_counter()
    BlendedDataset([gpt] * 4, WEIGHTS, 2 * len(gpt), config)
    yield "blended_dataset_seconds", time.perf_counter() - began


def blend_of(folder: Path, vocab_size: int) -> list[str | float]:
    """`data.paths` of a blend of two datasets of random tokens, 32 million in all."""
    import numpy as np

    from titan_like.data.readers.indexed import DTYPES, IndexedWriter

    generator = np.random.default_rng(0)
    for name, documents in (("a", 24_000), ("b", 8_000)):
        with IndexedWriter(folder / name, DTYPES[8]) as writer:
            for _ in range(documents):
                writer.add(generator.integers(0, vocab_size, 1000))
                writer.end_document()
    return [0.7, f"{folder}/a", 0.3, f"{folder}/b"]


def loader(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Tokens that a loader thread gives a second, next to those of GPT-2 124M on this machine."""
    import torch

    from titan_like.config.schema import Data
    from titan_like.data.loading.loader import BackgroundLoader, GlobalSampler
    from titan_like.data.loading.open_source import open_source
    from titan_like.data.source import DataRequest

    section = Data(dataset="indexed", paths=blend_of(folder, 50257))
    source = open_source(DataRequest(section, "train", 1024, 0, 50304, folder))
    batches = BackgroundLoader(source, GlobalSampler(0, 2, 0, 1), 0, torch.device("cpu"))
    rates = []
    for _ in range(5):
        began, taken = time.perf_counter(), options.sized(2000)
        for _ in range(taken):
            next(batches)
        rates.append(taken * 2 * 1024 / (time.perf_counter() - began))
    batches.close()
    trained = options.tokens_per_second
    if trained is None:
        records = train([*GPT2, "--data.dataset=stdlib"], folder / "gpt2", CUDA_VISIBLE_DEVICES="")
        times = [record["step_time_s"] for record in records]
        trained = 1024 / statistics.median(times[1:])
    rate = statistics.median(rates)
    print(f"loader: {rate:,.0f} tokens/s, {rate / 1024:,.0f} samples/s; GPT-2 124M trains on {trained:,.0f} tokens/s: "
          f"{rate / trained:,.0f} × (goal 50)")  # fmt: skip
    return {"tokens_per_second": rate, "gpt2_124m_tokens_per_second": trained, "ratio": rate / trained}


def sources(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Tokens a second that a consumer takes if it does nothing else, by source; streams tokenize them meanwhile.

    Tokens per second of processor time, over all processes and with their start, hardly depend on what else runs here.
    """
    import torch

    from titan_like.config.schema import Data
    from titan_like.data.loading.loader import BackgroundLoader, GlobalSampler
    from titan_like.data.loading.open_source import open_source
    from titan_like.data.source import DataRequest

    text, tokenizer = text_of(options, folder, 50 * options.scale)
    text_settings = {"paths": [str(text)], "tokenizer": tokenizer}
    cases = {
        "indexed": Data(dataset="indexed", paths=blend_of(folder, 50257)),
        "text": Data(dataset="text", **text_settings),
        "streamed by the loader's thread": Data(dataset="hf", **text_settings),
        "streamed by 1 worker": Data(dataset="hf", num_workers=1, **text_settings),
        "streamed by 2 workers": Data(dataset="hf", num_workers=2, num_readers=32, **text_settings),
        "streamed by 2 workers with 16 readers": Data(dataset="hf", num_workers=2, **text_settings),
    }
    found: dict[str, Any] = {}
    for name, section in cases.items():
        source = open_source(DataRequest(section, "train", 1024, 0, 50304, folder / name))
        used, ahead = sum(os.times()[:4]), options.sized(20)  # more than are prepared ahead
        batches = BackgroundLoader(source, GlobalSampler(0, 16, 0, 1), section.num_workers, torch.device("cpu"))
        taken, rates = options.sized(200 if section.dataset == "hf" else 2000), []
        for _ in range(ahead):
            next(batches)
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(taken):
                next(batches)
            rates.append(taken * 16 * 1024 / (time.perf_counter() - began))
        batches.close()
        used = max(sum(os.times()[:4]) - used, 0.01)  # the clock's resolution
        a_core = (ahead + len(rates) * taken) * 16 * 1024 / used
        found[name] = {"median": statistics.median(rates), "all": rates, "per_processor_second": a_core}
        print(
            f"sources: {name}: {found[name]['median']:,.0f} tokens/s (goal 500,000), at best {max(rates):,.0f}; "
            f"{a_core:,.0f} per second of processor time"
        )
    return found


def step(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Share of the median step that waits for data, in a short run of debug_gpt over a blend."""
    steps = options.sized(100, least=8)
    paths = json.dumps(blend_of(folder, 256))
    settings = ["--job.config_file=train_configs/debug_gpt.toml", "--data.dataset=indexed", f"--data.paths={paths}"]
    settings += [f"--training.steps={steps}", "--lr_scheduler.warmup_steps=2", "--checkpoint.enable=false"]
    settings += ["--evaluation.interval=0"]
    records = train(settings, folder / "debug", CUDA_VISIBLE_DEVICES="")[min(10, steps // 2) :]
    share = statistics.median(record["data_time_s"] / record["step_time_s"] for record in records)
    seconds = statistics.median(record["step_time_s"] for record in records)
    print(f"step: {share:.2%} of a step of {1000 * seconds:.0f} ms waits for data (goal 1 %)")
    return {"share": share, "step_seconds": seconds, "steps": len(records)}


SECTIONS = {
    "access": access, "index": index, "tokenize": tokenize, "memory": memory, "loader": loader, "sources": sources,
    "step": step, "streams": streams,
}  # fmt: skip


class _Options(argparse.Namespace):
    def sized(self, number: int, least: int = 1) -> int:
        """A count, multiplied by --scale."""
        return max(least, round(number * self.scale))


def main() -> None:
    """Read the command line, measure, print, write the result."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections (default: all)")
    parser.add_argument("--input", type=Path, help="tokenize, memory: a .jsonl file of your own")
    parser.add_argument("--tokenizer", help="tokenize, memory: as data.tokenizer; default: one trained on the text")
    parser.add_argument("--long", action="store_true", help="memory: a .txt of one document, too")
    parser.add_argument("--tokens_per_second", type=float, help="loader: of GPT-2 124M (default: measure a few steps)")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies all sizes (default 1)")
    options = parser.parse_args(namespace=_Options())
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    command = " ".join(["python benchmarks/data.py", *sys.argv[1:]])
    print(command)
    result: dict[str, Any] = {"command": command, "machine": machine()}
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            result[name] = SECTIONS[name](options, Path(folder))
    write(options.json, result)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        index_worker(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
