#!/usr/bin/env bash
# Check everything that needs a GPU, in at most four minutes: ./scripts/gpu_check.sh [--json FILE] [--tiny]
# Installs nothing. It uses .venv if there is one, else python3, which must have torch.
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
[ ! -x .venv/bin/python ] || python=.venv/bin/python
exec "$python" benchmarks/gpu_check.py "$@"
