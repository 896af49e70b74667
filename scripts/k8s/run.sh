#!/usr/bin/env bash
# What a pod of pytorchjob.yaml runs: scripts/k8s/run.sh CONFIG.toml [--section.key value ...]
# The operator's PET_* variables tell torchrun how many pods there are and where they meet; NPROC is the number of
# processes per pod (default: its GPUs). Ends with 143, on which the operator starts the pod again, if the run was
# stopped before its last step, or failed after it had got further, as where another pod was lost.
set -uo pipefail
cd "$(dirname "$0")/../.."
settings=(--job.config_file "$@")
before=$(python scripts/resumable.py "${settings[@]}")
[ $? -ne 2 ] || exit 2
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # else restarted processes find the addresses of those that failed

# Kubernetes sends SIGTERM to this shell alone, which passes it on to train.py. torchrun must not notice: it would kill
# its processes 30 s later, and those of the other pods would wait for it for 5 minutes.
(trap '' TERM && exec torchrun --nproc_per_node="${NPROC:-gpu}" --signals_to_handle=SIGINT train.py "${settings[@]}") &
torchrun=$!
trap 'kill -TERM $(grep -ls "^PPid:[[:space:]]*$torchrun$" /proc/[0-9]*/status | cut -d/ -f3)' TERM
while kill -0 "$torchrun" 2>/dev/null; do
  wait "$torchrun" # until it ends, or this shell gets a signal
done
wait "$torchrun"
code=$?

if after=$(python scripts/resumable.py "${settings[@]}") && { [ "$code" -eq 0 ] || [ "$after" != "$before" ]; }; then
  echo "$after"
  code=143
fi
exit "$code"
