"""Train debug_moe with each `balance`, and draw each step's largest load and the entropy of loads.

python benchmarks/experts.py [--steps 600] [--png docs/images/expert_loads.png]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from runs import ROOT, arguments, train


def main() -> None:
    """Train and draw."""
    from matplotlib import pyplot

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--png", type=Path, default=ROOT / "docs/images/expert_loads.png")
    options = parser.parse_args()
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for balance in ("none", "auxiliary", "bias"):
        settings = {"job.config_file": "train_configs/debug_moe.toml", "model.overrides.balance": balance}
        settings |= {"training.steps": str(options.steps), "checkpoint.enable": "false", "metrics.log_interval": "5"}
        with tempfile.TemporaryDirectory() as folder:
            records = [one for one in train(arguments(settings), folder) if "max_expert_share" in one]
        steps = [record["step"] for record in records]
        for panel, key in zip(panels, ("max_expert_share", "expert_load_entropy"), strict=True):
            panel.plot(steps, [record[key] for record in records], label=f'balance = "{balance}"', linewidth=1)
    panels[0].set(title="largest load of an expert, mean = 1", xlabel="step", ylim=(1, None))
    panels[1].set(title="entropy of loads, share of its maximum", xlabel="step", ylim=(None, 1))
    panels[1].legend()
    figure.savefig(options.png, dpi=130)
    print(f"wrote {options.png}")


if __name__ == "__main__":
    main()
