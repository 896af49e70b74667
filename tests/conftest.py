"""The order of the test files, which two processes take in turns."""

import pytest

# The longest file and those that mostly wait for processes together, then those that compute, units last: so neither
# process is left alone with a long file, and the cores are rarely idle or fought for.
_ORDER = ("tests/distributed/test_layout_matrix.py", "tests/e2e/", "tests/distributed/", "tests/unit/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: next((i for i, start in enumerate(_ORDER) if item.nodeid.startswith(start)), len(_ORDER))
    )
