"""How a message is written on the wire, and which frames are let in.

A frame is WIRE_VERSION, a checksum, the sender's stamp, and one message. `FrameReader` lets a frame pass that has this version, a size
within the limit, the right checksum, the schema (msgspec), arrays that fit together, and a stamp above all of its sender's before; it
drops and counts any other. Nothing on the wire is ever executed.
"""

from __future__ import annotations

import itertools
import logging
import math
import struct
import time
from typing import Any

import msgspec
import xxhash

from pasync.messages import Generate, GroupDone, Message, Probe, Probed

WIRE_VERSION = b"pasync3\n"
MAX_MESSAGE_BYTES = 128 << 20
"""Of one frame. A larger one is neither sent nor read."""
MAX_FRAME_BYTES = 2 * MAX_MESSAGE_BYTES
"""A socket cuts off whoever sends a larger frame, before it holds it."""

log = logging.getLogger(__name__)
_HEADER = struct.Struct("<QQ")  # checksum, stamp
_encode = msgspec.msgpack.Encoder().encode
_stamps = itertools.count(time.time_ns())  # so a process that takes another's place begins above the other's last


class BadMessage(ValueError):
    """A frame of the wrong version, size or schema."""


def pack(message: Message) -> bytes:
    """Write a message as one frame, to be sent once, and before any that is written later.

    Raises:
        BadMessage: it is larger than MAX_MESSAGE_BYTES.
    """
    body, stamp = _encode(message), next(_stamps)
    if len(body) > MAX_MESSAGE_BYTES:
        raise BadMessage(f"a {type(message).__name__} of {len(body)} bytes cannot be sent, at most {MAX_MESSAGE_BYTES} are allowed")
    return WIRE_VERSION + _HEADER.pack(_checksum(body, stamp), stamp) + body


class FrameReader:
    """One end of the wire: what it lets pass is whole, fits the schema, and comes once and in order.

    A forged frame with a higher stamp would silence its sender, so beyond loopback the socket has to know who sends.

    Args:
        side: ToServer or ToTrainer, what may arrive here.
    """

    def __init__(self, side: Any) -> None:
        self.dropped = 0
        """Frames that did not pass."""
        self._decoder: Any = msgspec.msgpack.Decoder(side)
        self._newest: dict[bytes, int] = {}

    def read(self, frame: bytes, sender: bytes = b"") -> Any:
        """The message of a frame, None if it is dropped.

        Args:
            sender: whose stamps it continues.
        """
        try:
            message, stamp = self._decoded(frame)
            if stamp <= self._newest.get(sender, -1):
                raise BadMessage(f"a {type(message).__name__} that is not newer than the one before: repeated, or out of order")
        except BadMessage as error:
            return self.drop(f"{len(frame)} bytes from {sender!r}: {error}")
        self._newest[sender] = stamp
        return message

    def drop(self, why: str) -> None:
        """Count a frame that is of no use, and say why in the log: for the first ones, then for ever fewer."""
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:
            log.warning("dropped frame %d: %s", self.dropped, why)

    def _decoded(self, frame: bytes) -> tuple[Any, int]:
        if len(frame) > MAX_MESSAGE_BYTES + len(WIRE_VERSION) + _HEADER.size:
            raise BadMessage(f"at most {MAX_MESSAGE_BYTES} bytes are allowed")
        if not frame.startswith(WIRE_VERSION):
            raise BadMessage(f"it begins with {bytes(frame[:8])!r}, this version speaks {WIRE_VERSION!r}")
        body = memoryview(frame)[len(WIRE_VERSION) + _HEADER.size :]
        try:
            checksum, stamp = _HEADER.unpack_from(frame, len(WIRE_VERSION))
            if checksum != _checksum(body, stamp):
                raise BadMessage("it is not what was sent, its checksum differs")
            return _consistent(self._decoder.decode(body)), stamp
        except (msgspec.MsgspecError, struct.error, RecursionError) as error:  # msgspec recurses where it skips what it does not know
            raise BadMessage(str(error)) from error


def _checksum(body: bytes | memoryview, stamp: int) -> int:
    return xxhash.xxh3_64_intdigest(body, seed=stamp)


def _consistent(message: Any) -> Any:
    """The same message. Raises BadMessage if its arrays cannot be read, or a reward is no number."""
    for array in _arrays(message):
        if len(array) % 4:
            raise BadMessage(f"an array of {len(array)} bytes is no array of 4-byte numbers")
    for response in message.group.responses if isinstance(message, GroupDone) else []:
        if len(response.ids) != len(response.logprobs):
            raise BadMessage(f"{len(response.ids) // 4} tokens have {len(response.logprobs) // 4} log-probs")
        if not math.isfinite(response.reward):
            raise BadMessage(f"a reward is {response.reward}")
    return message


def _arrays(message: Any) -> list[bytes]:
    match message:
        case GroupDone(group=group):
            return [group.prompt_ids, *(array for r in group.responses for array in (r.ids, r.logprobs))]
        case Generate(prompt_ids=array) | Probe(ids=array) | Probed(logprobs=array):
            return [array]
    return []
