#!/usr/bin/env bash
# What a pod of pytorchjob.yaml or trainjob.yaml runs, titan-pod in the image: run.sh CONFIG [--section.key value ...]
# Kubeflow's PET_* variables tell torchrun the number of pods and the rendezvous; NPROC is the number of processes per pod
# (default: its GPUs). Exits with 143, on which the pod is restarted, if the run was stopped before its last step, or if
# it failed after saving a newer checkpoint, for example because another pod was lost.
set -uo pipefail
settings=(--job.config_file "$@")
before=$(python -m titan_like.commands.resumable "${settings[@]}")
[ $? -ne 2 ] || exit 2
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # otherwise restarted processes find the addresses of failed ones

# Kubernetes sends SIGTERM only to this shell, which passes it on to the run. torchrun must ignore it: it would kill its
# processes 30 s later, and the torchruns of the other pods would wait 5 minutes for it.
(trap '' TERM && exec torchrun --nproc_per_node="${NPROC:-gpu}" --signals_to_handle=SIGINT \
  -m titan_like.commands.train "${settings[@]}") &
torchrun=$!
trap 'kill -TERM $(grep -ls "^PPid:[[:space:]]*$torchrun$" /proc/[0-9]*/status | cut -d/ -f3)' TERM
while kill -0 "$torchrun" 2>/dev/null; do
  wait "$torchrun" # returns when it ends or this shell receives a signal
done
wait "$torchrun"
code=$?

if after=$(python -m titan_like.commands.resumable "${settings[@]}") && { [ "$code" -eq 0 ] || [ "$after" != "$before" ]; }; then
  echo "$after"
  code=143
fi
exit "$code"
