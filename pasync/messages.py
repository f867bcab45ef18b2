"""What travels between the trainer and the servers.

    trainer (ROUTER)  -- Join, Generate, Cancel, Sync, Probe, Ping, Stop -->  server (DEALER)
                      <-- Hello, Joined, Freed, GroupDone, Cancelled, Synced, Unsynced, Probed, Heartbeat, Failed --

Each is one msgpack map with a "type" tag; token ids and log-probs are raw little-endian arrays.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

KILLED = ("timeout", "crash", "out of memory")
"""Why there is no reward where the response may be to blame: its worker hung, died, or filled its memory."""

Natural = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Version = Annotated[int, msgspec.Meta(ge=-1)]
"""Which weights; ON_DISK: those that a server has loaded itself."""
ON_DISK = -1


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of everything on the wire."""


class Response(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One sampled response."""

    ids: bytes
    """int32 [R]: the very tokens the engine sampled, the stop token included."""
    logprobs: bytes
    """float32 [R]: log-probs of those tokens under the distribution they were sampled from."""
    text: str
    """The response as text, without the token that ended it."""
    ended: bool
    """False if cut at max_tokens."""
    reward: float
    reward_error: str = ""
    """Why the reward function gave no number (then `reward` is 0): one of KILLED, "not a number", or an exception."""

    @property
    def token_ids(self) -> np.ndarray:
        return np.frombuffer(self.ids, "<i4")

    @property
    def token_logprobs(self) -> np.ndarray:
        return np.frombuffer(self.logprobs, "<f4")


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prompt and its K responses: the unit that is generated, queued, recorded and trained on."""

    version: Version
    """Of the weights that sampled it."""
    group_id: Natural
    """Position of the prompt in the batch of its iteration, or in its held-out set."""
    prompt_ids: bytes
    """int32 [P]."""
    responses: list[Response]
    started: float
    """Unix time at which a server took it on; its first responses may have waited for slots."""
    finished: float
    """Unix time at which its last reward was known."""
    server: int = 0
    """Index of that server."""
    held_out: str = ""
    """Name of the held-out set that the prompt is of; "" of the training set."""

    @property
    def num_tokens(self) -> int:
        """Prompt once plus all responses: what a shared-prompt forward sees."""
        return (len(self.prompt_ids) + sum(len(r.ids) for r in self.responses)) // 4

    @property
    def num_response_tokens(self) -> int:
        return sum(len(r.ids) for r in self.responses) // 4

    @property
    def rewards(self) -> list[float]:
        return [r.reward for r in self.responses]

    @property
    def reward_failure(self) -> str:
        """Why the reward function itself failed on a response, "" if it did not; a killed worker is no failure (see KILLED)."""
        reasons = (f"response {k}: {r.reward_error}" for k, r in enumerate(self.responses) if r.reward_error not in ("", *KILLED))
        return next(reasons, "")


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to sample; nothing is left to the engine's defaults."""

    num_responses: Positive
    temperature: float
    max_tokens: Natural


class Join(Message, frozen=True, tag="join"):
    """Trainer: enter the weight-transfer group as ranks rank_offset .. rank_offset + tensor_parallel - 1."""

    host: str
    port: int
    rank_offset: int
    world_size: int
    timeout_s: float
    buckets: list[list[tuple[str, list[int]]]]
    """Names and shapes of the tensors of every bucket, in the order they are sent."""
    max_numel: int
    """Numbers of a bucket at most; a larger tensor is always a bucket of its own."""


class Generate(Message, frozen=True, tag="generate"):
    """Trainer: sample one group with weights of `version`."""

    version: Version
    group_id: Natural
    prompt_ids: bytes
    """int32 [P]."""
    prompt: str
    """The prompt as text, for rewards and logs."""
    sample: dict[str, str | int | float | bool | None]
    """Columns of the data row, for rewards."""
    sampling: Sampling
    held_out: str = ""
    """As in `Group`."""


class Cancel(Message, frozen=True, tag="cancel"):
    """Trainer: sample no more for held-out prompts."""


class Sync(Message, frozen=True, tag="sync"):
    """Trainer: receive the weights of `version` from the transfer group, now."""

    version: int
    with_sum: bool
    """Answer with the sum over the weights held afterwards."""


class Probe(Message, frozen=True, tag="probe"):
    """Trainer: give the log-probs of this fixed sequence."""

    version: int
    ids: bytes
    """int32 [P]."""


class Ping(Message, frozen=True, tag="ping"):
    """Trainer: nothing to do; sending it shows whether the connection is still there."""


class Stop(Message, frozen=True, tag="stop"):
    """Trainer: the run is over, or goes on without this server; exit with code 0."""


class Hello(Message, frozen=True, tag="hello"):
    """Server: ready, and able to sample `credits` responses at once."""

    server: Natural
    pid: int
    credits: Positive


class Joined(Message, frozen=True, tag="joined"):
    """Server: the workers are in the weight-transfer group."""


class Freed(Message, frozen=True, tag="freed"):
    """Server: can sample so many more responses at once."""

    responses: Natural


class GroupDone(Message, frozen=True, tag="group_done"):
    """Server: one finished group."""

    group: Group
    freed: Natural
    """As in `Freed`."""


class Cancelled(Message, frozen=True, tag="cancelled"):
    """Server: has nothing left of what it was given before the Cancel, and all slots free."""


class Synced(Message, frozen=True, tag="synced"):
    """Server: holds `version` now, prefix cache empty."""

    version: int
    seconds: float
    weight_sum: int | None = None
    """`checksum` of all weights held (absent if not asked for, or if the weights are sharded)."""


class Unsynced(Message, frozen=True, tag="unsynced"):
    """Server, where Joined or Synced is due: the transfer failed. It holds no version until the next one."""

    message: str


class Probed(Message, frozen=True, tag="probed"):
    """Server: log-probs of the probe sequence."""

    version: int
    logprobs: bytes
    """float32 [P - 1]: of tokens 1 .. P-1 at temperature 1."""


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Server: alive."""

    dropped_frames: Natural
    """By its `FrameReader`, since it started."""


class Failed(Message, frozen=True, tag="failed"):
    """Server: cannot go on."""

    error: str
    message: str


ToServer = Join | Generate | Cancel | Sync | Probe | Ping | Stop
ToTrainer = Hello | Joined | Freed | GroupDone | Cancelled | Synced | Unsynced | Probed | Heartbeat | Failed

def int_bytes(ids: object) -> bytes:
    """Token ids as int32 bytes."""
    return np.asarray(ids, "<i4").tobytes()


def float_bytes(values: object) -> bytes:
    """Log-probs as float32 bytes."""
    return np.asarray(values, "<f4").tobytes()


def ints(data: bytes) -> np.ndarray:
    """int32 array of `int_bytes`."""
    return np.frombuffer(data, "<i4")


def floats(data: bytes) -> np.ndarray:
    """float32 array of `float_bytes`."""
    return np.frombuffer(data, "<f4")
