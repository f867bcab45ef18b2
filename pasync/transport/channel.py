"""Sockets: the trainer binds, servers connect, so neither start order nor restarts matter.

    rank 0, producer thread: ServerChannel (ROUTER)  <--tcp-->  TrainerChannel (DEALER) :server 0, 1, ..

The only file that imports zmq. A socket belongs to one thread.
"""

from __future__ import annotations

import os

import zmq
import zmq.asyncio

from pasync.errors import RolloutError
from pasync.messages import MAX_FRAME_BYTES, FrameReader, Message, ToServer, ToTrainer, pack


class ServerChannel:
    """The trainer's end. All methods but `wake` belong to one thread."""

    def __init__(self, address: str) -> None:
        self.reader = FrameReader(ToTrainer)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 2000)  # lets the last Stop leave
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
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
        self._context.term()
        os.close(self._bell)
        os.close(self._button)


class TrainerChannel:
    """A server's end, for asyncio."""

    def __init__(self, address: str, name: str) -> None:
        self.reader = FrameReader(ToServer)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.connect(address)

    async def receive(self) -> ToServer:
        """The next message of the trainer; what `reader` does not let pass is dropped and counted."""
        while True:
            message = self.reader.read(await self._socket.recv())
            if message is not None:
                return message

    async def send(self, message: Message) -> None:
        """Queue a message for the trainer."""
        await self._socket.send(pack(message))

    def close(self) -> None:
        """Send what is queued (1 s at most)."""
        self._socket.close()
        self._context.term()
