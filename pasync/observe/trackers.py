"""The numbers of metrics.jsonl in TensorBoard and Weights & Biases as well, through accelerate's trackers.

    RunLog.write --line--> Trackers --> <run>/tensorboard, or the W&B run that belongs to the run folder

A continued run goes on in both. TensorBoard forgets the iterations that are done again (its `purge_step`); W&B keeps what it has of them,
because its steps only rise (https://docs.wandb.ai/models/runs/resuming).
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pasync.config import Config

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker


def problems(config: Config) -> list[str]:
    """Trackers of the configuration that are not installed."""
    return [f"run.trackers: {name} is not installed, pip install {name}" for name in config.run.trackers if find_spec(name) is None]


class Trackers:
    """Those of one run. Belongs to rank 0's main thread.

    Args:
        first: iteration that the run begins with.
    """

    def __init__(self, config: Config, run: Path, first: int) -> None:
        self._trackers = [_started(name, config, run, first) for name in config.run.trackers]

    def log(self, line: dict[str, float | None]) -> None:
        """Hand over one line of metrics.jsonl; what is not known is left out."""
        values = {key: value for key, value in line.items() if value is not None}
        for tracker in self._trackers:
            tracker.log(values, step=int(values["iteration"]))

    def close(self) -> None:
        """Write what is not written yet."""
        for tracker in self._trackers:
            tracker.finish()


def _started(name: str, config: Config, run: Path, first: int) -> GeneralTracker:
    from accelerate import PartialState  # loads torch, which the launcher does without
    from accelerate.tracking import TensorBoardTracker, WandBTracker

    PartialState(cpu=True)  # its logger insists on it; of the process group that is there, and no device is touched

    tracker: GeneralTracker
    if name == "tensorboard":
        tracker = TensorBoardTracker(name, run, purge_step=first)
    else:
        identity = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]
        tracker = WandBTracker(config.name, name=run.name, id=identity, resume="allow", dir=str(run), config=config.model_dump(mode="json"))
    tracker.start()
    return tracker
