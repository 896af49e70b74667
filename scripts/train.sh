#!/usr/bin/env bash
# Train on this machine: ./scripts/train.sh [CONFIG.toml] [--section.key value ...]
# Without a CONFIG, a small GPT learns Python source code in minutes, even on a CPU, and continues a prompt.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
install_environment plot

gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
processes=${NPROC:-$((gpus > 0 ? gpus : 2))}
cores=$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}

if [ $# -gt 0 ] && [ "${1#--}" = "$1" ]; then
  settings=(--job.config_file "$@")
  prompt=
else # the small model, with a batch size that any number of processes divides
  settings=(--job.config_file train_configs/debug_gpt.toml --training.global_batch_size $((4 * processes)) "$@")
  prompt='def __init__(self, '
fi

# torchrun's default port is taken if another run is on this machine.
port=${MASTER_PORT:-$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')}

# Reports a wrong setting in one sentence, before processes start.
WORLD_SIZE=$processes python train.py "${settings[@]}" --job.dry_run true
torchrun --master_port="$port" --nproc_per_node="$processes" train.py "${settings[@]}"
python scripts/compare.py "${settings[@]}" || true # a run whose losses are all NaN has no curve
if [ -n "$prompt" ]; then
  echo "--- the trained model continues a prompt ---"
  python scripts/generate.py "${settings[@]}" --prompt "$prompt" --max_new_tokens 300
fi
