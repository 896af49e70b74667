#!/usr/bin/env bash
# Train on this machine: ./scripts/train.sh [CONFIG.toml] [--section.key value ...]
# Without a CONFIG a small GPT learns Python source code in minutes, on a CPU too, and continues a prompt.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh

config=train_configs/debug_gpt.toml
shows_sample=yes
if [ $# -gt 0 ] && [ "${1#--}" = "$1" ]; then
  config=$1
  shows_sample=no
  shift
fi

gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
processes=${NPROC:-$([ "$gpus" -gt 0 ] && echo "$gpus" || echo 2)}
cores=$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
threads=$((cores / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}

# A wrong setting is told in one sentence here, before processes start.
WORLD_SIZE=$processes LOCAL_WORLD_SIZE=$processes python train.py --job.config_file "$config" "$@" --job.dry_run true
torchrun --nproc_per_node="$processes" train.py --job.config_file "$config" "$@"
if [ "$shows_sample" = yes ]; then
  echo "--- the trained model continues a prompt ---"
  python scripts/generate.py --job.config_file "$config" "$@" --prompt $'def __init__(self, ' --max_new_tokens 300
fi
