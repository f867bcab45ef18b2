"""The cache of wheels: what is pinned, nothing else."""

import hashlib
import subprocess
import sys
import zipfile

import pytest
from wheels import RegistryUnreachable, fetch, pins

NAME = "pasync_made_up"


def made_wheel(folder, content="x = 1\n"):
    path = folder / f"{NAME}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{NAME}.py", content)
        archive.writestr(f"{NAME}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
        archive.writestr(f"{NAME}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{NAME}-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A registry with one wheel, and its pin."""
    for name in ("registry", "cache"):
        (tmp_path / name).mkdir()
    wheel = made_wheel(tmp_path / "registry")
    (tmp_path / "wheels.txt").write_text(f"{NAME}==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "registry"))
    return tmp_path


def test_a_wheel_is_downloaded_once_and_read_without_unpacking(registry):
    wheels = fetch(registry / "cache", registry / "wheels.txt")
    (registry / "registry" / wheels[NAME].path.name).unlink()
    again = fetch(registry / "cache", registry / "wheels.txt")[NAME]
    assert again.read(f"{NAME}.py") == b"x = 1\n" and again.read("nothing.py") is None and again.metadata["Version"] == "1.0"


def test_another_wheel_than_the_pinned_one_fails(registry):
    made_wheel(registry / "registry", "x = 2\n")
    with pytest.raises(ValueError, match="DO NOT MATCH THE HASHES"):
        fetch(registry / "cache", registry / "wheels.txt")


def test_a_version_that_the_registry_does_not_have_fails(registry):
    text = (registry / "wheels.txt").read_text()
    (registry / "wheels.txt").write_text(text.replace("1.0", "1.1"))
    with pytest.raises(ValueError, match="No matching distribution"):
        fetch(registry / "cache", registry / "wheels.txt")


def test_a_changed_file_in_the_cache_fails(registry):
    path = fetch(registry / "cache", registry / "wheels.txt")[NAME].path
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ValueError, match="not the wheel that wheels.txt pins"):
        fetch(registry / "cache", registry / "wheels.txt")


def test_a_registry_that_cannot_be_reached_is_told_apart(registry, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nobody listens
    with pytest.raises(RegistryUnreachable, match="No matching distribution"):
        fetch(registry / "cache", registry / "wheels.txt")


@pytest.mark.timeout(120)
def test_without_a_registry_the_contract_is_skipped_loudly(registry, monkeypatch):
    environment = {"PASYNC_CACHE": str(registry / "cache"), "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    command = [sys.executable, "-m", "pytest", "-q", str(__file__).replace("test_wheels", "test_planted"), "-k", "row_that_nothing_holds"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "1 skipped" in done.stdout and "THE CONTRACT WITH THE NPU PACKAGES IS NOT CHECKED" in done.stdout


def test_pins_are_read_with_the_names_of_wheel_files():
    assert pins(f"# a comment\nvllm-ascend==0.23.0 --hash=sha256:{'a' * 64}\n") == {"vllm_ascend": ("0.23.0", "a" * 64)}
