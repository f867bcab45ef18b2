"""A micro-batch whose log-probs, loss or gradient are not finite: found, its groups kept, and left out or raised, on every layout."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from groups import make_group
from safetensors.torch import load_file, save_file
from test_layouts import whole_weights
from textbook import small_config
from workers import run_ranks

from pasync import train
from pasync.batch import Batch
from pasync.config import Config
from pasync.data.prompts import Prompt
from pasync.errors import TrainingError
from pasync.messages import Group, Sampling, float_bytes, int_bytes, ints
from pasync.model.tiny import random_model
from pasync.parallel.ranks import Ranks
from pasync.rollout.recording import Recording, ReplayProducer, read_recording, record
from pasync.trainer import Trainer, require_in_bounds

pytestmark = pytest.mark.timeout(180)
PLANTED = 250
"""A token that only the bad group has."""
BAD = 2
EMBEDDING = "model.embed_tokens.weight"


class Case(NamedTuple):
    """One way in which the group BAD is not finite."""

    planted: str
    """`weights`: PLANTED has a NaN embedding. `logprobs`: the server gave NaN. `gradient`: only the backward pass does."""
    mode: str
    updates: int = 1
    data: str = "zero1"
    accumulate: str = "float32"


class Seen(NamedTuple):
    """What a rank saw."""

    error: str
    metrics: dict[str, float]
    weights: dict[str, torch.Tensor]
    """On rank 0."""


def groups() -> list[Group]:
    rng = np.random.default_rng(5)
    return [make_group(rng, 4, [3, 5, 2], rewards=[1, 0, 0.5], group_id=i, vocabulary=200) for i in range(5)]


def bad_groups(planted: str) -> list[Group]:
    """The same, but that one holds PLANTED, and log-probs that are no numbers if these are planted."""
    found = groups()
    ids = ints(found[BAD].prompt_ids).copy()
    ids[1] = PLANTED
    first, *others = found[BAD].responses
    if planted == "logprobs":
        first = msgspec.structs.replace(first, logprobs=float_bytes([-1.0, np.nan, -1.0]))
    found[BAD] = msgspec.structs.replace(found[BAD], prompt_ids=int_bytes(ids), responses=[first, *others])
    return found


def without_bad() -> list[Group]:
    """The same batch, and the bad group without gradient: counted in the denominator, and no more."""
    found = groups()
    equal = [msgspec.structs.replace(r, reward=1.0) for r in found[BAD].responses]
    found[BAD] = msgspec.structs.replace(found[BAD], responses=equal)
    return found


def config_of(ranks: Ranks, folder: Path, model: Path, case: Case) -> Config:
    place, mesh = folder / f"config-{ranks.rank}", ranks.mesh
    place.mkdir(exist_ok=True)
    return small_config(
        place, model, f"parallel.ranks={ranks.size}", f"parallel.pipeline={mesh.pipeline.size}", f"parallel.tensor={mesh.tensor.size}",
        f"parallel.data={case.data}", f"parallel.accumulate={case.accumulate}", f"run.dir={folder}", "parallel.micro_batch_tokens=16",
        f"algorithm.on_nonfinite={case.mode}", f"algorithm.updates_per_batch={case.updates}", "optimizer.eps=1e-3", "optimizer.lr=0.02",
    )  # fmt: skip


def spoil_gradients(trainer: Trainer) -> None:
    """Of micro-batches with PLANTED, of the head, which the last stage holds."""
    spoiled, loss = [False], trainer._loss

    def watched(batch: Any, logps: Any) -> torch.Tensor:
        spoiled[0] = bool((batch.input_ids == PLANTED).any())
        return loss(batch, logps)

    trainer._loss = watched  # type: ignore[method-assign]
    if trainer.mesh.pipeline.is_last:
        trainer.models.parameters["lm_head.weight"].register_hook(lambda g: g * torch.inf if spoiled[0] else g)


def one_batch(ranks: Ranks, folder: Path, model: Path, batch: list[Group], case: Case) -> Seen:
    """Runs on every rank."""
    trainer = Trainer(config_of(ranks, folder, model, case), model, ranks)
    if case.planted == "gradient":
        spoil_gradients(trainer)
    mesh, error, metrics = ranks.mesh, "", dict[str, float]()
    dealt = [batch[at : at + mesh.data.size] for at in range(0, len(batch), mesh.data.size)]
    mine = [among[mesh.data.index : mesh.data.index + 1] for among in dealt]  # in the last round there may be none
    trainer.forward_backward(mine if mesh.pipeline.is_first else None)
    try:
        metrics = trainer.optimizer_step(0)
    except TrainingError as raised:
        error = str(raised)
    return Seen(error, metrics, whole_weights(trainer))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """A model, and the same with a NaN embedding of PLANTED."""
    clean, planted = (tmp_path_factory.mktemp("model") / name for name in ("clean", "planted"))
    for folder in (clean, planted):
        random_model(folder, "qwen3", tied=False, seed=1, heads=4)
    weights = load_file(planted / "model.safetensors")
    weights[EMBEDDING][PLANTED] = float("nan")
    save_file(weights, planted / "model.safetensors", {"format": "pt"})
    return {"weights": planted, "logprobs": clean, "gradient": clean, "clean": clean}


@pytest.fixture(scope="module")
def expected(models, tmp_path_factory) -> dict[int, Seen]:
    """By updates: one process that was given the batch without the bad group's gradient."""
    return {
        updates: run_ranks(one_batch, 1, tmp_path_factory.mktemp("alone"), models["clean"], without_bad(), Case("", "raise", updates))[0]
        for updates in (1, 2)
    }


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Largest of any weight but PLANTED's embedding."""
    assert ours.keys() == theirs.keys()
    changes = {name: (weight - theirs[name]).abs() for name, weight in ours.items()}
    changes[EMBEDDING][PLANTED] = 0
    return max(change.max().item() for change in changes.values())


