"""The pinned wheels of the NPU set, from the cache or the package registry; files are read inside them, nothing is unpacked or imported.

    wheels.txt --pip download--> ${PASYNC_CACHE:-~/.cache/pasync}/wheels/*.whl --SHA-256 as pinned--> Wheel.read(file)
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from functools import cached_property, lru_cache
from pathlib import Path

PINS = Path(__file__).with_name("wheels.txt")
CACHE = Path(os.environ.get("PASYNC_CACHE") or "~/.cache/pasync").expanduser() / "wheels"
PLATFORMS = ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "manylinux_2_28_aarch64")
UNREACHABLE = re.compile(r"connection broken by|timed out")  # pip says so before each retry


class RegistryUnreachable(Exception):
    """There is no connection to the package registry."""


class Wheel:
    """One wheel file, opened for reading."""

    def __init__(self, path: Path) -> None:
        self.path, self._zip = path, zipfile.ZipFile(path)
        self.files = set(self._zip.namelist())
        self._inflate = lru_cache(maxsize=4)(self._zip.read)

    def read(self, file: str) -> bytes | None:
        """A file's bytes, None if the wheel has no such file."""
        return self._inflate(file) if file in self.files else None

    @cached_property
    def metadata(self) -> Message:
        """Name, version and requirements."""
        return Parser().parsestr(self._info("METADATA"))

    @cached_property
    def entry_points(self) -> str:
        """Text of entry_points.txt."""
        return self._info("entry_points.txt")

    def _info(self, name: str) -> str:
        return self._zip.read(next(f for f in self.files if re.fullmatch(rf"[^/]+\.dist-info/{name}", f))).decode()


class Folder:
    """Installed packages, behind the same interface."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, file: str) -> bytes | None:
        """A file's bytes, None if there is no such file."""
        return (self.path / file).read_bytes() if (self.path / file).is_file() else None


def pins(text: str) -> dict[str, tuple[str, str]]:
    """Package -> (version, SHA-256), from the text of wheels.txt."""
    found = re.findall(r"^([\w.-]+)==(\S+) --hash=sha256:(\w{64})$", text, re.MULTILINE)
    return {name.replace("-", "_"): (version, digest) for name, version, digest in found}


def fetch(cache: Path = CACHE, requirements: Path = PINS) -> dict[str, Wheel]:
    """All pinned wheels by package; downloads those that the cache lacks.

    Raises:
        RegistryUnreachable: a wheel has to be downloaded and there is no connection.
        ValueError: the registry has no such wheel or another one than the pinned, or a file in the cache has been changed.
    """
    wanted = pins(requirements.read_text())
    if any(_cached(cache, name, version) is None for name, (version, _) in wanted.items()):
        _download(cache, requirements)
    wheels = {}
    for name, (version, digest) in wanted.items():
        path = _cached(cache, name, version)
        if path is None or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise ValueError(f"{path or name}: not the wheel that {requirements.name} pins; delete the file to download it again")
        wheels[name] = Wheel(path)
    return wheels


def _cached(cache: Path, name: str, version: str) -> Path | None:
    return next(iter(sorted(cache.glob(f"{name}-{version}-*.whl"))), None)


def _download(cache: Path, requirements: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--progress-bar=off"]
    how = ["--retries=2", "--timeout=20", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    what = [*(f"--platform={name}" for name in PLATFORMS), "--python-version=3.11", f"--requirement={requirements}", f"--dest={cache}"]
    done = subprocess.run([*pip, *how, *what], capture_output=True, text=True, timeout=400)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise RegistryUnreachable(said) if UNREACHABLE.search(done.stdout + done.stderr) else ValueError(f"pip download failed:\n{said}")
