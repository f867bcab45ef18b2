"""Room on disk: what a run will write, against what is free. No torch.

    launcher, before anything starts:  keep + 1 checkpoints and the exported model  --> problems of the configuration
    rank 0, before each checkpoint:    that one                                     --> CheckpointError
"""

from __future__ import annotations

import shutil
from pathlib import Path

from pasync.config import Config
from pasync.errors import CheckpointError
from pasync.geometry import Geometry

STATE_BYTES = 12
"""Of each weight in a checkpoint: master weight and two moments of AdamW, float32."""
SPARE = 1.02
"""For names, shapes and file headers."""


def problems(config: Config, geometry: Geometry, run: Path) -> list[str]:
    """Why a run in the folder `run`, which need not exist, will fill the disk; empty if it will not.

    Checkpoints that are there are replaced one by one, so what they take is at the run's disposal.
    """
    numbers, keep = geometry.num_parameters, config.checkpoint.keep
    model = numbers * (4 if config.model.dtype == "float32" else 2)
    states = SPARE * STATE_BYTES * numbers * (keep + 1) if config.checkpoint.every else 0.0
    held = sum(path.stat().st_size for path in (run / "checkpoints").rglob("*") if path.is_file())
    parent = next(path for path in (run, *run.parents) if path.exists())
    free = shutil.disk_usage(parent).free
    if max(0.0, states - held) + model <= free:
        return []
    what = f"{keep + 1} checkpoints of {_gigabytes(SPARE * STATE_BYTES * numbers)} and " if states else ""
    return [f"checkpoint.keep={keep}: {what}the model of {_gigabytes(model)} are to be written, {parent} has {_gigabytes(free)} left"]


def require_room(folder: Path, numbers: int) -> None:
    """Raise CheckpointError unless a checkpoint of so many weights fits on the disk of `folder`."""
    size, free = int(SPARE * STATE_BYTES * numbers), shutil.disk_usage(folder).free
    if size > free:
        raise CheckpointError(f"the disk is full: a checkpoint takes {_gigabytes(size)}, {folder} has {_gigabytes(free)} left")


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
