"""Save on one number of ranks, continue on another."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from groups import make_group
from textbook import small_config
from workers import free_port, run_ranks

from pasync import checkpoint
from pasync.checkpoint import Checkpoints
from pasync.errors import TrainingError
from pasync.model.tiny import random_model
from pasync.parallel.ranks import Ranks, join_ranks
from pasync.trainer import Trainer

RNG = np.random.default_rng(3)
GROUPS = [make_group(RNG, 2 + i, [3, 5, 2], rewards=[1, 0, 0.5], group_id=i) for i in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "qwen2"
    random_model(folder, "qwen2", tied=True, seed=1)
    return folder


def train(ranks: Ranks, folder: Path, model: Path, upto: int, keep: int = 2) -> tuple[int, torch.Tensor]:
    """Continue the run in `folder`; returns where it began and the weights, and saves after every iteration."""
    (folder / str(ranks.rank)).mkdir(exist_ok=True)
    config = small_config(folder / str(ranks.rank), model, "checkpoint.every=1", f"checkpoint.keep={keep}", "optimizer.eps=1e-3")
    trainer = Trainer(config, model, ranks)
    checkpoints = Checkpoints(config, folder, trainer)
    first = checkpoints.resume()
    for t in range(first, upto):
        trainer.forward_backward([GROUPS[ranks.rank :: ranks.size]])
        trainer.optimizer_step(t)
        checkpoints.save(t + 1)
    checkpoints.finish()
    return first, torch.cat([p.detach().flatten() for p in trainer.models.policy.parameters()])


@pytest.fixture(scope="module")
def straight(model, tmp_path_factory) -> tuple[Path, torch.Tensor]:
    """Folder and weights of four iterations on two ranks, with every checkpoint kept."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, run_ranks(train, 2, folder, model, 4, 9)[0][1]


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    with join_ranks("cpu", deadline_s=30) as joined:
        yield joined


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_run_saved_on_two_ranks_continues_on_any_number(tmp_path, model, straight, size):
    shutil.copytree(straight[0] / "checkpoints" / "iteration-00002", tmp_path / "checkpoints" / "iteration-00002")
    results = run_ranks(train, size, tmp_path, model, 4)
    assert [first for first, _ in results] == [2] * size
    for _, weights in results:
        assert torch.equal(weights, straight[1]) if size == 2 else (weights - straight[1]).abs().max() < 1e-6


def test_only_complete_checkpoints_are_chosen_and_the_oldest_deleted(tmp_path, model, alone):
    train(alone, tmp_path, model, 3)
    folder = tmp_path / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["iteration-00002", "iteration-00003"]
    (folder / "iteration-00009.partial").mkdir()
    (folder / "iteration-00008").mkdir()  # somebody emptied it
    assert train(alone, tmp_path, model, 3)[0] == 3


def test_a_checkpoint_that_cannot_be_written_is_a_named_error_and_keeps_the_one_before(tmp_path, model, alone, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("no space left on device")

    train(alone, tmp_path, model, 1)
    monkeypatch.setattr(checkpoint.dcp, "save", full)
    with pytest.raises(TrainingError, match="could not be written: no space left"):
        train(alone, tmp_path, model, 2)
    monkeypatch.undo()
    assert train(alone, tmp_path, model, 2)[0] == 1


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path, model, alone):
    train(alone, tmp_path, model, 1)
    random_model(tmp_path / "other", "qwen3", tied=False)
    with pytest.raises(TrainingError, match="is of another model: it holds .* as None"):
        train(alone, tmp_path, tmp_path / "other", 2)
