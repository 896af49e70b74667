#!/usr/bin/env bash
# Run the tests: ./scripts/test.sh [quick] [pytest arguments]
# quick: units, each kind of parallelism on two processes against one, and one job as torchrun starts it.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
install_environment test
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ "${1:-}" = quick ]; then
  shift
  set -- tests/unit tests/distributed/test_verify.py::test_product_is_the_same \
    tests/e2e/test_train.py::test_trains_and_prints_once_per_job "$@"
fi
# Two at a time; the tests of a file share what they have computed. In the order of their names: the long ones, of several
# processes, before those of units, so that none is left to run alone at the end.
python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
