import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure() -> None:
    """Tests that run side by side have cores of their own, or each run would put its servers on the same ones."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        cores = sorted(os.sched_getaffinity(0))
        index, share = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")), max(len(cores) // workers, 1)
        os.sched_setaffinity(0, {cores[i % len(cores)] for i in range(index * share, (index + 1) * share)})


@pytest.fixture(autouse=True)
def no_run_outlives_its_test(tmp_path: Path) -> Iterator[None]:
    """A failed test must not leave a run that slows down or breaks the next one."""
    yield
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("PASYNC_RUN_ID", "").startswith(str(tmp_path)) or f"run.dir={tmp_path}" in " ".join(process.cmdline()):
                process.kill()
