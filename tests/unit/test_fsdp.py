"""Replicas that hold slices of everything (`parallel.data=fsdp`) against replicas that hold whole weights (`zero1`)."""

from pathlib import Path

import pytest
import torch
from test_checkpoint import GROUPS, train
from textbook import small_config
from workers import run_ranks

from pasync.model.tiny import random_model
from pasync.parallel.fsdp import local
from pasync.parallel.ranks import Ranks
from pasync.trainer import Trainer

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "qwen3"
    random_model(folder, "qwen3", tied=True, seed=1, heads=4)
    return folder


def two_batches(ranks: Ranks, folder: Path, model: Path, data: str) -> tuple[dict[str, torch.Tensor], int, set[torch.dtype]]:
    """This rank's optimizer state, how many numbers of the policy it holds, and the types of all buffers."""
    place = folder / f"{data}-{ranks.rank}"
    place.mkdir()
    trainer = Trainer(
        small_config(
            place, model, f"parallel.data={data}", "model.dtype=bfloat16", "model.gradient_checkpointing=true", "algorithm.kl_coef=0.1",
            "parallel.ranks=2", "optimizer.eps=1e-3", "parallel.micro_batch_tokens=20",
        ), model, ranks,
    )  # fmt: skip
    for t in range(2):
        mine = GROUPS[:3] if ranks.is_first else GROUPS[3:]  # three micro-batches here, one there
        trainer.forward_backward([mine])
        trainer.optimizer_step(t)
    policy = trainer.models.policy
    return trainer.optimizer.state(), sum(local(p).numel() for p in policy.parameters()), {b.dtype for b in policy.buffers()}


def test_bfloat16_with_checkpointed_layers_trains_as_with_whole_replicas_and_holds_half(tmp_path, model):
    whole, sharded = (run_ranks(two_batches, 2, tmp_path, model, data) for data in ("zero1", "fsdp"))
    for (ours, numbers, buffers), (expected, all_numbers, _) in zip(sharded, whole, strict=True):
        assert ours.keys() == expected.keys() and ours["step"] == 2
        for key, rows in expected.items():
            assert (ours[key] - rows).norm() <= 1e-5 * rows.norm(), key
        assert numbers <= 0.51 * all_numbers
        assert buffers == {torch.float32}  # rotary angles


@pytest.mark.parametrize(("first", "then"), [("zero1", "fsdp"), ("fsdp", "zero1"), ("fsdp", "fsdp")])
def test_a_run_continues_when_its_replicas_share_memory_otherwise(tmp_path, model, first, then):
    [(_, straight), _] = run_ranks(train, 2, tmp_path / "straight", model, 4, 9, f"parallel.data={first}")
    run_ranks(train, 2, tmp_path / "stopped", model, 2, 2, f"parallel.data={first}")
    [(begun, continued), _] = run_ranks(train, 2, tmp_path / "stopped", model, 4, 2, f"parallel.data={then}")
    assert begun == 2
    assert torch.equal(continued, straight) if first == then else (continued - straight).abs().max() < 1e-6
