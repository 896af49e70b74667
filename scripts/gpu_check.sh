#!/usr/bin/env bash
# What a GPU has to show, in one command of at most nine minutes: ./scripts/gpu_check.sh [--json FILE] [--tiny]
# Installs nothing: it uses .venv where there is one, else the python3 that has torch.
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
[ ! -x .venv/bin/python ] || python=.venv/bin/python
exec "$python" benchmarks/gpu_check.py "$@"
