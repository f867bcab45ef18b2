"""Sockets: the trainer binds, servers connect, so neither start order nor restarts matter.

    rank 0, producer thread: ServerChannel (ROUTER)  <--tcp-->  TrainerChannel (DEALER) :server 0, 1, ..

Beyond loopback both ends need `Keys`: then the connection is encrypted (CurveZMQ), and whoever does not hold the servers' key is
turned away before a frame of his is read.

The only file that imports zmq. A socket belongs to one thread.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from pasync.errors import RolloutError
from pasync.frames import MAX_FRAME_BYTES, FrameReader, pack
from pasync.messages import Message, ToServer, ToTrainer

PING_MS = 10_000
"""A trainer that answers no ping for so long is gone; a host without power says no goodbye."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Keys:
    """Curve25519 keys, as 40 characters each."""

    trainer_public: str
    trainer_secret: str
    server_public: str
    """All servers have the same pair."""
    server_secret: str

    @classmethod
    def make(cls, path: Path) -> None:
        """Write new keys, for this user's eyes only, unless there are some already: other nodes may have read those."""
        if path.exists():
            return
        draft = path.with_name(f".{path.name}-{os.getpid()}")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump([key.decode() for _ in range(2) for key in zmq.curve_keypair()], file)
        draft.replace(path)

    @classmethod
    def load(cls, path: str) -> Keys | None:
        """Keys in a file; none for no file."""
        return cls(*json.loads(Path(path).read_text())) if path else None


class ServerChannel:
    """The trainer's end. All methods but `wake` belong to one thread.

    Args:
        address: to bind to.
        keys: without them only an address of the loopback interface is taken.

    Raises:
        ValueError: the address is open to others and there are no keys.
    """

    def __init__(self, address: str, keys: Keys | None = None) -> None:
        self.reader = FrameReader(ToTrainer)
        if not keys and not _is_loopback(address):
            raise ValueError(f"{address} can be reached from other hosts: a socket there needs keys")
        self._context = zmq.Context()
        self._authenticator = _authenticator(self._context, keys.server_public) if keys else None
        self._socket = self._context.socket(zmq.ROUTER)
        if keys:
            self._socket.curve_server = True
            self._socket.curve_secretkey = keys.trainer_secret.encode()
        self._socket.setsockopt(zmq.LINGER, 2000)  # lets the last Stop leave
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # the batch bounds what waits; at a limit a server that reads late would count as gone
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.bind(address)
        self._bell, self._button = os.pipe()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._bell, zmq.POLLIN)

    def receive(self, timeout_s: float) -> list[tuple[str, ToTrainer]]:
        """Messages that are there, with their senders' names.

        Waits at most `timeout_s` for the first one; woken early by `wake`. What `reader` does not let pass is dropped and counted.
        """
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._bell in ready:
            os.read(self._bell, 4096)
        messages: list[tuple[str, ToTrainer]] = []
        while self._socket.poll(0):
            sender, *frames = self._socket.recv_multipart()
            message = self.reader.read(b"".join(frames), sender)
            if message is not None:
                messages.append((sender.decode(errors="replace"), message))
        return messages

    def send(self, server: str, message: ToServer) -> None:
        """Queue a message for one server. Raises RolloutError if it is not connected."""
        try:
            self._socket.send_multipart([server.encode(), pack(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise RolloutError(f"{server} cannot be reached: {error}") from error

    def wake(self) -> None:
        """Make a waiting `receive` return. May be called from any thread."""
        os.write(self._button, b"\0")

    def close(self) -> None:
        """Send what is queued (2 s at most) and free the port."""
        self._socket.close()
        if self._authenticator:
            self._authenticator.stop()
        self._context.term()
        os.close(self._bell)
        os.close(self._button)


class TrainerChannel:
    """A server's end, for asyncio."""

    def __init__(self, address: str, name: str, keys: Keys | None = None) -> None:
        self.address, self.reader = address, FrameReader(ToServer)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        if keys:
            self._socket.curve_serverkey = keys.trainer_public.encode()
            self._socket.curve_publickey = keys.server_public.encode()
            self._socket.curve_secretkey = keys.server_secret.encode()
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
        self._events = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.connect(address)

    async def receive(self) -> ToServer:
        """The next message of the trainer; what `reader` does not let pass is dropped and counted.

        Waits without a deadline: `watch`, beside it, ends a wait for a trainer that is gone.
        """
        while True:
            message = self.reader.read(await self._socket.recv())
            if message is not None:
                return message

    async def send(self, message: Message) -> None:
        """Queue a message for the trainer."""
        await self._socket.send(pack(message))

    async def watch(self, start_s: float, silence_s: float) -> None:
        """Raise RolloutError when the trainer cannot be reached any more; the socket itself would try for ever.

        Waits at most `start_s` for the first connection (for which each must know the other's key), and later at most `silence_s` for
        a lost one to come back.
        """
        why, connected = f"not reached within rollout.start_s={start_s}: it is not there, or has other keys", False
        end = time.monotonic() + start_s
        while True:
            try:
                event = await asyncio.wait_for(recv_monitor_message(self._events), None if connected else end - time.monotonic())
            except TimeoutError:
                raise RolloutError(f"the trainer at {self.address} was {why}; rank 0 writes logs/ranks.log") from None
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                connected = True
            elif connected:
                why, connected, end = f"lost for rollout.silence_s={silence_s}", False, time.monotonic() + silence_s

    def close(self) -> None:
        """Send what is queued (1 s at most)."""
        self._socket.disable_monitor()
        self._events.close()
        self._socket.close()
        self._context.term()


def server_name(index: int, pid: int) -> str:
    """Identity of a server's socket: that of one process, so that what a dead one has said is never taken for its successor's."""
    return f"server-{index} (pid {pid})"


def _is_loopback(address: str) -> bool:
    host = address.removeprefix("tcp://").rpartition(":")[0]
    return ipaddress.ip_address(host).is_loopback


class _Allowed:
    """Answers pyzmq's question whether a peer with some public key may connect."""

    def __init__(self, public: str) -> None:
        self.public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key.decode() == self.public


def _authenticator(context: zmq.Context, public: str) -> ThreadAuthenticator:
    """A thread that lets only the holder of one key connect to the sockets of a context."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("*", _Allowed(public))
    return authenticator
