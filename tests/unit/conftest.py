import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

from workers import free_port  # noqa: E402

from pasync.parallel.ranks import Ranks, join_ranks  # noqa: E402


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """This process as the only rank. Its environment is that of other tests again afterwards: libraries act on what torchrun sets.

    A deadline that no module comes near: a rank that says nothing for 1.5 times as long ends its process, here pytest.
    """
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
            environment.setenv(name, value)
        environment.setenv("MASTER_PORT", str(free_port()))
        with join_ranks("cpu", deadline_s=600) as joined:
            yield joined
