#!/usr/bin/env bash
# Run the whole test suite: ./scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
install_environment test
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Two at a time; the tests of a file share what they have computed. In the order of their names: the long ones, of several
# processes, before those of units, so that none is left to run alone at the end.
python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