LAYOUTS = [
    (1, 1, 1, Case("weights", "skip")),
    (1, 1, 1, Case("logprobs", "skip", updates=2)),
    (1, 1, 1, Case("gradient", "skip", updates=2)),
    (1, 1, 1, Case("weights", "skip", accumulate="exact")),
    (2, 1, 1, Case("weights", "skip", updates=2)),
    (2, 1, 1, Case("weights", "skip", data="fsdp")),
    (2, 2, 1, Case("gradient", "skip", updates=2)),
    (2, 2, 1, Case("weights", "skip")),
    (4, 2, 1, Case("weights", "skip", updates=2, data="fsdp")),
    (2, 1, 2, Case("weights", "skip")),
]
"""(ranks, stages, shards, case)."""


@pytest.mark.parametrize(("size", "stages", "shards", "case"), LAYOUTS)
def test_a_skipped_micro_batch_adds_nothing_and_the_others_train_as_without_it(tmp_path, models, expected, size, stages, shards, case):
    folder, batch = models[case.planted], bad_groups(case.planted)
    seen = run_ranks(one_batch, size, tmp_path, folder, batch, case, pipeline=stages, tensor=shards)
    assert not any(rank.error for rank in seen)
    assert all(rank.metrics["policy/skipped_micro_batches"] == 1 for rank in seen)
    assert difference(seen[0].weights, expected[case.updates].weights) < 1e-5
    assert seen[0].metrics["policy/loss"] == pytest.approx(expected[case.updates].metrics["policy/loss"], rel=1e-4, abs=1e-6)
    [kept] = (tmp_path / "nonfinite").glob("rank-*")
    assert [group.group_id for group in read_recording(kept, 0).groups] == [BAD]


@pytest.mark.parametrize(
    ("size", "stages", "planted"), [(1, 1, "gradient"), (1, 1, "logprobs"), (2, 1, "weights"), (2, 2, "weights"), (2, 2, "logprobs")]
)
def test_raise_names_groups_rank_and_file_on_all_ranks_and_changes_no_weight(tmp_path, models, size, stages, planted):
    batch, case = bad_groups(planted), Case(planted, "raise")
    seen = run_ranks(one_batch, size, tmp_path, models[planted], batch, case, pipeline=stages)
    file = tmp_path / "nonfinite" / "rank-0" / "rollouts" / "iteration-00000.msgpack.zst"
    assert len({rank.error for rank in seen}) == 1
    assert f"groups [{BAD}] on rank 0, kept in {file}" in seen[0].error
    assert read_recording(tmp_path / "nonfinite" / "rank-0", 0).groups[0].responses[1] == batch[BAD].responses[1]
    assert difference(seen[0].weights, load_file(models["clean"] / "model.safetensors")) == 0


def test_weights_that_make_every_micro_batch_not_finite_are_an_error_in_any_case(tmp_path, models):
    folder = tmp_path / "model"
    random_model(folder, "qwen3", tied=False, seed=1, heads=4)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    [seen] = run_ranks(one_batch, 1, tmp_path, folder, groups(), Case("", "skip"))
    assert "groups [0, 1, 2, 3, 4] on rank 0" in seen.error


def test_figures_beyond_the_alarms_are_errors_with_the_figure(tmp_path, models):
    config = small_config(tmp_path, models["clean"], "algorithm.kl_coef=0.1", "algorithm.max_kl=0.5", "algorithm.max_logprob_gap=0.01")
    require_in_bounds(config, 3, {"policy/kl": 0.5, "policy/engine_logprob_gap": float("nan")})  # nothing was trained
    with pytest.raises(TrainingError, match="iteration 3: policy/kl=0.51 exceeds algorithm.max_kl=0.5"):
        require_in_bounds(config, 3, {"policy/kl": 0.51, "policy/engine_logprob_gap": 0.001})


def alarmed(ranks: Ranks, folder: Path, model: Path) -> list[str]:
    """An iteration of the real loop with a gap beyond the alarm; what rank 0 did, and the error."""
    config = small_config(folder, model, "algorithm.max_logprob_gap=0.01", f"rollout.source=replay:{folder}")
    source = ReplayProducer(config, folder)
    source.submit([Prompt(i, (1,), "", {}) for i in range(5)], 0, Sampling(3, 1.0, 8))
    seen: list[str] = []
    trainer = Trainer(config, model, ranks)
    train.lead = lambda trainer, leader, act, *args: seen.append(act.__name__)  # type: ignore[assignment]
    leader: Any = SimpleNamespace(batch=Batch(source, 0, iter(()), refills=False))
    try:
        train.iterate(0, config, leader, trainer, train.Trace(folder, "rank-0", 0))
    except TrainingError as error:
        seen.append(str(error))
    return seen


def test_an_alarm_ends_the_run_after_its_iteration_was_written(tmp_path, models):
    record(tmp_path, 0, Recording(groups(), [0.0] * 5))
    [seen] = run_ranks(alarmed, 1, tmp_path, models["clean"])
    assert seen[:2] == ["begin", "finish"] and "exceeds algorithm.max_logprob_gap=0.01" in seen[2]
