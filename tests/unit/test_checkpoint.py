"""Save on one layout, continue on another."""

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
from pasync.errors import PasyncError, TrainingError
from pasync.model.tiny import random_model
from pasync.parallel.ranks import Ranks, join_ranks
from pasync.trainer import Trainer

pytestmark = pytest.mark.timeout(180)
RNG = np.random.default_rng(3)
GROUPS = [make_group(RNG, 2 + i, [3, 5, 2], rewards=[1, 0, 0.5], group_id=i) for i in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "qwen2"
    random_model(folder, "qwen2", tied=True, seed=1, heads=4)
    return folder


def train(ranks: Ranks, folder: Path, model: Path, upto: int, keep: int = 2, *overrides: str) -> tuple[int, torch.Tensor]:
    """Continue the run in `folder`, save after every iteration; returns where it began and, on rank 0, the weights."""
    mesh = ranks.mesh
    (folder / str(ranks.rank)).mkdir(parents=True, exist_ok=True)
    config = small_config(
        folder / str(ranks.rank), model, "checkpoint.every=1", f"checkpoint.keep={keep}", "optimizer.eps=1e-3", "algorithm.batch_groups=12",
        f"parallel.ranks={ranks.size}", f"parallel.pipeline={mesh.pipeline.size}", f"parallel.tensor={mesh.tensor.size}", *overrides,
    )  # fmt: skip
    trainer = Trainer(config, model, ranks)
    checkpoints = Checkpoints(config, folder, trainer)
    first = checkpoints.resume()
    assert checkpoints.history == (f"known at {first}".encode() if first else b"")
    for t in range(first, upto):
        trainer.forward_backward([GROUPS[mesh.data.index :: mesh.data.size]] if mesh.pipeline.is_first else None)
        trainer.optimizer_step(t)
        checkpoints.save(t + 1, f"known at {t + 1}".encode())
    checkpoints.finish()
    found: dict[str, torch.Tensor] = {}
    ranks.on_first(lambda: found.update((name, w.flatten().clone()) for name, w in trainer.models.weights()), trainer.calls)
    return first, torch.cat([found[name] for name in sorted(found)]) if found else torch.zeros(0)


@pytest.fixture(scope="module", params=[(1, 1, 2), (2, 2, 1)], ids=["two-replicas", "two-stages-two-shards"])
def straight(request, model, tmp_path_factory) -> tuple[tuple[int, int, int], Path, torch.Tensor]:
    """Layout, folder and weights of four iterations, with every checkpoint kept."""
    folder = tmp_path_factory.mktemp("straight")
    return request.param, folder, on_layout(request.param, folder, model, 4, 9)[0][1]


def on_layout(layout: tuple[int, int, int], *args: object) -> list[tuple[int, torch.Tensor]]:
    pipeline, tensor, data = layout
    return run_ranks(train, pipeline * tensor * data, *args, pipeline=pipeline, tensor=tensor)


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    with join_ranks("cpu", deadline_s=30) as joined:
        yield joined


@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 1, 2), (1, 1, 3), (2, 1, 1), (1, 2, 1), (2, 2, 1)])
def test_a_run_continues_on_any_layout(tmp_path, model, straight, layout):
    saved_on, folder, weights = straight
    shutil.copytree(folder / "checkpoints" / "iteration-00002", tmp_path / "checkpoints" / "iteration-00002")
    results = on_layout(layout, tmp_path, model, 4)
    assert [first for first, _ in results] == [2] * len(results)
    continued = results[0][1]
    assert torch.equal(continued, weights) if layout == saved_on else (continued - weights).abs().max() < 1e-6


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


def failing(ranks: Ranks, folder: Path, model: Path, where: str) -> str:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    if ranks.is_first and where == "naming":  # what only rank 0 does, after all have written
        Path.write_bytes = full  # type: ignore[method-assign, assignment]
    if not ranks.is_first and where == "writing":
        checkpoint.dcp.filesystem.FileSystemWriter.write_data = full  # type: ignore[method-assign, assignment]
    try:
        train(ranks, folder, model, 1)
    except PasyncError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(("where", "cause"), [("naming", ""), ("writing", "rank-1: ")])
def test_what_one_rank_cannot_write_is_named_on_all(tmp_path, model, where, cause):
    named = f"TrainingError: a checkpoint could not be written: {cause}no space left on device"
    assert set(run_ranks(failing, 2, tmp_path, model, where)) == {named}


def test_a_damaged_checkpoint_is_named(tmp_path, model, alone):
    train(alone, tmp_path, model, 1)
    [data] = (tmp_path / "checkpoints" / "iteration-00001").glob("*.distcp")
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with pytest.raises(TrainingError, match="iteration-00001 could not be read: rank-0"):
        train(alone, tmp_path, model, 2)


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path, model, alone):
    train(alone, tmp_path, model, 1)
    random_model(tmp_path / "other", "qwen3", tied=False)
    with pytest.raises(TrainingError, match="is of another model: it holds .* as None"):
        train(alone, tmp_path, tmp_path / "other", 2)
