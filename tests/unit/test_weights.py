import math
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from workers import copier

from pasync.config import Config
from pasync.configfile import load
from pasync.errors import RolloutError, WeightSyncError
from pasync.messages import Join, Joined, Message, Probe, Probed, Sync, Synced, float_bytes
from pasync.transport.broadcast import BroadcastGroup, Buffers, bucket_numel, plan_buckets
from pasync.transport.weights import WeightReceiver, WeightSender, checksum

SHAPES = [("embed", [11, 4]), ("norm", [4]), ("head", [11, 4]), ("scale", [1])]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 50))
def test_buckets_keep_the_order_and_the_limit(sizes, limit):
    buckets = plan_buckets([(str(i), [n]) for i, n in enumerate(sizes)], limit)
    assert [name for bucket in buckets for name, _ in bucket] == [str(i) for i in range(len(sizes))]
    assert all(bucket_numel(bucket) <= limit for bucket in buckets if len(bucket) > 1)
    assert all(bucket_numel(bucket) + math.prod(after[0][1]) > limit for bucket, after in pairwise(buckets))


def test_two_buffers_are_used_in_turn_and_what_is_larger_gets_its_own():
    small, other, large = [("a", [3])], [("b", [2]), ("c", [5])], [("d", [9])]
    buffers = Buffers([small, large, other], 8, torch.float32, torch.device("cpu"))
    taken = [buffers.take(bucket) for bucket in (small, large, other, small)]
    assert [flat.numel() for flat in taken] == [3, 9, 7, 3]
    assert len({flat.untyped_storage().data_ptr() for flat in taken[:3]}) == 3
    assert taken[3].data_ptr() == taken[0].data_ptr() and taken[0].untyped_storage().nbytes() == 4 * 7


class ThreadServers:
    """The rollout side as the sender sees it: every server is a thread with a real receiver in a real gloo group."""

    def __init__(self, count: int) -> None:
        self.names = [f"server-{i}" for i in range(count)]
        self.forgets: tuple[str, str] | None = None  # (server, weight that it does not load)
        self.in_flight = 0
        self.held: dict[str, dict[str, Tensor]] = {}
        self.given: dict[str, list[str]] = {}  # what the last version's loader got
        self.answers: dict[str, Any] = {}
        self.receivers: dict[str, WeightReceiver] = {}
        self.threads: list[threading.Thread] = []
        self.version_error = 0
        self.load_s = 0.0  # time that a server takes over every tensor
        self.errors: dict[str, Exception] = {}

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
            self.held[server] = {name: torch.zeros(shape) for bucket in message.buckets for name, shape in bucket}
            self.answers[server] = Joined()
        elif isinstance(message, Sync):
            try:
                held = self.held[server]
                self.receivers[server].receive(lambda weights: copier(held)(self._slowly(server, weights)), held.values())
            except (TimeoutError, RuntimeError) as error:
                self.errors[server] = error
                return
            total = checksum(self.held[server].values()) if message.with_sum else None
            self.answers[server] = Synced(message.version + self.version_error, 0.0, total)
        elif isinstance(message, Probe):
            self.answers[server] = Probed(message.version, float_bytes([-1.0, -2.0 - index]))

    def _slowly(self, server: str, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        self.given[server] = []
        for name, tensor in weights:
            self.given[server].append(name)
            time.sleep(self.load_s)
            if (server, name) != self.forgets:
                yield name, tensor


def test_a_group_may_be_closed_twice():
    """As by a server that could not join the next one and is told of another."""
    store = BroadcastGroup.open_store("127.0.0.1", 0, 1, 10.0, is_sender=True)
    group = BroadcastGroup("cpu", store, 0, 1, torch.device("cpu"), 10.0)
    group.start([torch.ones(2)]).wait()
    group.close()
    group._thread.join(10.0)
    group.close()


def config(tmp_path, **sync: object) -> Config:
    (tmp_path / "c.yaml").write_text(
        "{name: t, iterations: 1, model: {path: m, dtype: float32}, data: {train: {source: x}}, rollout: {max_tokens: 4}, "
        "algorithm: {batch_groups: 2, group_responses: 2}, optimizer: {lr: 1e-3}, sync: {deadline_s: 20, bucket_bytes: 1024}}"
    )
    return load(tmp_path / "c.yaml", [f"sync.{k}={v}" for k, v in sync.items()])


def weights(seed: int) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES]


