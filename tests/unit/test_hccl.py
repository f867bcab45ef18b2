"""The npu's way of the weight transfer, between real processes: sender and receiver as they are, HCCL replaced (hccl_reference.py)."""

import time
from pathlib import Path

import pytest
import torch
from hccl_reference import (
    Disabled,
    DropsTheSecond,
    ProcessServers,
    PyHcclCommunicator,
    ServerDropsTheLast,
    ServerNeverComes,
    servers,
)
from torch import Tensor

from pasync import device as devices
from pasync.config import Config
from pasync.configfile import load
from pasync.errors import WeightSyncError
from pasync.transport.weights import WeightSender

SHAPES = [("embed", [40, 10]), ("norm", [4]), ("up", [16, 10]), ("down", [10, 10])]  # buckets of 256: larger, two in one, the last


def config(folder: Path, deadline_s: float) -> Config:
    (folder / "c.yaml").write_text(
        "{name: t, iterations: 1, model: {path: m, dtype: float32}, data: {train: {source: x}}, rollout: {max_tokens: 4}, "
        "algorithm: {batch_groups: 2, group_responses: 2}, optimizer: {lr: 1e-3}, sync: {bucket_bytes: 1024}}"
    )
    return load(folder / "c.yaml", [f"sync.deadline_s={deadline_s}"])


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES}


def test_every_weight_of_every_version_reaches_every_server(tmp_path):
    with servers(2, PyHcclCommunicator) as rollout:
        sender = WeightSender(config(tmp_path, 30), rollout, SHAPES, "npu")
        for version in range(3):
            sender.publish(weights(version).items(), version)
            for name in rollout.names:
                held = rollout.received(name, 10)
                assert all(torch.equal(held[key], weight) for key, weight in weights(version).items())


def test_a_group_that_is_closed_frees_its_communicator_and_ends_its_thread(tmp_path):
    with servers(1, PyHcclCommunicator) as rollout:
        group = WeightSender(config(tmp_path, 30), rollout, SHAPES, "npu").group
        group.close()
        assert group._communicator._made.hccl.destroyed.wait(10)
        group._thread.join(10)
        assert not group._thread.is_alive()


def test_a_communicator_that_could_not_load_hccl_is_refused(tmp_path):
    with servers(1, Disabled) as rollout, pytest.raises(WeightSyncError, match="HCCL could not be loaded"):
        WeightSender(config(tmp_path, 20), rollout, SHAPES, "npu")


def test_a_broadcast_that_did_nothing_is_noticed_by_the_sum(tmp_path):
    with servers(1, DropsTheSecond) as rollout:
        sender = WeightSender(config(tmp_path, 20), rollout, SHAPES, "npu")
        with pytest.raises(WeightSyncError, match="server-0 holds weights whose bits sum to"):
            sender.publish(weights(0).items(), 0)


def publish_late(rollout: ProcessServers, sender: WeightSender, version: int) -> str:
    """The error of a sync that must fail at the deadline of 4 s, with a second one for the servers' word."""
    began = time.monotonic()
    with pytest.raises(WeightSyncError) as error:
        sender.publish(weights(version).items(), version)
    assert 4 <= time.monotonic() - began < 14
    return str(error.value)


def test_a_broadcast_that_a_server_left_out_ends_at_the_deadline(tmp_path):
    with servers(1, ServerDropsTheLast) as rollout:
        sender = WeightSender(config(tmp_path, 4), rollout, SHAPES, "npu")
        assert "sending version 0 failed" in (text := publish_late(rollout, sender, 0))
        assert "a server did not take part within 4 s" in text


def test_a_server_that_does_not_come_to_a_sync_ends_at_the_deadline(tmp_path):
    with servers(1, PyHcclCommunicator) as rollout:
        sender = WeightSender(config(tmp_path, 4), rollout, SHAPES, "npu")
        rollout.deaf = True
        assert "sending version 5 failed" in (text := publish_late(rollout, sender, 5))
        assert "a server did not take part within 4 s" in text


def test_a_server_that_never_enters_ends_at_the_deadline(tmp_path):
    with servers(1, ServerNeverComes) as rollout:
        began = time.monotonic()
        with pytest.raises(WeightSyncError, match="joining the transfer group failed after .*: a server did not take part"):
            WeightSender(config(tmp_path, 4), rollout, SHAPES, "npu")
        assert 4 <= time.monotonic() - began < 14


def test_a_trainer_that_does_not_send_is_named_by_the_server(tmp_path):
    with servers(1, PyHcclCommunicator) as rollout:
        WeightSender(config(tmp_path, 4), rollout, SHAPES, "npu")
        rollout.pipes["server-0"].send({"version": 0})
        with pytest.raises(TimeoutError, match="the trainer or another server did not take part within 4 s"):
            rollout.received("server-0", 10)


@pytest.mark.parametrize("value", [None, "1", "2"])
def test_a_server_whose_weights_cannot_be_loaded_again_is_refused(monkeypatch, value):
    monkeypatch.delenv("VLLM_ASCEND_ENABLE_NZ", raising=False)
    if value:
        monkeypatch.setenv("VLLM_ASCEND_ENABLE_NZ", value)
    with pytest.raises(WeightSyncError, match="VLLM_ASCEND_ENABLE_NZ"):
        devices.require_loadable_weights("npu")
    devices.require_loadable_weights("cuda")
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_NZ", "0")
    devices.require_loadable_weights("npu")
