#!/usr/bin/env bash
# Run the tests: ./scripts/test.sh [quick] [pytest arguments]
# quick: the unit tests that are not slow, each kind of parallelism on two processes against one, and one job under
# torchrun.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
install_environment test
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
unset PYTHONDONTWRITEBYTECODE # the processes that tests start would each compile the sources again
if [ "${1:-}" = quick ]; then
  shift
  set -- tests/unit tests/reference tests/distributed/test_verify.py::test_product_is_the_same \
    tests/e2e/test_train.py::test_trains_and_prints_once_per_job -m "not slow and not exhaustive" "$@"
fi
# Two files at a time; the tests of a file share fixtures. tests/conftest.py puts the files in order.
python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
