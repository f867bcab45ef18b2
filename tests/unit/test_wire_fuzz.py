"""A stub run over a hostile wire: real sockets, the real producer and the real server loop, only the engine is a stub.

    RolloutProducer (ROUTER) <--> DEALER [ fuzzing thread ] ROUTER <--> (DEALER) RolloutServer, stub engine
                                  passes on what it gets, and sends FRAMES frames of its own each way
"""

import asyncio
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from test_producer import config, prompts, wait_until
from workers import free_port

from pasync import frames
from pasync.frames import WIRE_VERSION
from pasync.messages import Sampling, Sync, Synced, int_bytes
from pasync.rollout.producer import RolloutProducer
from pasync.rollout.server import RolloutServer
from pasync.transport.channel import TrainerChannel, server_name

FRAMES = 10_000
"""At each socket."""
NAME = server_name(0, os.getpid())
LARGEST = 1 << 20
GROUPS, SAMPLING = 24, Sampling(2, 1.0, 4)


class StubEngine:
    """Tokens that depend on the request only."""

    async def sample(self, ids: list[int], *, temperature: float, max_tokens: int, request: str) -> tuple[list[int], list[float], bool]:
        await asyncio.sleep(0)
        version, group_id, k, _ = map(int, request.split("-"))
        return sampled(version, group_id, k), [-0.5] * (1 + k), True

    async def receive_weights(self, *, with_sum: bool) -> None: ...

    def require_alive(self) -> None: ...


def sampled(version: int, group_id: int, k: int) -> list[int]:
    return [1000 * version + 10 * group_id + k] * (1 + k)


class StubRewards:
    async def score(self, prompt: str, response: str, response_ids: list[int], sample: dict[str, Any]) -> tuple[float, str]:
        return float(response_ids[0] % 7), ""


def serve(channel_address: str, run: Any) -> None:
    """A server's whole life, on a thread of its own."""

    async def main() -> None:
        channel = TrainerChannel(channel_address, NAME)
        tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "text")
        engine, rewards = StubEngine(), StubRewards()
        await RolloutServer(run, 0, engine, rewards, tokenizer, channel).run()  # type: ignore[arg-type]
        channel.close()

    asyncio.run(main())


def hostile(draw: random.Random, seen: list[bytes], foreign: list[bytes]) -> Iterator[bytes]:
    """Frames that must not pass, made of those that did.

    Args:
        seen: genuine frames that went this way; foreign: that went the other way.
    """
    while True:
        genuine, other = draw.choice(seen), draw.choice(foreign)
        changed = bytearray(genuine)
        for at in draw.sample(range(len(changed)), draw.randint(1, 8)):
            changed[at] ^= draw.randint(1, 255)
        yield from (
            genuine, genuine[: draw.randrange(len(genuine))], genuine + b"\0", bytes(changed), draw.randbytes(draw.randrange(200)),
            WIRE_VERSION + draw.randbytes(draw.randrange(100)), b"pasync9\n" + genuine[8:], framed(draw.randbytes(30)),
            framed(other[len(WIRE_VERSION) + 16 :]), b"",
            framed(b"\x82\xa1x" + b"\x91" * draw.randrange(1, 20_000) + b"\x01\xa4type\xa4stop"),
        )  # fmt: skip
        if draw.random() < 0.02:
            yield framed(genuine[len(WIRE_VERSION) + 16 :].ljust(LARGEST + 1, b"\0"))


def framed(body: bytes) -> bytes:
    """With a valid head and a stamp above all before."""
    stamp = next(frames._stamps)
    return WIRE_VERSION + frames._HEADER.pack(frames._checksum(body, stamp), stamp) + body


class FuzzingProxy:
    """Passes frames on, and `FRAMES` of its own with them each way."""

    def __init__(self, front: str, back: str) -> None:
        self.done = threading.Event()
        self.sent = {"trainer": 0, "server": 0}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(front, back), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self, front: str, back: str) -> None:
        context = zmq.Context()
        to_server, to_trainer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        for socket in (to_server, to_trainer):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.LINGER, 1000)
        to_trainer.setsockopt(zmq.IDENTITY, NAME.encode())
        to_server.bind(front)
        to_trainer.connect(back)
        up, down = list[bytes](), list[bytes]()
        for_trainer, for_server = hostile(random.Random(1), up, down), hostile(random.Random(2), down, up)
        while not self._stop.is_set():
            to_server.poll(1)
            while to_server.poll(0):
                up.append(to_server.recv_multipart()[1])
                to_trainer.send(up[-1])
            while to_trainer.poll(0):
                down.append(to_trainer.recv())
                to_server.send_multipart([NAME.encode(), down[-1]])
            if not (up and down) or self.done.is_set():
                continue
            for _ in range(100):
                to_trainer.send(next(for_trainer))
                to_server.send_multipart([NAME.encode(), next(for_server)])
            self.sent = {end: count + 100 for end, count in self.sent.items()}
            if min(self.sent.values()) >= FRAMES:
                self.done.set()
        context.destroy()


def expected(version: int) -> list[Any]:
    """Without times."""
    made = []
    for i in range(GROUPS):
        ids = [sampled(version, i, k) for k in range(2)]
        made.append((version, i, int_bytes([1, 2, 3]), [(int_bytes(x), float(x[0] % 7)) for x in ids]))
    return made


def iterate(producer: RolloutProducer, version: int) -> list[Any]:
    """One iteration; what came back, by group."""
    producer.muster()
    producer.tell(NAME, Sync(version=version, with_sum=False))
    assert producer.replies(Synced, deadline_s=20)[NAME].version == version
    producer.admit(version)
    producer.submit(prompts(GROUPS), version, SAMPLING)
    groups = [producer.next_group(version) for _ in range(GROUPS)]
    assert producer.next_group(version, wait=False) is None
    return sorted((g.version, g.group_id, g.prompt_ids, [(r.ids, r.reward) for r in g.responses]) for g in groups if g)


def test_ten_thousand_hostile_frames_at_each_socket_change_no_group_and_are_all_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(frames, "MAX_MESSAGE_BYTES", LARGEST)
    front, back = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    run = config(tmp_path, "rollout.max_num_seqs=8", "rollout.deadline_s=20", "rollout.start_s=20")
    proxy = FuzzingProxy(front, back)
    server = threading.Thread(target=serve, args=(front, run), daemon=True)
    server.start()
    with RolloutProducer(run, back) as producer:
        version = 0
        while version < 3 or not proxy.done.is_set():
            assert iterate(producer, version) == expected(version)
            version += 1
        assert proxy.sent == {"trainer": FRAMES, "server": FRAMES}
        wait_until(lambda: producer.dropped_frames >= 2 * FRAMES)
        assert producer._fleet.dropped_by_servers == FRAMES and producer.dropped_frames == 2 * FRAMES
        assert iterate(producer, version) == expected(version)
    server.join(10)
    assert not server.is_alive()
    proxy.close()
