"""Sockets between hosts: who is heard, and how long a server waits for a trainer that is gone. Real sockets."""

import asyncio
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from workers import free_port
from zmq.utils.monitor import recv_monitor_message

from pasync.errors import RolloutError
from pasync.frames import pack
from pasync.messages import Heartbeat, Hello, Stop, ToTrainer
from pasync.transport.channel import Keys, ServerChannel, TrainerChannel

HELLO = Hello(server=0, pid=1, credits=4)


@pytest.fixture
def address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return made(tmp_path / "keys.json")


def made(path: Path) -> Keys:
    Keys.make(path)
    found = Keys.load(str(path))
    assert found
    return found


def heard(channel: ServerChannel, count: int, timeout_s: float = 10.0) -> list[tuple[str, ToTrainer]]:
    """The first messages, `count` of them."""
    found: list[tuple[str, ToTrainer]] = []
    end = time.monotonic() + timeout_s
    while len(found) < count and time.monotonic() < end:
        found += channel.receive(0.1)
    return found


def turned_away(address: str, configure: Callable[[Any], None]) -> bool:
    """Whether a peer that says hello is thrown out, or gets no handshake."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        configure(peer)
        peer.setsockopt(zmq.IDENTITY, b"server-0")
        peer.setsockopt(zmq.LINGER, 500)
        peer.setsockopt(zmq.HANDSHAKE_IVL, 1000)
        failed = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        with peer.get_monitor_socket(failed | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED) as events:
            peer.connect(address)
            peer.send(pack(HELLO))
            answered = bool(events.poll(10_000)) and recv_monitor_message(events)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED
            peer.disable_monitor()
    return answered


def pair(public: bytes, secret: bytes, trainer: str) -> Callable[[Any], None]:
    def configure(peer: Any) -> None:
        peer.curve_publickey, peer.curve_secretkey, peer.curve_serverkey = public, secret, trainer.encode()

    return configure


def test_keys_are_for_one_pair_of_eyes_and_stay(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    first = made(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert made(path) == first and [p.name for p in tmp_path.iterdir()] == ["keys.json"]
    assert made(tmp_path / "other.json") != first
    assert Keys.load("") is None


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1"])
def test_no_socket_is_open_to_other_hosts_without_keys(host: str) -> None:
    with pytest.raises(ValueError, match="needs keys"):
        ServerChannel(f"tcp://{host}:{free_port()}")


def test_with_keys_any_address_is_taken(keys: Keys) -> None:
    ServerChannel(f"tcp://0.0.0.0:{free_port()}", keys).close()


def test_both_ends_with_keys_talk(address: str, keys: Keys) -> None:
    async def server() -> Any:
        channel = TrainerChannel(address, "server-0", keys)
        await channel.send(HELLO)
        answer = await asyncio.wait_for(channel.receive(), 20)
        channel.close()
        return answer

    async def both() -> Any:
        task = asyncio.create_task(server())
        assert await asyncio.to_thread(heard, trainer, 1) == [("server-0", HELLO)]
        trainer.send("server-0", Stop())
        return await task

    trainer = ServerChannel(address, keys)
    assert asyncio.run(both()) == Stop()
    trainer.close()


def test_a_peer_without_the_servers_key_is_never_heard(address: str, keys: Keys, tmp_path: Path) -> None:
    stranger, other = zmq.curve_keypair(), made(tmp_path / "other.json")
    trainer = ServerChannel(address, keys)
    assert turned_away(address, lambda peer: None), "no key at all"
    assert turned_away(address, pair(*stranger, keys.trainer_public)), "a key of his own, though he knows the trainer's"
    ours = keys.server_public.encode(), keys.server_secret.encode()
    assert turned_away(address, pair(*ours, other.trainer_public)), "ours, but for another trainer"
    assert not turned_away(address, pair(*ours, keys.trainer_public)), "the servers' key, for comparison"
    assert heard(trainer, 2, 1.0) == [("server-0", HELLO)] and trainer.reader.dropped == 0
    trainer.close()


def watch(address: str, keys: Keys | None, start_s: float, silence_s: float, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Watch until it raises; `meanwhile` runs once the trainer has been reached."""

    async def watched() -> None:
        channel = TrainerChannel(address, "server-0", keys)
        try:
            async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
                tasks.create_task(channel.watch(start_s, silence_s))
                await channel.send(Heartbeat(0))
                await asyncio.to_thread(meanwhile)
        finally:
            channel.close()

    asyncio.run(watched())


def raised(group: pytest.ExceptionInfo[BaseExceptionGroup]) -> str:
    (error,) = group.value.exceptions
    assert isinstance(error, RolloutError)
    return str(error)


def test_a_server_gives_up_a_trainer_that_never_comes(address: str) -> None:
    with pytest.raises(BaseExceptionGroup) as group:
        watch(address, None, 0.3, 60)
    assert raised(group).startswith(f"the trainer at {address} was not reached within rollout.start_s=0.3")


def test_a_server_does_not_talk_to_a_trainer_with_another_key(address: str, keys: Keys, tmp_path: Path) -> None:
    other = made(tmp_path / "other.json")
    impostor = ServerChannel(address, Keys(other.trainer_public, other.trainer_secret, keys.server_public, keys.server_secret))
    with pytest.raises(BaseExceptionGroup) as group:
        watch(address, keys, 1.0, 60)
    assert "has other keys" in raised(group) and impostor.receive(0.0) == []
    impostor.close()


def test_a_server_gives_up_a_trainer_that_is_gone(address: str, keys: Keys) -> None:
    trainer = ServerChannel(address, keys)

    def leave() -> None:
        assert heard(trainer, 1)
        trainer.close()

    with pytest.raises(BaseExceptionGroup) as group:
        watch(address, keys, 20, 0.3, leave)
    assert raised(group) == f"the trainer at {address} was lost for rollout.silence_s=0.3; rank 0 writes logs/ranks.log"


def test_a_server_takes_a_trainer_back_that_was_gone_for_a_moment(address: str, keys: Keys) -> None:
    def leave_and_return() -> ServerChannel:
        trainer = ServerChannel(address, keys)
        assert heard(trainer, 1)
        trainer.close()
        return ServerChannel(address, keys)

    async def watched() -> None:
        channel = TrainerChannel(address, "server-0", keys)
        await channel.send(Heartbeat(0))
        watching = asyncio.create_task(channel.watch(20, 1.0))
        trainer = await asyncio.to_thread(leave_and_return)
        await channel.send(HELLO)
        assert ("server-0", HELLO) in await asyncio.to_thread(heard, trainer, 1)
        done, _ = await asyncio.wait([watching], timeout=1.5)
        assert not done, "it was back within the second"
        watching.cancel()
        channel.close()
        trainer.close()

    asyncio.run(watched())
