"""The producer thread against scripted servers on real sockets (real vLLM servers are in tests/system)."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from groups import make_group
from workers import free_port

from pasync.config import Config
from pasync.configfile import load
from pasync.data.prompts import Prompt
from pasync.errors import RolloutError
from pasync.frames import WIRE_VERSION, FrameReader, pack
from pasync.messages import (
    Failed,
    Freed,
    Generate,
    Group,
    GroupDone,
    Heartbeat,
    Hello,
    Ping,
    Probed,
    Sampling,
    Stop,
    Sync,
    Synced,
    ToServer,
    Unsynced,
)
from pasync.rollout.producer import RolloutProducer
from pasync.transport.channel import server_name

SAMPLING = Sampling(2, 1.0, 4)


def config(tmp_path: Path, *overrides: str, servers: int = 1) -> Config:
    (tmp_path / "c.yaml").write_text(
        "{name: t, iterations: 1, model: {path: m}, data: {train: {source: x}}, rollout: {max_tokens: 4, start_s: 5, deadline_s: 5, "
        "heartbeat_s: 0.1}, algorithm: {batch_groups: 2, group_responses: 2}, optimizer: {lr: 1e-3}}"
    )
    return load(tmp_path / "c.yaml", [f"rollout.servers={servers}", *overrides])


def finished(task: Generate, length: int = 2) -> Group:
    return make_group(np.random.default_rng(task.group_id), 3, [2, length], group_id=task.group_id, version=task.version)


class ScriptedServer:
    """One DEALER on a thread of its own: says hello, keeps what it is told, and sends what the test asks for."""

    def __init__(self, address: str, index: int, credits: int = 4, pid: int = 1, name: str = "") -> None:
        self.name = name or server_name(index, pid)
        self.told: queue.Queue = queue.Queue()
        self._out: queue.Queue = queue.Queue()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(address, Hello(index, pid, credits)), daemon=True)
        self._thread.start()

    def send(self, frame: bytes) -> None:
        self._out.put(frame)

    def next(self, kind: type):
        while not isinstance(message := self.told.get(timeout=5), kind):
            pass
        return message

    def finish(self, task: Generate) -> None:
        self.send(pack(GroupDone(finished(task), task.sampling.num_responses)))

    def close(self) -> None:
        self._done.set()
        self._thread.join(5)

    def _run(self, address: str, hello: Hello) -> None:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self.name.encode())
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        socket.send(pack(hello))
        reader = FrameReader(ToServer)
        while not self._done.is_set():
            if socket.poll(10) and not isinstance(message := reader.read(socket.recv()), Ping):
                self.told.put(message)
            while not self._out.empty():
                socket.send(self._out.get())
        socket.close()


@pytest.fixture
def address():
    return f"tcp://127.0.0.1:{free_port()}"


def prompts(count: int) -> list[Prompt]:
    return [Prompt(i, (1, 2, 3), "text", {"answer": "1"}) for i in range(count)]


@contextmanager
def mustered(config: Config, address: str, version: int = 0) -> Iterator[RolloutProducer]:
    """A producer whose servers may sample a version, as after a sync."""
    with RolloutProducer(config, address) as producer:
        sync(producer, version)
        yield producer


def sync(producer: RolloutProducer, version: int) -> bool:
    changed = producer.muster()
    producer.admit(version)
    return changed


def wait_until(holds: Callable[[], object], do: Callable[[], object] = lambda: None) -> None:
    """Look every few milliseconds, at most 10 s, doing something meanwhile."""
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        do()
        time.sleep(0.01)


def beat(server: ScriptedServer, until: Callable[[], object]) -> None:
    """A server says that it lives until something is so."""
    wait_until(until, lambda: server.send(pack(Heartbeat(0))))


def take(producer: RolloutProducer, version: int = 0) -> Group:
    group = producer.next_group(version)
    assert group is not None
    return group


def test_groups_come_back_in_completion_order_and_few_wait_for_slots(tmp_path, address):
    server = ScriptedServer(address, 0, credits=4)
    with mustered(config(tmp_path), address) as producer:
        producer.submit(prompts(5), 0, SAMPLING)
        first, second, *waiting = (server.next(Generate) for _ in range(4))
        server.send(pack(Heartbeat(0)))
        with pytest.raises(queue.Empty):
            server.told.get(timeout=0.3)  # a fifth group would be the third to wait
        server.send(pack(Freed(1)))
        with pytest.raises(queue.Empty):
            server.told.get(timeout=0.3)
        server.send(pack(Freed(1)))  # a waiting group has its slots now
        tasks = [second, *waiting, server.next(Generate), first]
        for task in tasks:
            server.send(pack(GroupDone(finished(task), freed=0)))
        assert [take(producer).group_id for _ in range(5)] == [t.group_id for t in tasks]
        assert producer.in_flight == 0 and len(producer.taken) == 5
    assert isinstance(server.next(Stop), Stop)
    server.close()


def test_credit_counts_responses_so_more_small_groups_fit(tmp_path, address):
    server = ScriptedServer(address, 0, credits=5)
    with mustered(config(tmp_path), address) as producer:
        producer.submit(prompts(12), 0, Sampling(1, 0.0, 4))
        tasks = [server.next(Generate) for _ in range(10)]
        with pytest.raises(queue.Empty):
            server.told.get(timeout=0.3)
        server.finish(tasks[0])
        assert server.next(Generate).group_id == 10
    server.close()


def test_longest_first_hands_out_what_took_long_before_and_keeps_group_numbers(tmp_path, address):
    server = ScriptedServer(address, 0, credits=100)
    with mustered(config(tmp_path, "rollout.max_tokens=50"), address) as producer:
        asked = [Prompt(i, (i, i), "text", {}) for i in range(3)]
        producer.submit(asked, 0, Sampling(2, 1.0, 50))
        for task, length in zip([server.next(Generate) for _ in range(3)], (5, 40, 20), strict=True):
            server.send(pack(GroupDone(finished(task, length), freed=2)))
        for _ in asked:
            take(producer)
        sync(producer, 1)
        producer.submit(asked, 1, Sampling(2, 1.0, 50))
        assert [server.next(Generate).group_id for _ in asked] == [1, 2, 0]
    server.close()


def test_a_row_may_lower_the_longest_response(tmp_path, address):
    server = ScriptedServer(address, 0, credits=100)
    with mustered(config(tmp_path), address) as producer:
        producer.submit([Prompt(0, (1,), "", {}, 3), Prompt(1, (1,), "", {}, 9)], 0, SAMPLING)
        assert sorted(server.next(Generate).sampling.max_tokens for _ in range(2)) == [3, 4]
        producer.extend([Prompt(2, (1,), "", {})])
        added = server.next(Generate)
        assert (added.group_id, added.version, producer.in_flight) == (2, 0, 3)
    server.close()


def test_groups_are_spread_over_servers_with_free_credit(tmp_path, address):
    servers = [ScriptedServer(address, i, credits=4) for i in range(2)]
    with mustered(config(tmp_path, servers=2), address) as producer:
        producer.submit(prompts(4), 0, SAMPLING)
        tasks = [[s.next(Generate) for _ in range(2)] for s in servers]
        assert sorted(t.group_id for pair in tasks for t in pair) == [0, 1, 2, 3]
        for server, pair in zip(servers, tasks, strict=True):
            for task in pair:
                server.finish(task)
        assert sorted(take(producer).group_id for _ in range(4)) == [0, 1, 2, 3]
        assert producer.next_group(0, wait=False) is None
    for server in servers:
        server.close()


def test_late_duplicates_and_garbage_are_dropped_and_counted(tmp_path, address):
    server = ScriptedServer(address, 0)
    with mustered(config(tmp_path), address) as producer:
        producer.submit(prompts(2), 0, SAMPLING)
        first, second = server.next(Generate), server.next(Generate)
        server.finish(first)
        server.finish(first)
        server.send(b"garbage")
        server.send(WIRE_VERSION + b"\xc1")
        server.send(pack(Stop()))  # a message only the trainer may send
        server.send(pack(GroupDone(finished(msgspec.structs.replace(second, version=7)), 0)))
        stranger = ScriptedServer(address, 8, name="server-0")
        stranger.send(pack(Failed(error="Stranger", message="joined")))
        server.send(pack(Heartbeat(dropped_frames=20)))
        server.finish(second)
        assert [take(producer).group_id for _ in range(2)] == [first.group_id, second.group_id]
        assert producer.next_group(0, wait=False) is None
        wait_until(lambda: producer.dropped_frames == 5 + 2 + 20)
    stranger.close()
    server.close()


def test_a_group_of_another_version_raises(tmp_path, address):
    server = ScriptedServer(address, 0)
    with mustered(config(tmp_path), address) as producer:
        sync(producer, 3)
        producer.submit(prompts(1), 3, SAMPLING)
        server.finish(server.next(Generate))
        with pytest.raises(RolloutError, match="sampled by version 3 in iteration 4: off-policy"):
            producer.next_group(4)
    server.close()


def test_weights_cannot_change_while_groups_are_in_flight(tmp_path, address):
    server = ScriptedServer(address, 0)
    with mustered(config(tmp_path), address) as producer:
        producer.require_idle()
        producer.submit(prompts(1), 0, SAMPLING)
        with pytest.raises(RolloutError, match="1 groups are still in flight"):
            producer.require_idle()
        server.finish(server.next(Generate))
        take(producer)
        producer.require_idle()
    server.close()


def test_a_server_that_fails_ends_every_wait_with_its_own_error(tmp_path, address):
    server = ScriptedServer(address, 0)
    with mustered(config(tmp_path, "rollout.max_restarts=0"), address) as producer:
        producer.submit(prompts(1), 0, SAMPLING)
        server.next(Generate)
        server.send(pack(Failed(error="EngineDeadError", message="out of memory")))
        for _ in range(2):
            with pytest.raises(Exception, match=r"EngineDeadError: server-0 \(pid 1\): out of memory"):
                producer.next_group(0)
        assert producer.failure(wait_s=1.0) is not None
    server.close()


def test_a_silent_server_ends_a_run_that_restarts_none(tmp_path, address):
    server = ScriptedServer(address, 0)
    with mustered(config(tmp_path, "rollout.silence_s=0.5", "rollout.max_restarts=0"), address) as producer:
        producer.submit(prompts(1), 0, SAMPLING)
        with pytest.raises(RolloutError, match=r"server-0 \(pid 1\) was not heard of"):
            producer.next_group(0)
    server.close()


def test_without_restarts_a_lost_connection_may_come_back_until_the_server_counts_as_silent(tmp_path, address):
    server = ScriptedServer(address, 0)
    with mustered(config(tmp_path, "rollout.max_restarts=0"), address) as producer:
        server.close()
        assert producer.failure(wait_s=0.5) is None  # five heartbeats
        back = ScriptedServer(address, 0)  # its second Hello is dropped, its connection is used
        wait_until(lambda: producer.dropped_frames == 1)
        producer.submit(prompts(1), 0, SAMPLING)
        back.finish(back.next(Generate))
        assert take(producer).group_id == 0
    back.close()


@pytest.mark.parametrize("how", ["silent", "disconnected", "failed", "replaced"])
@pytest.mark.parametrize("policy", ["fifo", "longest_first"])
def test_groups_of_a_lost_server_go_to_the_others_and_come_back_once(tmp_path, address, how, policy):
    first, second = (ScriptedServer(address, i) for i in range(2))
    settings = config(tmp_path, "rollout.silence_s=1", f"rollout.admission={policy}", servers=2)
    with mustered(settings, address) as producer:
        producer.submit(prompts(4), 0, SAMPLING)
        theirs, ours = [first.next(Generate) for _ in range(2)], [second.next(Generate) for _ in range(2)]
        first.finish(theirs[0])
        assert take(producer).group_id == theirs[0].group_id
        for task in ours:
            second.finish(task)
        if how == "disconnected":
            first.close()
        elif how == "failed":
            first.send(pack(Failed("EngineDeadError", "out of memory")))
        elif how == "replaced":
            successor = ScriptedServer(address, 0, pid=2)
        beat(second, until=lambda: producer.requeued)
        again = second.next(Generate)
        assert again == theirs[1]
        second.finish(again)
        assert sorted(take(producer).group_id for _ in range(3)) == sorted(t.group_id for t in [*ours, again])
        assert producer.in_flight == 0 and producer.next_group(0, wait=False) is None
        if how != "disconnected":  # what it still says is no answer any more, and it is told to stop
            first.finish(theirs[1])
            first.next(Stop)
            beat(second, until=lambda: producer.dropped_frames)
            assert producer.next_group(0, wait=False) is None and producer.dropped_frames == 1
        if how == "replaced":
            producer.submit(prompts(2), 0, SAMPLING)
            assert {second.next(Generate).group_id for _ in range(2)} == {0, 1}  # the successor has no weights yet
            with pytest.raises(queue.Empty):
                successor.told.get(timeout=0.2)
            successor.close()
    first.close()
    second.close()


def test_a_server_that_joins_gets_groups_from_the_next_sync_on(tmp_path, address):
    servers = [ScriptedServer(address, 0)]
    with mustered(config(tmp_path), address) as producer:
        assert not sync(producer, 0)
        servers.append(ScriptedServer(address, 1))  # by hand: there is one more than rollout.servers
        wait_until(lambda: len(producer._fleet.present) == 2)
        for version in (0, 1):
            producer.submit(prompts(2), version, SAMPLING)
            tasks = [(s, s.next(Generate)) for s in ([servers[0]] * 2 if version == 0 else servers)]
            for server, task in tasks:
                server.finish(task)
            assert sorted(take(producer, version).group_id for _ in tasks) == [0, 1]
            assert sync(producer, version + 1) == (version == 0)
        assert producer.names == [s.name for s in servers]
    for server in servers:
        server.close()


def test_without_any_server_the_wait_ends_and_a_restarted_one_finishes_the_batch_after_a_sync(tmp_path, address):
    server = ScriptedServer(address, 0)
    with mustered(config(tmp_path), address) as producer:
        producer.submit(prompts(2), 0, SAMPLING)
        done, lost = server.next(Generate), server.next(Generate)
        server.finish(done)
        server.send(pack(Failed("EngineDeadError", "gone")))
        assert take(producer).group_id == done.group_id
        assert producer.next_group(0) is None and producer.stranded and producer.in_flight == 1
        successor = ScriptedServer(address, 0, pid=2)
        assert producer.muster()
        producer.require_idle()  # nothing is sampled yet: the weights may be sent
        producer.admit(0)
        assert producer.names == [successor.name] and not producer.stranded
        assert successor.next(Generate) == lost
        successor.finish(lost)
        assert take(producer).group_id == lost.group_id
    for each in (server, successor):
        each.close()


def test_a_server_that_leaves_because_the_run_is_over_is_not_lost(tmp_path, address, monkeypatch):
    server, sent = ScriptedServer(address, 0), []
    with mustered(config(tmp_path, "rollout.max_restarts=1", "rollout.heartbeat_s=1e-6"), address) as producer:  # a ping is always due
        send = producer._channel.send
        monkeypatch.setattr(producer._channel, "send", lambda name, message: (sent.append(type(message)), send(name, message)))
        wait_until(lambda: Ping in sent)
    assert sent[-1] is Stop  # whatever came after it might find nobody
    server.close()


def test_without_any_server_a_sync_waits_no_longer_than_the_deadline(tmp_path, address):
    server = ScriptedServer(address, 0)
    with mustered(config(tmp_path, "rollout.deadline_s=0.5"), address) as producer:
        producer.submit(prompts(1), 0, SAMPLING)
        server.send(pack(Failed("EngineDeadError", "gone")))
        assert producer.next_group(0) is None
        with pytest.raises(RolloutError, match="no server is left and none came back within rollout.deadline_s=0.5"):
            producer.muster()
    server.close()


def test_a_server_lost_during_a_sync_ends_the_wait_for_its_answer_once_the_others_have_answered(tmp_path, address):
    first, second = (ScriptedServer(address, i) for i in range(2))
    with mustered(config(tmp_path, servers=2), address) as producer:
        first.send(pack(Failed("EngineDeadError", "gone")))
        second.send(pack(Unsynced("server-1: connection closed")))
        with pytest.raises(RolloutError, match="gone; server-1: connection closed|connection closed; .*gone"):
            producer.replies(Synced, deadline_s=5)
        assert producer.lost_any() and producer.muster() and producer.names == [second.name]
        second.send(pack(Synced(version=0, seconds=0.1)))
        assert producer.replies(Synced, deadline_s=5).keys() == {second.name}
    for server in (first, second):
        server.close()


def test_a_group_that_never_comes_ends_at_the_deadline(tmp_path, address):
    server = ScriptedServer(address, 0)
    with mustered(config(tmp_path, "rollout.deadline_s=0.5"), address) as producer:
        producer.submit(prompts(1), 0, SAMPLING)
        with pytest.raises(RolloutError, match=r"deadline_s=0.5, 1 missing; server-0 \(pid 1\) works on groups \[0\]: logs/server-0.log"):
            producer.next_group(0)
    server.close()


def test_servers_that_do_not_come_are_named(tmp_path, address):
    server = ScriptedServer(address, 0)
    impatient = config(tmp_path, "rollout.start_s=1", servers=2)
    late = "server-1 not ready within rollout.start_s=1.0: logs/server-1.log"
    with pytest.raises(RolloutError, match=late), RolloutProducer(impatient, address):
        pass
    server.close()


def test_a_reply_of_the_wrong_kind_and_a_missing_one_are_named(tmp_path, address):
    server = ScriptedServer(address, 0)
    with mustered(config(tmp_path), address) as producer:
        for _ in range(2):
            producer.tell(server.name, Sync(version=0, with_sum=False))
            server.next(Sync)
        server.send(pack(Synced(version=0, seconds=0.1)))
        assert producer.replies(Synced, deadline_s=5)[server.name].version == 0
        server.send(pack(Synced(version=0, seconds=0.1)))
        with pytest.raises(RolloutError, match="answered Synced where Probed was due"):
            producer.replies(Probed, deadline_s=5)
        with pytest.raises(RolloutError, match=r"no Synced from server-0 \(pid 1\) within sync.deadline_s=0.3: logs/server-0.log"):
            producer.replies(Synced, deadline_s=0.3)
        server.next(Stop)
    server.close()
