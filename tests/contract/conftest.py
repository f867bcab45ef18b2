import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from libraries import Libraries
from wheels import Folder, RegistryUnreachable, Wheel, fetch


@pytest.fixture(scope="session")
def wheels() -> dict[str, Wheel]:
    try:
        return fetch()
    except RegistryUnreachable as error:
        pytest.skip(f"THE CONTRACT WITH THE NPU PACKAGES IS NOT CHECKED: no connection to the package registry: {error}")


@pytest.fixture(scope="session")
def installed() -> Folder:
    """Where this Python's own packages lie."""
    spec = importlib.util.find_spec("vllm")
    assert spec and spec.origin
    return Folder(Path(spec.origin).parents[1])


@pytest.fixture(scope="session")
def worlds(wheels, installed) -> dict[str, Libraries]:
    """By name: the pinned NPU set, and what is installed here."""
    return {"npu": Libraries(*wheels.values()), "installed": Libraries(installed)}
