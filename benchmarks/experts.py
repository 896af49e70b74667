"""Speed of experts' products, and a figure of how loads become equal.

    python benchmarks/experts.py speed [--dtype bfloat16] [--rows 4096 --hidden 1024 --width 512 --experts 16]
    python benchmarks/experts.py loads [--steps 600] [--png docs/images/expert_loads.png]

speed  forward and backward of one matrix of all experts with equal loads, and of one dense matrix with as many products
       (rows x hidden x width), in turns: the ratio of their speeds, median of the rounds
loads  trains debug_moe with each `balance`, and draws each step's largest load and the entropy of loads
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from titan_like.models.layers.experts import ExpertLinear  # noqa: E402
from titan_like.models.moe.config import MoEConfig  # noqa: E402


def speed(options: argparse.Namespace) -> None:
    """Print and write the ratio."""
    dtype = getattr(torch, options.dtype)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 1, "vocab_size": 8, "max_seq_len": 8}
    config = MoEConfig(num_experts=options.experts, experts_per_token=2, expert_ffn_hidden_size=8, **shape)
    grouped = ExpertLinear(config, options.hidden, options.width).to(device, dtype)
    dense = torch.nn.Linear(options.hidden, options.width, bias=False, device=device, dtype=dtype)
    torch.nn.init.normal_(grouped.weight, std=0.02)
    x = torch.randn(options.rows, options.hidden, device=device, dtype=dtype, requires_grad=True)
    each = options.rows // options.experts
    ends = torch.arange(each, options.rows + 1, each, dtype=torch.int32, device=device)
    gradient = torch.randn(options.rows, options.width, device=device, dtype=dtype)
    sides = {"experts": lambda: grouped(x, ends).backward(gradient), "dense": lambda: dense(x).backward(gradient)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.rounds + 2):
        for name, side in sides.items():
            seconds[name].append(_seconds(side, options.calls, device))
    ratios = [one / other for one, other in zip(seconds["dense"][2:], seconds["experts"][2:], strict=True)]
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    found = vars(options) | {"device": name, "torch": torch.__version__, "speed_of_dense": statistics.median(ratios)}
    found |= {f"{side}_seconds": statistics.median(times[2:]) for side, times in seconds.items()}
    found = {key: value for key, value in found.items() if key not in ("run", "json")}
    print(json.dumps(found))
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.exists() else []
        options.json.write_text(json.dumps([*known, found], indent=1) + "\n")


def _seconds(side: Callable[[], None], calls: int, device: torch.device) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        side()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / calls


def loads(options: argparse.Namespace) -> None:
    """Train and draw."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for balance in ("none", "auxiliary", "bias"):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "train.py", "--job.config_file", "train_configs/debug_moe.toml"]
            command += ["--model.overrides.balance", balance, "--training.steps", str(options.steps)]
            command += ["--job.dump_folder", folder, "--checkpoint.enable", "false", "--metrics.log_interval", "5"]
            subprocess.run(command, cwd=ROOT, check=True)
            lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records = [record for record in map(json.loads, lines) if "max_expert_share" in record]
        steps = [record["step"] for record in records]
        for panel, key in zip(panels, ("max_expert_share", "expert_load_entropy"), strict=True):
            panel.plot(steps, [record[key] for record in records], label=f'balance = "{balance}"', linewidth=1)
    panels[0].set(title="largest load of an expert, mean = 1", xlabel="step", ylim=(1, None))
    panels[1].set(title="entropy of loads, share of its maximum", xlabel="step", ylim=(None, 1))
    panels[1].legend()
    figure.savefig(options.png, dpi=130)
    print(f"wrote {options.png}")


def main() -> None:
    """Parse the options and run a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    part = parts.add_parser("speed")
    part.set_defaults(run=speed)
    part.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    for name, value in (
        ("rows", 4096),
        ("hidden", 1024),
        ("width", 512),
        ("experts", 16),
        ("rounds", 15),
        ("calls", 3),
    ):
        part.add_argument(f"--{name}", type=int, default=value)
    part.add_argument("--json", type=Path)
    part = parts.add_parser("loads")
    part.set_defaults(run=loads)
    part.add_argument("--steps", type=int, default=600)
    part.add_argument("--png", type=Path, default=ROOT / "docs/images/expert_loads.png")
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
