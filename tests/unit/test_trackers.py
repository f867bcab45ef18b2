import json
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pasync.config import Config
from pasync.configfile import load
from pasync.errors import ConfigError
from pasync.observe import trackers
from pasync.observe.metrics import RunLog
from pasync.observe.trackers import Trackers

TINY = Path(__file__).parents[2] / "configs" / "tiny_cpu.yaml"


def tracked(*names: str) -> Config:
    return load(TINY, [f"run.trackers=[{','.join(names)}]"])


def log_iterations(run: Path, config: Config, first: int, last: int, value: float) -> None:
    started = Trackers(config, run, first)
    log = RunLog(run, 9, 1, first, started)
    for t in range(first, last):
        log.add({"policy/loss": value + t, "policy/entropy": float("nan")})
        log.write(t)
    started.close()


def test_a_continued_run_has_every_iteration_once_in_tensorboard(tmp_path: Path) -> None:
    config = tracked("tensorboard")
    log_iterations(tmp_path, config, 0, 5, 0.0)
    log_iterations(tmp_path, config, 3, 7, 100.0)  # from the checkpoint of iteration 3
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("policy/loss")] == [(t, t + 100.0 * (t >= 3)) for t in range(7)]
    assert "policy/entropy" not in events.Tags()["scalars"]  # it was never known


def test_a_tracker_that_is_not_installed_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    assert trackers.problems(tracked("wandb")) == ["run.trackers: wandb is not installed, pip install wandb"]
    assert trackers.problems(tracked()) == []


def test_an_unknown_tracker_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="tensorboard"):
        tracked("tensorbord")


def test_a_continued_run_goes_on_in_the_same_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Run:
        started: list[dict[str, object]] = []
        logged: list[int | None] = []

        @classmethod
        def init(cls, **arguments: object) -> "type[Run]":
            cls.started.append(arguments)
            return cls

        @classmethod
        def log(cls, values: dict[str, float], step: int | None = None) -> None:
            json.dumps(values)
            cls.logged.append(step)

        @classmethod
        def finish(cls) -> None: ...

    monkeypatch.setitem(sys.modules, "wandb", Run)  # the real one cannot be had without installing it
    for first, last in ((0, 2), (2, 4)):
        log_iterations(tmp_path, tracked("wandb"), first, last, 0.0)
    one, two = Run.started
    assert one["id"] == two["id"] and two["resume"] == "allow" and one["project"] == "tiny-cpu" and Run.logged == [0, 1, 2, 3]
