"""The producer thread against scripted servers on real sockets (real vLLM servers are in tests/system)."""

import queue
import threading
import time
from collections.abc import Callable
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
from pasync.messages import (
    WIRE_VERSION,
    Failed,
    FrameReader,
    Freed,
    Generate,
    Group,
    GroupDone,
    Heartbeat,
    Hello,
    Sampling,
    Stop,
    Sync,
    Synced,
    ToServer,
    pack,
)
from pasync.rollout.producer import RolloutProducer

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

    def __init__(self, address: str, index: int, credits: int = 4) -> None:
        self.told: queue.Queue = queue.Queue()
        self._out: queue.Queue = queue.Queue()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(address, index, credits), daemon=True)
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

    def _run(self, address: str, index: int, credits: int) -> None:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"server-{index}".encode())
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        socket.send(pack(Hello(server=index, pid=1, credits=credits)))
        reader = FrameReader(ToServer)
        while not self._done.is_set():
            if socket.poll(10):
                self.told.put(reader.read(socket.recv()))
            while not self._out.empty():
                socket.send(self._out.get())
        socket.close()


@pytest.fixture
def address():
    return f"tcp://127.0.0.1:{free_port()}"


def prompts(count: int) -> list[Prompt]:
    return [Prompt(i, (1, 2, 3), "text", {"answer": "1"}) for i in range(count)]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def take(producer: RolloutProducer, version: int = 0) -> Group:
    group = producer.next_group(version)
    assert group is not None
    return group


def test_groups_come_back_in_completion_order_and_few_wait_for_slots(tmp_path, address):
    server = ScriptedServer(address, 0, credits=4)
    with RolloutProducer(config(tmp_path), address) as producer:
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
    with RolloutProducer(config(tmp_path), address) as producer:
        producer.submit(prompts(12), 0, Sampling(1, 0.0, 4))
        tasks = [server.next(Generate) for _ in range(10)]
        with pytest.raises(queue.Empty):
            server.told.get(timeout=0.3)
        server.finish(tasks[0])
        assert server.next(Generate).group_id == 10
    server.close()


def test_longest_first_hands_out_what_took_long_before_and_keeps_group_numbers(tmp_path, address):
    server = ScriptedServer(address, 0, credits=100)
    with RolloutProducer(config(tmp_path, "rollout.max_tokens=50"), address) as producer:
        asked = [Prompt(i, (i, i), "text", {}) for i in range(3)]
        producer.submit(asked, 0, Sampling(2, 1.0, 50))
        for task, length in zip([server.next(Generate) for _ in range(3)], (5, 40, 20), strict=True):
            server.send(pack(GroupDone(finished(task, length), freed=2)))
        for _ in asked:
            take(producer)
        producer.submit(asked, 1, Sampling(2, 1.0, 50))
        assert [server.next(Generate).group_id for _ in asked] == [1, 2, 0]
    server.close()


def test_a_row_may_lower_the_longest_response(tmp_path, address):
    server = ScriptedServer(address, 0, credits=100)
    with RolloutProducer(config(tmp_path), address) as producer:
        producer.submit([Prompt(0, (1,), "", {}, 3), Prompt(1, (1,), "", {}, 9)], 0, SAMPLING)
        assert sorted(server.next(Generate).sampling.max_tokens for _ in range(2)) == [3, 4]
        producer.extend([Prompt(2, (1,), "", {})])
        added = server.next(Generate)
        assert (added.group_id, added.version, producer.in_flight) == (2, 0, 3)
    server.close()


def test_groups_are_spread_over_servers_with_free_credit(tmp_path, address):
    servers = [ScriptedServer(address, i, credits=4) for i in range(2)]
    with RolloutProducer(config(tmp_path, servers=2), address) as producer:
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
    with RolloutProducer(config(tmp_path), address) as producer:
        producer.submit(prompts(2), 0, SAMPLING)
        first, second = server.next(Generate), server.next(Generate)
        server.finish(first)
        server.finish(first)
        server.send(b"garbage")
        server.send(WIRE_VERSION + b"\xc1")
        server.send(pack(Stop()))  # a message only the trainer may send
        server.send(pack(GroupDone(finished(msgspec.structs.replace(second, version=7)), 0)))
        stranger = ScriptedServer(address, 8)
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
    with RolloutProducer(config(tmp_path), address) as producer:
        producer.submit(prompts(1), 3, SAMPLING)
        server.finish(server.next(Generate))
        with pytest.raises(RolloutError, match="sampled by version 3 in iteration 4: off-policy"):
            producer.next_group(4)
    server.close()


def test_weights_cannot_change_while_groups_are_in_flight(tmp_path, address):
    server = ScriptedServer(address, 0)
    with RolloutProducer(config(tmp_path), address) as producer:
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
    with RolloutProducer(config(tmp_path), address) as producer:
        producer.submit(prompts(1), 0, SAMPLING)
        server.next(Generate)
        server.send(pack(Failed(error="EngineDeadError", message="out of memory")))
        for _ in range(2):
            with pytest.raises(Exception, match="EngineDeadError: server-0: out of memory"):
                producer.next_group(0)
        assert producer.failure(wait_s=1.0) is not None
    server.close()


def test_a_silent_server_is_given_up(tmp_path, address):
    server = ScriptedServer(address, 0)
    with RolloutProducer(config(tmp_path, "rollout.silence_s=0.5"), address) as producer:
        producer.submit(prompts(1), 0, SAMPLING)
        with pytest.raises(RolloutError, match="server-0 was not heard of"):
            producer.next_group(0)
    server.close()


def test_a_group_that_never_comes_ends_at_the_deadline(tmp_path, address):
    server = ScriptedServer(address, 0)
    with RolloutProducer(config(tmp_path, "rollout.deadline_s=0.5"), address) as producer:
        producer.submit(prompts(1), 0, SAMPLING)
        with pytest.raises(RolloutError, match="deadline_s=0.5, 1 missing"):
            producer.next_group(0)
    server.close()


def test_servers_that_do_not_come_are_named(tmp_path, address):
    server = ScriptedServer(address, 0)
    impatient = config(tmp_path, "rollout.start_s=1", servers=2)
    with pytest.raises(RolloutError, match="server-1 not ready within"), RolloutProducer(impatient, address):
        pass
    server.close()


def test_a_reply_of_the_wrong_kind_and_a_missing_one_are_named(tmp_path, address):
    server = ScriptedServer(address, 0)
    with RolloutProducer(config(tmp_path), address) as producer:
        producer.tell("server-0", Sync(version=0, with_sum=False))
        server.next(Sync)
        with pytest.raises(RolloutError, match="no Synced from server-0 within 0.3 s"):
            producer.replies(Synced, deadline_s=0.3)
        server.send(pack(Synced(version=0, seconds=0.1)))
        assert producer.replies(Synced, deadline_s=5)["server-0"].version == 0
    server.close()
