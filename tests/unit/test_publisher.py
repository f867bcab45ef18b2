"""Weights to servers that die meanwhile: real sockets and real transfer groups, servers on threads of this process."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from test_producer import SAMPLING, ScriptedServer, config, prompts, take, wait_until
from torch import Tensor
from workers import copier, free_port

from pasync import leader
from pasync.errors import Preempted, RolloutError
from pasync.frames import pack
from pasync.leader import Publisher
from pasync.messages import Failed, Generate, Join, Joined, Probe, Probed, Stop, Sync, Synced, Unsynced, float_bytes
from pasync.placement import Placement
from pasync.preemption import Preemption
from pasync.rollout.producer import RolloutProducer
from pasync.transport.broadcast import BroadcastGroup
from pasync.transport.weights import WeightReceiver, checksum

WEIGHTS = {f"w{i}": torch.randn(400, generator=torch.Generator().manual_seed(i)) for i in range(8)}
QUICK = ("sync.deadline_s=3", "sync.bucket_bytes=2000", "model.dtype=float32")


class ReceivingServer(ScriptedServer):
    """Takes part in weight transfers; `dies` says at which message, and then it is gone without a word; `hangs`: in a sync, for ever."""

    def __init__(
        self, address: str, index: int, dies: type | None = None, spoils: bool = False, hangs: bool = False, pid: int = 1
    ) -> None:
        super().__init__(address, index, pid=pid)
        self.address, self.dies, self.spoils, self.hangs = address, dies, spoils, hangs
        self.held: dict[str, Tensor] = {}
        self.versions: list[int] = []
        self._receiver: WeightReceiver | None = None
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while not isinstance(message := self.told.get(timeout=30), Stop):
            if type(message) is self.dies:
                if isinstance(message, Sync):
                    self._receiver.receive(next, self.held.values())
                self._leave()
                return self.close()
            if isinstance(message, Sync) and self.hangs:
                continue
            try:
                self._answer(message)
            except (RuntimeError, TimeoutError) as error:
                self._leave()
                self.send(pack(Unsynced(str(error).splitlines()[0])))

    def _answer(self, message: Any) -> None:
        if isinstance(message, Join):
            self._leave()
            fields = msgspec.to_builtins(message)
            self._receiver = WeightReceiver("cpu", fields, 0, torch.device("cpu"), torch.float32)
            self.held = {name: torch.zeros(shape) for bucket in message.buckets for name, shape in bucket}
            self.send(pack(Joined()))
        elif isinstance(message, Sync):
            self._receiver.receive(copier(self.held), self.held.values())
            if self.spoils:
                raise RuntimeError("no memory left")
            self.versions.append(message.version)
            self.send(pack(Synced(message.version, 0.0, checksum(self.held.values()))))
        elif isinstance(message, Probe):
            self.send(pack(Probed(message.version, float_bytes([-1.0]))))
        elif isinstance(message, Generate):
            assert message.version == self.versions[-1]
            self.finish(message)

    def _leave(self) -> None:
        if self._receiver:
            self._receiver.group.close()
        self._receiver = None


@pytest.fixture
def publish(tmp_path: Path) -> Iterator[Callable[..., tuple[RolloutProducer, Publisher, list[ReceivingServer]]]]:
    started: list[Any] = []

    def start(*servers: dict[str, Any]) -> tuple[RolloutProducer, Publisher, list[ReceivingServer]]:
        address = f"tcp://127.0.0.1:{free_port()}"
        made = [ReceivingServer(address, i, **options) for i, options in enumerate(servers)]
        settings = config(tmp_path, *QUICK, servers=len(servers))
        producer = RolloutProducer(settings, address)
        started.append(producer.__enter__())
        models = SimpleNamespace(shapes=[(n, list(w.shape)) for n, w in WEIGHTS.items()], weights=lambda: iter(WEIGHTS.items()))
        trainer: Any = SimpleNamespace(models=models, sequence_logprobs=lambda ids: torch.tensor([-1.0]))
        return producer, Publisher(settings, producer, trainer, Placement("cpu", address, [], []), [1, 2]), made

    yield start
    for producer in started:
        producer.__exit__(None, None, None)


@pytest.mark.parametrize("dies", [Join, Sync, Probe])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_server_that_dies_during_a_sync_leaves_it_to_the_others(publish, dies, victim):
    producer, publisher, servers = publish(*({"dies": dies if i == victim else None} for i in range(3)))
    assert publisher.publish(5) == 0.0
    left = [server for i, server in enumerate(servers) if i != victim]
    assert producer.names == [server.name for server in left]
    for server in left:
        assert server.versions[-1] == 5 and all(torch.equal(server.held[name], weight) for name, weight in WEIGHTS.items())
    producer.submit(prompts(4), 5, SAMPLING)
    assert sorted(take(producer, 5).group_id for _ in range(4)) == [0, 1, 2, 3]
    assert publisher.publish(6) == 0.0 and servers[victim].versions in ([], [5])


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_server_that_hangs_in_a_sync_is_given_up_while_broadcasts_still_wait_for_it(publish, monkeypatch, victim):
    monkeypatch.setitem(WEIGHTS, "w0", torch.randn(4 << 20))  # more than the kernel keeps for the one that does not read
    monkeypatch.setattr(sys.modules[__name__], "QUICK", ("sync.deadline_s=3", f"sync.bucket_bytes={32 << 20}", "model.dtype=float32"))
    producer, publisher, servers = publish(*({"hangs": i == victim} for i in range(3)))
    assert publisher.publish(5) == 0.0
    left = [server for i, server in enumerate(servers) if i != victim]
    assert producer.names == [server.name for server in left]
    assert all(torch.equal(server.held[name], weight) for server in left for name, weight in WEIGHTS.items())


def test_a_restarted_server_enters_a_new_group_with_those_that_stayed(publish):
    producer, publisher, servers = publish({}, {"dies": Probe})
    publisher.publish(0)
    assert producer.names == [servers[0].name]
    successor = ReceivingServer(servers[0].address, 1, pid=2)
    wait_until(lambda: len(producer._fleet.present) == 2)
    publisher.publish(1)
    assert producer.names == [servers[0].name, successor.name] and successor.versions == [1] and servers[0].versions[-1] == 1


def test_a_signal_ends_the_wait_for_a_server_that_comes_back(publish, monkeypatch):
    producer, publisher, servers = publish({})
    publisher.publish(0)
    servers[0].send(pack(Failed("EngineDeadError", "gone")))
    wait_until(lambda: not producer._fleet.present)
    monkeypatch.setattr(leader, "preemption", preemption := Preemption())
    before = signal.getsignal(signal.SIGTERM)
    preemption.listen()
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(Preempted):
            publisher.publish(0)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_whoever_waits_for_one_that_leaves_comes_out_at_once_and_its_thread_ends():
    limit, cpu = 30, torch.device("cpu")
    store = BroadcastGroup.open_store("127.0.0.1", 0, 3, limit, is_sender=True)
    groups: dict[int, BroadcastGroup] = {}

    def enter(rank: int) -> None:
        groups[rank] = BroadcastGroup("cpu", store.clone(), rank, 3, cpu, limit)

    threads = [threading.Thread(target=enter, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit)
    waiting = [groups[rank].start([torch.empty(1000)]) for rank in (1, 2)]
    began = time.monotonic()
    groups[0].close()
    for work in waiting:
        with pytest.raises(RuntimeError, match="closed|reset"):
            work.wait()
    for rank, group in groups.items():
        if rank > 0:
            group.close()
        group._thread.join(10)
        assert not group._thread.is_alive()
    assert time.monotonic() - began < 10


def test_a_sync_that_fails_while_nobody_is_lost_is_an_error(publish):
    _, publisher, _ = publish({}, {"spoils": True})
    with pytest.raises(RolloutError, match="no memory left"):
        publisher.publish(0)
