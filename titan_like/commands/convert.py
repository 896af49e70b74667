"""Convert checkpoints to and from Hugging Face folders (such as LlamaForCausalLM's, in safetensors).

python scripts/convert.py to-hf --checkpoint outputs/debug_gpt --output my_model
python scripts/convert.py from-hf --input my_model --output outputs/imported
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from titan_like.config.errors import require
from titan_like.config.load import run_command
from titan_like.config.options import OptionParser, tokenizer_option, url_option
from titan_like.config.paths import to_toml
from titan_like.config.section import dtype_name
from titan_like.config.urls import RemotePath, path_of


def build_parser() -> argparse.ArgumentParser:
    """The two commands and their options."""
    parser = OptionParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="to-hf | from-hf")
    commands.type = str  # the options that follow have types of their own
    to_hf = commands.add_parser("to-hf", help="write a folder that transformers loads")
    meaning = "a step-N folder, or a run's dump folder or folder of them, whose newest is used"
    to_hf.add_path("--checkpoint", meaning, "FOLDER", type=url_option, required=True)
    to_hf.add_path("--output", "folder to write; it must not exist", "FOLDER", type=url_option, required=True)
    to_hf.add_argument(
        "--dtype",
        type=dtype_name,
        choices=["float32", "bfloat16", "float16"],
        help="type of the weights (default: float32, or the original type of an imported checkpoint)",
    )
    to_hf.add_number("--max_shard_size", float, least=1e-6, most=1e6, default=5.0, metavar="GB", help="(default: 5)")
    meaning = 'a value of data.tokenizer, or "none" (default: the checkpoint\'s)'
    to_hf.add_path("--tokenizer", meaning, "TOKENIZER", type=tokenizer_option)
    to_hf.add_argument("--merge", action="store_true", help="merge adapters instead of writing a PEFT folder")
    from_hf = commands.add_parser("from-hf", help="write a checkpoint that training can start from")
    source = "folder with config.json and safetensors files, or a name of the Hugging Face hub"
    from_hf.add_path("--input", source, "FOLDER", type=url_option, required=True)
    target = "folder to write the checkpoint step-0 to"
    from_hf.add_path("--output", target, "FOLDER", type=url_option, required=True)
    meaning = "fields of config.json to read it without, as model.ignore_fields"
    from_hf.add_argument("--ignore_fields", nargs="+", default=[], metavar="FIELD", help=meaning)
    return parser


def main(argv: list[str]) -> int:
    """Run the conversion that the command line asks for."""
    options = build_parser().parse_args(argv)
    return to_hf(options) if options.command == "to-hf" else from_hf(options)


def to_hf(options: argparse.Namespace) -> int:
    """Write a Hugging Face folder."""
    output = path_of(options.output)
    check_new(output)

    import torch

    from titan_like.checkpoint.loader import CheckpointWeights, is_checkpoint, one_checkpoint
    from titan_like.hugging_face.convert import to_hugging_face
    from titan_like.hugging_face.peft import MergedWeights, write_peft

    weights = CheckpointWeights(path := one_checkpoint(path_of(options.checkpoint), "--checkpoint"))
    require(weights.run.base or not options.merge, "--merge", True, f"{path} has no adapters; leave it out")
    dtype = getattr(torch, options.dtype) if options.dtype else None
    if weights.run.base and not options.merge:
        write_peft(weights, output, dtype or torch.float32)
        base = weights.run.base["folder"]
        print(f"wrote the adapters of {path} as {output}, a PEFT folder for {base}")
        if is_checkpoint(path_of(base)):
            hint = "convert that too, and name its folder in adapter_config.json"
            print(f"transformers cannot open {base}, a checkpoint; {hint}", file=sys.stderr)
        return 0
    weights = MergedWeights(path) if options.merge else weights
    files = to_hugging_face(weights, output, dtype, int(options.max_shard_size * 1e9), options.tokenizer)
    print(f"wrote {weights.path} as {output}: {len(files)} file{'s' if len(files) > 1 else ''} of weights")
    return 0


def from_hf(options: argparse.Namespace) -> int:
    """Write a checkpoint, and print the TOML lines with which a run starts from it."""
    output = path_of(options.output)
    check_new(output / "step-0")

    from titan_like.hugging_face.convert import from_hugging_face
    from titan_like.hugging_face.folder import local_folder, open_hugging_face

    source = open_hugging_face(local_folder(options.input, "--input"), "--input", options.ignore_fields)
    path = from_hugging_face(source, output)
    print(f"wrote {source.path} as {path}; to train from it:", file=sys.stderr)
    print(to_toml({"model": {"from": str(path)}}, []).strip())
    return 0


def check_new(output: Path) -> None:
    """Refuse a folder that exists and is not empty, or that cannot be created."""
    from titan_like.checkpoint.checks import check_writable

    is_link = os.path.islink(str(output))
    is_new = not is_link and (not output.exists() or (output.is_dir() and not any(output.iterdir())))
    require(is_new, "--output", str(output), "already exists; name a new folder")
    is_remote = isinstance(output, RemotePath)
    check_writable("--output", output if is_remote else output.parent, make=is_remote)


run = partial(run_command, main)
