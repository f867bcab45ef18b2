"""Which tests one worker of `pytest -n` runs, one after the other, and who begins."""

import os
import re
from typing import Any

import pytest

SINGLE = ("benchmarks", "doctor", "elastic", "newcomer", "nodes", "runs", "weight_sync")
"""Files of system tests that share nothing."""
LONG = ("faults", "replay", "continue", "weight_sync", "launch", "layouts", "checkpoint", "order_free", "fsdp", "doctor")
"""Files that begin, so that at the end no worker is left alone with one of them."""


def group(nodeid: str) -> str:
    """Tests that share what has been started: those of a file, of the contract, or of a row of faults."""
    file, _, name = nodeid.partition("::")
    if file.startswith("tests/contract/"):
        return "contract"
    row = re.match(r"test_fault\[(\w+)-", name)
    alone = file in [f"tests/system/test_{single}.py" for single in SINGLE]
    return f"{file}::{row[1]}" if row else nodeid if alone else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONG)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whoever has nothing to do takes the next group. (Its `--dist loadgroup` groups nothing with pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    config.option.loadscopereorder = False  # by the number of tests
    return Scheduler(config, log)
