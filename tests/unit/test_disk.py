"""Sizes by hand, against a disk of any size."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from textbook import small_config

from pasync import disk
from pasync.errors import CheckpointError
from pasync.geometry import Geometry

GEOMETRY = Geometry(10, 20, 1, 2, 1, 5, 100, tied=True, input_bias=False, output_bias=False, mlp_bias=False, head_norms=False)
WEIGHTS = 100 * 10 + 10 + (2 * 10 + 10 * 10 + 2 * 10 * 5 + 10 * 10 + 3 * 10 * 20)
STATE = disk.SPARE * 12 * WEIGHTS


def free(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(size)) if path.exists() else None)


@pytest.mark.parametrize(("overrides", "needed"), [
    (["checkpoint.every=1", "checkpoint.keep=3"], 4 * STATE + 4 * WEIGHTS),
    (["checkpoint.every=1", "checkpoint.keep=3", "model.dtype=bfloat16"], 4 * STATE + 2 * WEIGHTS),
    ([], 4 * WEIGHTS),
])  # fmt: skip
def test_a_run_needs_room_for_one_checkpoint_more_than_it_keeps_and_for_its_model(tmp_path, monkeypatch, overrides, needed):
    config, run = small_config(tmp_path, "m", *overrides), tmp_path / "runs" / "not-there"
    free(monkeypatch, needed + 1)
    assert disk.problems(config, GEOMETRY, run) == []
    free(monkeypatch, needed - 2)
    [problem] = disk.problems(config, GEOMETRY, run)
    assert "checkpoint.keep=" in problem and str(tmp_path) in problem and problem.endswith("GB left")


def test_checkpoints_that_are_there_make_room_for_new_ones(tmp_path, monkeypatch):
    config = small_config(tmp_path, "m", "checkpoint.every=1", "checkpoint.keep=1")
    held = tmp_path / "run" / "checkpoints" / "iteration-00001"
    held.mkdir(parents=True)
    (held / "data").write_bytes(bytes(int(STATE)))
    free(monkeypatch, STATE + 4 * WEIGHTS + 2)
    assert disk.problems(config, GEOMETRY, tmp_path / "run") == []
    assert disk.problems(config, GEOMETRY, tmp_path / "another") != []


def test_a_checkpoint_needs_its_own_room_only(tmp_path: Path, monkeypatch):
    free(monkeypatch, STATE + 1)
    disk.require_room(tmp_path, WEIGHTS)
    free(monkeypatch, STATE - 1)
    with pytest.raises(CheckpointError, match="the disk is full: a checkpoint takes 0.00 GB"):
        disk.require_room(tmp_path, WEIGHTS)
