"""Save on one layout, continue on another."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from groups import make_group
from textbook import small_config
from workers import run_ranks

from pasync import checkpoint, checksums, disk
from pasync.checkpoint import Checkpoints
from pasync.errors import CheckpointError, PasyncError
from pasync.geometry import read_geometry
from pasync.model.tiny import new_model, random_model, save_model
from pasync.parallel.ranks import Ranks
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


@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 1, 2), (1, 1, 3), (2, 1, 1), (1, 2, 1), (2, 2, 1)])
def test_a_run_continues_on_any_layout(tmp_path, model, straight, layout):
    saved_on, folder, weights = straight
    shutil.copytree(folder / "checkpoints" / "iteration-00002", tmp_path / "checkpoints" / "iteration-00002")
    results = on_layout(layout, tmp_path, model, 4)
    assert [first for first, _ in results] == [2] * len(results)
    continued = results[0][1]
    assert torch.equal(continued, weights) if layout == saved_on else (continued - weights).abs().max() < 1e-6


def test_only_complete_checkpoints_are_chosen_and_the_oldest_deleted(tmp_path, model, ranks):
    train(ranks, tmp_path, model, 3)
    folder = tmp_path / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["iteration-00002", "iteration-00003"]
    (folder / "iteration-00009.partial").mkdir()
    assert train(ranks, tmp_path, model, 4)[0] == 3
    assert sorted(p.name for p in folder.iterdir()) == ["iteration-00003", "iteration-00004"]


def test_a_checkpoint_that_cannot_be_written_is_a_named_error_and_keeps_the_one_before(tmp_path, model, ranks, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("no space left on device")

    train(ranks, tmp_path, model, 1)
    monkeypatch.setattr(checkpoint.dcp, "save", full)
    with pytest.raises(CheckpointError, match="could not be written: no space left"):
        train(ranks, tmp_path, model, 2)
    monkeypatch.undo()
    assert train(ranks, tmp_path, model, 2)[0] == 1


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
    named = f"CheckpointError: a checkpoint could not be written: {cause}no space left on device"
    assert set(run_ranks(failing, 2, tmp_path, model, where)) == {named}


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_last_line(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def flip_digit(path: Path) -> None:
    text = path.read_text()
    path.write_text(("0" if text[0] != "0" else "1") + text[1:])


DATA, LIST = ("__0_0.distcp", "__1_0.distcp"), checksums.NAME
DAMAGE = [
    (flip_byte, DATA[1], DATA[1]), (cut_half, DATA[0], DATA[0]), (Path.unlink, DATA[1], DATA[1]),
    (flip_byte, ".metadata", ".metadata"), (Path.unlink, ".metadata", ".metadata"), (Path.unlink, "history", "history"),
    (Path.unlink, LIST, LIST), (cut_half, LIST, f".*{LIST}.*"), (flip_digit, LIST, ".metadata"), (cut_last_line, LIST, "history"),
]  # fmt: skip
"""What is done to which file, and the files that are named for it."""


@pytest.fixture(scope="module")
def by_two_ranks(model, tmp_path_factory) -> Path:
    """Checkpoints 1 and 2 of two ranks."""
    folder = tmp_path_factory.mktemp("two")
    run_ranks(train, 2, folder, model, 2)
    return folder / "checkpoints"


def test_checksums_are_those_of_sha256sum(by_two_ranks):
    folder = by_two_ranks / "iteration-00002"
    done = subprocess.run(["sha256sum", "--strict", "-c", checksums.NAME], cwd=folder, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == len(list(folder.iterdir())) - 1 == 4


@pytest.mark.parametrize(("damage", "name", "named"), DAMAGE, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, model, ranks, by_two_ranks, capsys, damage, name, named):
    folder = Path(shutil.copytree(by_two_ranks, tmp_path / "checkpoints"))
    damage(folder / "iteration-00002" / name)
    assert train(ranks, tmp_path, model, 1)[0] == 1
    said = capsys.readouterr().out
    pattern = f"WARNING: checkpoint iteration-00002 is damaged and not used: gone or not what was written: {named}\n"
    assert re.search(pattern, said) and "iteration-00001" not in said


def test_every_rank_goes_back_to_the_same_checkpoint_and_the_damaged_one_does_not_count_as_kept(tmp_path, model, by_two_ranks):
    folder = Path(shutil.copytree(by_two_ranks, tmp_path / "checkpoints"))
    flip_byte(folder / "iteration-00002" / "__0_0.distcp")
    shutil.copytree(folder / "iteration-00002", folder / "iteration-00007")
    assert [first for first, _ in run_ranks(train, 2, tmp_path, model, 2)] == [1, 1]
    assert sorted(p.name for p in folder.iterdir()) == ["iteration-00001", "iteration-00002"]
    assert [first for first, _ in run_ranks(train, 2, tmp_path, model, 2)] == [2, 2]


def test_if_every_checkpoint_is_damaged_the_run_does_not_begin_again_in_silence(tmp_path, model, ranks, by_two_ranks):
    folder = Path(shutil.copytree(by_two_ranks, tmp_path / "checkpoints"))
    for checkpoint_ in folder.iterdir():
        cut_half(checkpoint_ / "__0_0.distcp")
    for _ in range(2):  # and looking changes nothing
        with pytest.raises(CheckpointError, match="every checkpoint in .* is damaged"):
            train(ranks, tmp_path, model, 2)


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path, model, ranks, monkeypatch):
    train(ranks, tmp_path, model, 1)
    folder = tmp_path / "checkpoints"
    size = sum(p.stat().st_size for p in (folder / "iteration-00001").iterdir())
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=size // 2))
    monkeypatch.setattr(checkpoint.dcp, "save", None)
    with pytest.raises(CheckpointError, match=r"the disk is full: a checkpoint takes .* has .* left"):
        train(ranks, tmp_path, model, 2)
    monkeypatch.undo()
    assert train(ranks, tmp_path, model, 2)[0] == 1


def test_the_room_asked_for_is_what_a_checkpoint_takes(tmp_path, ranks):
    save_model(new_model("qwen2", hidden=256, layers=4, heads=4, intermediate=1024, positions=1024, tied=True), tmp_path / "larger")
    train(ranks, tmp_path, tmp_path / "larger", 1)
    size = sum(p.stat().st_size for p in (tmp_path / "checkpoints" / "iteration-00001").iterdir())
    asked = disk.SPARE * disk.STATE_BYTES * read_geometry(tmp_path / "larger").num_parameters
    assert size <= asked < 1.05 * size


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path, model, ranks):
    train(ranks, tmp_path, model, 1)
    random_model(tmp_path / "other", "qwen3", tied=False)
    with pytest.raises(CheckpointError, match="is of another model: it holds .* as None"):
        train(ranks, tmp_path, tmp_path / "other", 2)