MANY = [(f"w{i}", [1 + i * 37 % 11, 1 + i * 53 % 29]) for i in range(40)] + [("large", [70, 30]), ("last", [3])]


def many(seed: int) -> dict[str, Tensor]:
    """Weights of which some have another type than the servers."""
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator).to(torch.bfloat16 if n == "w5" else torch.float32) for n, s in MANY}


@pytest.mark.parametrize("bucket_bytes", [1024, 1500, 4096, 8400, 1 << 20])
def test_held_weights_equal_sent_ones_bit_for_bit_for_any_size_of_buckets(tmp_path, bucket_bytes):
    servers = ThreadServers(2)
    sender = WeightSender(config(tmp_path, bucket_bytes=bucket_bytes), servers, MANY, "cpu")
    for version in range(2):
        sender.publish(many(version).items(), version)
        for held in servers.held.values():
            assert all(torch.equal(held[n].view(torch.int32), w.float().view(torch.int32)) for n, w in many(version).items())


@pytest.mark.parametrize("bucket_bytes", [1024, 4096, 1 << 20])
def test_weights_arrive_where_they_stay_once_that_is_known_and_others_are_loaded_every_time(tmp_path, bucket_bytes):
    servers = ThreadServers(2)
    sender = WeightSender(config(tmp_path, bucket_bytes=bucket_bytes), servers, MANY, "cpu")
    names, loaded = [name for name, _ in MANY], {"server-0": ["w3", "w30", "large"], "server-1": []}
    for name in loaded["server-0"]:
        rows, columns = servers.held["server-0"][name].shape
        servers.held["server-0"][name] = torch.zeros(columns, rows).T  # laid out otherwise than sent
    for version in range(4):
        sender.publish(many(version).items(), version)
        assert servers.given == (loaded if version else dict.fromkeys(servers.names, names))
        for held in servers.held.values():
            assert all(torch.equal(held[name], weight.float()) for name, weight in many(version).items())


@pytest.mark.parametrize(("make_s", "load_s"), [(0.01, 0.0), (0.0, 0.01), (0.005, 0.005)])
def test_slow_weights_and_slow_servers_change_nothing(tmp_path, make_s, load_s):
    def slowly() -> Iterator[tuple[str, Tensor]]:
        for name, weight in many(0).items():
            time.sleep(make_s)
            yield name, weight

    servers = ThreadServers(2)
    servers.load_s = load_s
    WeightSender(config(tmp_path), servers, MANY, "cpu").publish(slowly(), 0)
    for held in servers.held.values():
        assert all(torch.equal(held[name], weight.float()) for name, weight in many(0).items())


def test_a_failure_while_weights_are_made_is_named_and_the_servers_wait_no_longer_than_the_deadline(tmp_path):
    def failing() -> Iterator[tuple[str, Tensor]]:
        yield from list(many(0).items())[:20]
        raise KeyError("shard of rank 3")

    servers = ThreadServers(2)
    sender = WeightSender(config(tmp_path, deadline_s=2), servers, MANY, "cpu")
    with pytest.raises(WeightSyncError, match=r"collecting the weights of version 7 failed after 0.\d s: KeyError: 'shard of rank 3'"):
        sender.publish(failing(), 7)
    began = time.monotonic()
    servers.replies(Synced, deadline_s=10)
    assert time.monotonic() - began < 4 and servers.errors.keys() == set(servers.names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights[:-1], r"nothing \[3\] came where last \[3\] was planned"),
        (lambda weights: [*weights, ("extra", torch.zeros(1))], "extra came after the last planned weight"),
        (lambda weights: weights[::-1], r"last \[3\] came where w0 \[1, 1\] was planned"),
    ],
)
def test_other_weights_than_planned_are_named(tmp_path, change, message):
    sender = WeightSender(config(tmp_path, deadline_s=2), ThreadServers(1), MANY, "cpu")
    with pytest.raises(WeightSyncError, match=message):
        sender.publish(change(list(many(0).items())), 0)


