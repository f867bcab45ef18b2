"""Weights by way of a file on a disk, as systems do that restart or reload their servers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
from safetensors import TensorSpec, safe_open, serialize_file
from torch import Tensor


def disk_folder() -> Path:
    """The first of the system's folder for temporary files and the present one that is not kept in memory."""
    candidates = [Path(tempfile.gettempdir()).resolve(), Path.cwd()]
    return next((folder for folder in candidates if _filesystem(folder) not in ("tmpfs", "ramfs")), candidates[0])


def save(file: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """As safetensors; tensors may share memory, which its own `save_file` refuses."""
    tensors = dict(weights)
    specs = {
        name: TensorSpec(dtype=str(tensor.dtype).split(".")[1], shape=tensor.shape, data_ptr=tensor.data_ptr(), data_len=tensor.nbytes)
        for name, tensor in tensors.items()
    }
    serialize_file(specs, file)


def saved_weights(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the file."""
    with safe_open(file, framework="pt") as reader:
        for name in reader.keys():  # noqa: SIM118  # it is no mapping
            yield name, reader.get_tensor(name)


def _filesystem(folder: Path) -> str:
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return next(mounts[place] for place in (folder, *folder.parents) if place in mounts)
