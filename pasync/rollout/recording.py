"""Groups on disk, and a stand-in for the producer that trains from them without any server.

    <run>/rollouts/iteration-00000.msgpack.zst: the groups of one iteration in the order in which they arrived, and when
"""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np
import pyarrow

from pasync.config import Config
from pasync.data.prompts import Prompt
from pasync.errors import RolloutError
from pasync.messages import Group, Sampling


class Recording(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One iteration."""

    groups: list[Group]
    arrivals: list[float]
    """Seconds from submission to the arrival of each group, ascending."""


_decoder = msgspec.msgpack.Decoder(Recording)


def record(run: Path, iteration: int, recording: Recording) -> Path:
    """Keep one iteration's groups; returns the file."""
    path = _path(run, iteration)
    path.parent.mkdir(parents=True, exist_ok=True)
    with pyarrow.output_stream(path, compression="zstd") as stream:
        stream.write(msgspec.msgpack.encode(recording))
    return path


def read_recording(run: Path, iteration: int) -> Recording:
    """Read what `record` kept. Raises RolloutError if it is not there or not whole."""
    path = _path(run, iteration)
    if not path.exists():
        raise RolloutError(f"iteration {iteration} was not recorded: {path} does not exist")
    try:
        with pyarrow.input_stream(path, compression="zstd") as stream:
            return _decoder.decode(stream.read())
    except (msgspec.MsgspecError, OSError) as error:
        raise RolloutError(f"{path} cannot be read: {error}") from error


class ReplayProducer:
    """Gives back what `record` kept; same use as `RolloutProducer`. `rollout.replay_order` and `replay_delay` say when.

    Args:
        run: the folder to replay.
    """

    def __init__(self, config: Config, run: Path) -> None:
        self.config, self.run = config, run
        self.in_flight = 0
        self.taken: list[tuple[Group, float]] = []
        self.stranded = False
        self._submitted = 0  # groups with smaller numbers may be given
        self._waiting: list[tuple[float, Group]] = []  # (unix time at which it arrives, group), ascending

    def __enter__(self) -> ReplayProducer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def submit(self, prompts: list[Prompt], version: int, sampling: Sampling) -> None:
        """Read the groups recorded for this iteration. Raises RolloutError if they are not those of the batch."""
        recording = read_recording(self.run, version)
        groups = self._ordered(recording.groups, version)
        recorded = self.config.rollout.replay_delay == "recorded"
        delays = recording.arrivals if recorded else [0.0] * len(groups)
        now = time.time()
        self._waiting = [(now + delay, group) for delay, group in zip(delays, groups, strict=True)]
        self.taken, self._submitted = [], 0
        self.extend(prompts)

    def extend(self, prompts: list[Prompt]) -> None:
        """Let so many more of the recorded groups arrive."""
        self._submitted += len(prompts)
        self.in_flight += len(prompts)
        there = sum(group.group_id < self._submitted for _, group in self._waiting) + len(self.taken)
        if there != self._submitted:
            raise RolloutError(f"{self.run} holds {there} of the {self._submitted} groups that this iteration asks for")

    def next_group(self, version: int, *, wait: bool = True) -> Group | None:
        """The next recorded group; with `wait=False` None if its time has not come.

        Raises:
            RolloutError: it is more than `rollout.deadline_s` away, or another version sampled it.
        """
        index = next(i for i, (_, group) in enumerate(self._waiting) if group.group_id < self._submitted)
        arrives, group = self._waiting[index]
        if group.version != version:
            raise RolloutError(f"group {group.group_id} was sampled by version {group.version} in iteration {version}: off-policy")
        early = arrives - time.time()
        if early > 0:
            if not wait:
                return None
            if early > (limit := self.config.rollout.deadline_s):
                raise RolloutError(f"no group finished within rollout.deadline_s={limit}, {self.in_flight} missing")
            time.sleep(early)  # the recorded delay itself
        del self._waiting[index]
        self.in_flight -= 1
        self.taken.append((group, max(arrives, time.time()) if early > 0 else arrives))
        return group

    def _ordered(self, groups: list[Group], version: int) -> list[Group]:
        match self.config.rollout.replay_order:
            case "sorted":
                return sorted(groups, key=lambda g: g.group_id)
            case "random":
                return [groups[i] for i in np.random.default_rng((self.config.seed, version)).permutation(len(groups))]
            case _:
                return groups


def _path(run: Path, iteration: int) -> Path:
    return run / "rollouts" / f"iteration-{iteration:05d}.msgpack.zst"
