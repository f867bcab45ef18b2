import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def no_run_outlives_its_test(tmp_path: Path) -> Iterator[None]:
    """A failed test must not leave a run that slows down or breaks the next one."""
    yield
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("PASYNC_RUN_ID", "").startswith(str(tmp_path)) or f"run.dir={tmp_path}" in " ".join(process.cmdline()):
                process.kill()
