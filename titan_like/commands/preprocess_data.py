"""Tokenize text into an indexed dataset, PREFIX.bin and PREFIX.idx, which data.dataset = "indexed" trains on.

python scripts/preprocess_data.py --input corpus/ more.jsonl.gz --output data/corpus --tokenizer t.json --workers 8

Reads JSON lines (one document per line), JSON arrays (one per element), parquet and arrow (one per row) and text (one
per file). All but parquet and arrow may be compressed (.gz, .bz2, .xz, .zst). A folder is read as by Hugging Face's
load_dataset(folder, split="train") or load_from_disk, or whole if it has no splits. After an interruption, the same
command continues where it stopped. Megatron-LM can read the result.
"""

import argparse
import os
import time
from functools import partial
from pathlib import Path

from titan_like.config import ConfigError
from titan_like.config.errors import require
from titan_like.config.load import run_command
from titan_like.config.options import OptionParser, tokenizer_option, write_json
from titan_like.config.schema import Data, TokenOptions
from titan_like.data.readers.files import find_files
from titan_like.data.readers.indexed import prefix_of
from titan_like.data.text.preprocess import Job, tokenize_files
from titan_like.data.text.tokenizer import build_tokenizer


def build_parser() -> argparse.ArgumentParser:
    """The command line's options."""
    parser = OptionParser(description=__doc__)
    parser.add_path("--input", "files, folders or glob patterns", nargs="+", required=True)
    parser.add_path("--output", "path of the dataset, without .bin and .idx", "PREFIX", required=True)
    meaning = 'as data.tokenizer: "byte" (the default), a tokenizer.json, gpt2:…, or a name of the hub'
    parser.add_path("--tokenizer", meaning, "TOKENIZER", type=tokenizer_option, default="byte")
    for name in ("bos", "eod_token", "split_special_tokens"):
        field = Data.model_fields[name]
        choices = {"bos": ["auto", "always", "never"], "split_special_tokens": ["true", "false"]}.get(name)
        default = str(field.default).lower() if choices else field.default
        parser.add_argument(f"--{name}", choices=choices, default=default, help=f"as data.{name}: {field.description}")
    parser.add_argument("--text_key", default="text", help='key or column of the text (default: "text")')
    parser.add_number("--workers", int, least=1, most=1024, default=1, help="processes that tokenize (default: 1)")
    meaning = "end each document with its token"
    parser.add_argument("--append_eod", choices=["true", "false"], default="true", help=meaning)
    parser.add_argument("--bad_lines", choices=["stop", "skip"], default="stop", help="as data.bad_lines")
    parser.add_path("--json", "file to write the counts to")
    return parser


def main(argv: list[str]) -> int:
    """Tokenize the files that the command line names."""
    options = build_parser().parse_args(argv)
    prefix = prefix_of(options.output)
    reason = f"is a folder; name the dataset in it, such as {Path(options.output, 'corpus')}"
    is_folder = options.output.endswith("/") or os.path.isdir(prefix)
    require(not is_folder, "--output", options.output, reason)
    unfinished = Path(f"{prefix}.unfinished")
    for ending in ("bin", "idx"):
        is_moved = ending == "bin" and unfinished.exists()  # by an interrupted job
        reason = f"{prefix}.{ending} exists; remove it or name another place"
        require(is_moved or not os.path.exists(f"{prefix}.{ending}"), "--output", str(prefix), reason)
    tokens = TokenOptions(options.bos, options.eod_token, options.split_special_tokens == "true")
    build_tokenizer(options.tokenizer, "--tokenizer", tokens)
    files = find_files(options.input, "--input")
    job = Job(
        files,
        options.tokenizer,
        options.text_key,
        tokens,
        ends_documents=options.append_eod == "true",
        bad_lines=options.bad_lines,
        key="--input",
        tokenizer_key="--tokenizer",
        hint="correct it, set --text_key, or leave such records out with --bad_lines skip",
    )
    began = time.monotonic()
    try:
        done = tokenize_files(job, prefix, options.workers)
    except ConfigError as error:
        if error.key == job.key and unfinished.exists():
            effect = "which keeps the finished part, if you change anything but --bad_lines and --workers"
            error.args = (f"{error}; delete {unfinished}, {effect}",)
        raise
    seconds = time.monotonic() - began
    skipped = f", {done.bad_lines:,} bad records skipped" if done.bad_lines else ""
    print(f"{done.documents:,} documents, {done.tokens:,} tokens in {prefix}.bin and .idx{skipped} ({seconds:.1f} s)")
    counts = {"documents": done.documents, "tokens": done.tokens, "bad_lines": done.bad_lines}
    write_json(options.json, counts | {"seconds": seconds})
    return 0


run = partial(run_command, main)
