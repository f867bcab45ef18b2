"""Which tests one worker of `pytest -n` runs, one after the other."""

import re
from typing import Any

import pytest

SINGLE = ("benchmarks", "doctor", "elastic", "newcomer", "nodes", "runs", "weight_sync")
"""Files of system tests that share nothing."""


def group(nodeid: str) -> str:
    """Tests that share what has been started: those of a file, of the contract, or of a row of faults."""
    file, _, name = nodeid.partition("::")
    if file.startswith("tests/contract/"):
        return "contract"
    row = re.match(r"test_fault\[(\w+)-", name)
    alone = file in [f"tests/system/test_{single}.py" for single in SINGLE]
    return f"{file}::{row[1]}" if row else nodeid if alone else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whoever has nothing to do takes the next group. (Its `--dist loadgroup` groups nothing with pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    return Scheduler(config, log)
