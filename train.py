"""The command titan-train from a checkout: torchrun --nproc_per_node=N train.py --job.config_file FILE.toml."""

from titan_like.commands.train import run

if __name__ == "__main__":
    run()