@given(st.integers(1, 1 << 18), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=10, deadline=None)
def test_the_checksum_is_that_of_the_bits_in_any_order_and_cut(numel, dtype):
    numbers = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    bits = numbers.view(torch.int16 if dtype == torch.bfloat16 else torch.int32).numpy()
    expected = int(bits.sum(dtype="int64")) % (1 << 32)
    assert checksum(reversed(numbers.split(12345))) == checksum([numbers.flip(0)]) == expected


def test_the_checksum_notices_the_last_bit_of_one_weight():
    numbers = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    nudged = numbers.clone()
    nudged[77_777] = torch.nextafter(nudged[77_777], torch.tensor(9.0))
    assert checksum([numbers]) != checksum([nudged])


def test_every_server_gets_every_weight_of_every_version(tmp_path):
    servers = ThreadServers(2)
    sender = WeightSender(config(tmp_path), servers, SHAPES, "cpu")
    for version in range(3):
        sender.publish(weights(version), version)
        for held in servers.held.values():
            assert all(torch.equal(held[name], tensor) for name, tensor in weights(version))


def test_a_weight_that_one_server_did_not_load_is_noticed(tmp_path):
    servers = ThreadServers(2)
    sender = WeightSender(config(tmp_path), servers, SHAPES, "cpu")
    servers.held["server-1"]["head"] = torch.zeros(4, 11).T  # laid out otherwise, so it is loaded every time
    sender.publish(weights(0), 0)
    servers.forgets = ("server-1", "head")
    with pytest.raises(WeightSyncError, match="server-1 holds weights whose bits sum to"):
        sender.publish(weights(1), 1)


def test_weights_that_a_server_has_moved_are_loaded_again(tmp_path):
    servers = ThreadServers(1)
    sender = WeightSender(config(tmp_path), servers, SHAPES, "cpu")
    held = servers.held["server-0"]
    for version in range(4):
        sender.publish(weights(version), version)
        assert all(torch.equal(held[name], tensor) for name, tensor in weights(version))
        held["head"] = held["head"].clone()
    assert servers.given == {"server-0": ["head"]}


def test_the_first_two_syncs_of_a_continued_run_are_checked_whatever_their_version(tmp_path):
    sender = WeightSender(config(tmp_path, probe_every=5), ThreadServers(1), SHAPES, "cpu")
    for version in range(7, 12):
        sender.publish(weights(version), version)
    assert [version for version in range(7, 12) if sender.due(version)] == [7, 8, 10]


def test_a_wrong_version_is_noticed(tmp_path):
    servers = ThreadServers(1)
    sender = WeightSender(config(tmp_path), servers, SHAPES, "cpu")
    servers.version_error = 1
    with pytest.raises(WeightSyncError, match="acknowledged version 6 instead of 5"):
        sender.publish(weights(0), 5)


def test_nothing_is_sent_while_groups_are_in_flight(tmp_path):
    servers = ThreadServers(1)
    sender = WeightSender(config(tmp_path), servers, SHAPES, "cpu")
    servers.in_flight = 1
    with pytest.raises(RolloutError):
        sender.publish(weights(0), 0)


def test_a_server_that_does_not_receive_ends_in_a_named_error_within_the_deadline(tmp_path):
    servers = ThreadServers(1)
    sender = WeightSender(config(tmp_path, deadline_s=2), servers, SHAPES, "cpu")
    servers.receivers.clear()  # the server forgets its group: nobody is at the other end
    servers.tell = lambda server, message: None  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match=r"sending version 0 failed after 2.* a server did not take part within 2 s"):
        sender.publish(weights(0), 0)


def test_the_probe_reports_the_largest_gap_and_fails_above_the_tolerance(tmp_path):
    sender = WeightSender(config(tmp_path, probe_tolerance=1.0), ThreadServers(2), SHAPES, "cpu")
    assert sender.probe([1, 2, 3], torch.tensor([-1.0, -2.0]), 0) == pytest.approx(0.5)
    with pytest.raises(WeightSyncError, match="server-1"):
        sender.probe([1, 2, 3], torch.tensor([-1.0, -0.5]), 0)
    with pytest.raises(WeightSyncError, match="do not compute with the trainer's weights"):
        sender.probe([1, 2, 3], torch.tensor([-1.0, math.nan]), 0)
