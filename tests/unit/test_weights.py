import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pasync.config import Config
from pasync.configfile import load
from pasync.errors import RolloutError, WeightSyncError
from pasync.messages import Join, Joined, Message, Probe, Probed, Sync, Synced, float_bytes
from pasync.transport.weights import WeightReceiver, WeightSender, plan_buckets, sums

SHAPES = [("embed", [11, 4]), ("norm", [4]), ("head", [11, 4]), ("scale", [1])]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 50))
def test_buckets_keep_the_order_and_the_limit(sizes, limit):
    buckets = plan_buckets([(str(i), [n]) for i, n in enumerate(sizes)], limit)
    assert [name for bucket in buckets for name, _ in bucket] == [str(i) for i in range(len(sizes))]
    assert all(len(b) == 1 or sum(math.prod(shape) for _, shape in b) <= limit for b in buckets)


class ThreadServers:
    """The rollout side as the sender sees it: every server is a thread with a real receiver in a real gloo group."""

    def __init__(self, count: int, load: Callable[[int, dict[str, Tensor]], dict[str, Tensor]]) -> None:
        self.names = [f"server-{i}" for i in range(count)]
        self.load = load
        self.in_flight = 0
        self.held: dict[str, dict[str, Tensor]] = {}
        self.answers: dict[str, Any] = {}
        self.receivers: dict[str, WeightReceiver] = {}
        self.threads: list[threading.Thread] = []
        self.version_error = 0

    def require_idle(self) -> None:
        if self.in_flight:
            raise RolloutError("in flight")

    def tell(self, server: str, message: Message) -> None:
        self.threads.append(threading.Thread(target=self._answer, args=(server, message), daemon=True))
        self.threads[-1].start()

    def replies(self, kind: type[Any], *, deadline_s: float) -> dict[str, Any]:
        for thread in self.threads:
            thread.join(deadline_s)
        self.threads = []
        found, self.answers = self.answers, {}
        return found

    def failure(self, *, wait_s: float) -> Exception | None:
        return None

    def _answer(self, server: str, message: Message) -> None:
        index = self.names.index(server)
        if isinstance(message, Join):
            fields = {k: getattr(message, k) for k in message.__struct_fields__}
            self.receivers[server] = WeightReceiver("cpu", fields, 0, torch.device("cpu"), torch.float32)
            self.answers[server] = Joined()
        elif isinstance(message, Sync):
            received = {name: t.clone() for name, t in self.receivers[server].receive()}
            self.held[server] = self.load(index, received)
            total = sums(self.held[server].values()) if message.with_sum else (None, None)
            self.answers[server] = Synced(message.version + self.version_error, 0.0, *total)
        elif isinstance(message, Probe):
            self.answers[server] = Probed(message.version, float_bytes([-1.0, -2.0 - index]))


def config(tmp_path, **sync: object) -> Config:
    (tmp_path / "c.yaml").write_text(
        "{name: t, iterations: 1, model: {path: m, dtype: float32}, data: {train: {source: x}}, rollout: {max_tokens: 4}, "
        "algorithm: {batch_groups: 2, group_responses: 2}, optimizer: {lr: 1e-3}, sync: {deadline_s: 20, bucket_bytes: 1024}}"
    )
    return load(tmp_path / "c.yaml", [f"sync.{k}={v}" for k, v in sync.items()])


def weights(seed: int) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES]


def test_every_server_gets_every_weight_of_every_version(tmp_path):
    servers = ThreadServers(2, lambda _, received: received)
    sender = WeightSender(config(tmp_path), servers, SHAPES, "cpu")
    for version in range(3):
        sender.publish(weights(version), version)
        for held in servers.held.values():
            assert all(torch.equal(held[name], tensor) for name, tensor in weights(version))


def test_a_weight_that_one_server_did_not_load_is_noticed(tmp_path):
    def forget_head(index: int, received: dict[str, Tensor]) -> dict[str, Tensor]:
        return received | ({"head": dict(weights(0))["head"]} if index == 1 else {})

    sender = WeightSender(config(tmp_path), ThreadServers(2, forget_head), SHAPES, "cpu")
    sender.publish(weights(0), 0)
    with pytest.raises(WeightSyncError, match="server-1 holds weights that sum to"):
        sender.publish(weights(1), 1)


def test_the_first_sync_of_a_continued_run_is_checked_whatever_its_version(tmp_path):
    sender = WeightSender(config(tmp_path, probe_every=5), ThreadServers(1, lambda _, received: received), SHAPES, "cpu")
    for version in range(7, 12):
        sender.publish(weights(version), version)
    assert [version for version in range(7, 12) if sender.due(version)] == [7, 10]


def test_a_wrong_version_is_noticed(tmp_path):
    servers = ThreadServers(1, lambda _, received: received)
    sender = WeightSender(config(tmp_path), servers, SHAPES, "cpu")
    servers.version_error = 1
    with pytest.raises(WeightSyncError, match="acknowledged version 6 instead of 5"):
        sender.publish(weights(0), 5)


def test_nothing_is_sent_while_groups_are_in_flight(tmp_path):
    servers = ThreadServers(1, lambda _, received: received)
    sender = WeightSender(config(tmp_path), servers, SHAPES, "cpu")
    servers.in_flight = 1
    with pytest.raises(RolloutError):
        sender.publish(weights(0), 0)


def test_a_server_that_does_not_receive_ends_in_a_named_error_within_the_deadline(tmp_path):
    servers = ThreadServers(1, lambda _, received: received)
    sender = WeightSender(config(tmp_path, deadline_s=2), servers, SHAPES, "cpu")
    servers.receivers.clear()  # the server forgets its group: nobody is at the other end
    servers.tell = lambda server, message: None  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match="sending version 0 failed after"):
        sender.publish(weights(0), 0)


def test_the_probe_reports_the_largest_gap_and_fails_above_the_tolerance(tmp_path):
    sender = WeightSender(config(tmp_path, probe_tolerance=1.0), ThreadServers(2, lambda _, r: r), SHAPES, "cpu")
    assert sender.probe([1, 2, 3], torch.tensor([-1.0, -2.0]), 0) == pytest.approx(0.5)
    with pytest.raises(WeightSyncError, match="server-1"):
        sender.probe([1, 2, 3], torch.tensor([-1.0, -0.5]), 0)
    with pytest.raises(WeightSyncError, match="do not compute with the trainer's weights"):
        sender.probe([1, 2, 3], torch.tensor([-1.0, math.nan]), 0)
