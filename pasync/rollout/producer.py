"""The trainer's side of generation: a thread that keeps the servers busy and collects finished groups.

    main thread                      producer thread                          servers
      submit(batch)  --commands-->   pending --credit--> Generate  ------->   sample, score
      next_group()   <--queue-----   check, drop late ones         <-------   GroupDone

The whole batch is submitted at once and `submit` returns at once; groups come back in the order in which they finish. Servers
pull: what one gets when depends on its free slots (see admission.py). A failure of any server is raised by every later call, with
its cause.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import msgspec

from pasync.config import Config
from pasync.data.prompts import Prompt
from pasync.errors import PasyncError, RolloutError, error_named
from pasync.messages import (
    Failed,
    Freed,
    Generate,
    Group,
    GroupDone,
    Heartbeat,
    Hello,
    Message,
    Sampling,
    Stop,
    ToTrainer,
    int_bytes,
)
from pasync.observe.console import progress
from pasync.rollout.admission import Lengths, Load, choose, order
from pasync.transport.channel import Keys, ServerChannel

log = logging.getLogger(__name__)


@dataclass
class Server:
    """What the producer thread knows of one server."""

    slots: int
    """Responses it samples at once."""
    free: int
    """Those it could start now; negative if some wait for a slot."""
    last_heard: float
    working_on: dict[tuple[int, int], float] = field(default_factory=dict)
    """(version, group id) of the groups it was given and has not answered, with their expected tokens."""

    @property
    def load(self) -> Load:
        return Load(self.slots, self.free, len(self.working_on), sum(self.working_on.values()))


@dataclass(frozen=True)
class Task:
    """A group to be sampled."""

    message: Generate
    expected_tokens: float


class RolloutProducer:
    """Context manager on rank 0; its methods belong to the main thread.

    Args:
        address: to bind the servers' socket to.
        keys: of that socket; needed beyond loopback.
    """

    def __init__(self, config: Config, address: str, keys: Keys | None = None) -> None:
        self.config = config
        self.names = [f"server-{i}" for i in range(config.rollout.servers)]
        self.in_flight = 0
        """Groups submitted and not yet taken."""
        self.taken: list[tuple[Group, float]] = []
        """Groups taken since the last submit, in the order taken, with the unix times at which they arrived."""
        self._channel = ServerChannel(address, keys)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._groups: queue.SimpleQueue[tuple[Group, float]] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[tuple[str, ToTrainer]] = queue.SimpleQueue()
        self.lengths = Lengths()
        self._prompts: list[Prompt] = []  # of the batch submitted last, by group id
        self._sampling, self._version = Sampling(1, 1.0, 1), -1
        self._failed, self._failure = threading.Event(), PasyncError("not failed")
        self._dropped = dict.fromkeys(self.names, 0)  # frames, by each server as it last said
        self._servers: dict[str, Server] = {}  # from here on: the producer thread only
        self._pending: list[Task] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="producer", daemon=True)

    def __enter__(self) -> RolloutProducer:
        self._thread.start()
        progress("servers ready", 0, len(self.names))
        try:
            self._await_servers()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._failed.is_set():
            self._command(self._stop)
        self._thread.join(timeout=10)
        if not self._thread.is_alive():
            self._channel.close()  # by this thread only now that the other one is gone

    def submit(self, prompts: list[Prompt], version: int, sampling: Sampling) -> None:
        """Hand over a whole batch; group i belongs to prompts[i]. Returns at once."""
        self.taken, self._prompts, self._version, self._sampling = [], [], version, sampling
        self.extend(prompts)

    def extend(self, prompts: list[Prompt]) -> None:
        """Add prompts to the batch submitted last; the numbers of their groups go on. Returns at once."""
        tasks = [self._task(i, p) for i, p in enumerate(prompts, len(self._prompts))]
        self._prompts += prompts
        self.in_flight += len(tasks)
        self._command(lambda: self._enqueue(tasks))

    def next_group(self, version: int, *, wait: bool = True) -> Group | None:
        """The next finished group, in completion order.

        Waits for a server, at most `rollout.deadline_s`; with `wait=False` returns None if none is ready.

        Raises:
            RolloutError: deadline, a server's failure, or a group that another version sampled.
        """
        item = self._await_group() if wait else self._next(self._groups, 0.0)
        if item is None:
            return None
        group = item[0]
        if group.version != version:
            raise RolloutError(f"group {group.group_id} was sampled by version {group.version} in iteration {version}: off-policy")
        self.in_flight -= 1
        self.taken.append(item)
        self.lengths.learn(self._prompts[group.group_id], group)
        return group

    @property
    def dropped_frames(self) -> int:
        """Frames dropped so far, here and by the servers."""
        return self._channel.reader.dropped + sum(self._dropped.values())

    def require_idle(self) -> None:
        """Raise RolloutError if any group is in flight: weights must not change under it."""
        if self.in_flight:
            raise RolloutError(f"{self.in_flight} groups are still in flight, weights cannot change now")

    def tell(self, server: str, message: Message) -> None:
        """Send a message to one server."""
        self._command(lambda: self._channel.send(server, message))  # type: ignore[arg-type]

    def replies(self, kind: type[Any], *, deadline_s: float) -> dict[str, Any]:
        """One answer of the given type from every server.

        Raises:
            RolloutError: not all answered in time (names those missing), one answered something else, or one failed.
        """
        answers: dict[str, Any] = {}
        end = time.monotonic() + deadline_s
        while missing := [n for n in self.names if n not in answers]:
            item = self._next(self._replies, end - time.monotonic())
            if item is None:
                raise RolloutError(f"no {kind.__name__} from {', '.join(missing)} within {deadline_s} s")
            server, message = item
            if not isinstance(message, kind):
                raise RolloutError(f"{server} answered {type(message).__name__} where {kind.__name__} was due")
            answers[server] = message
        return answers

    def failure(self, *, wait_s: float) -> Exception | None:
        """The failure of a server, if there is one or one is noticed within `wait_s`."""
        return self._failure if self._failed.wait(wait_s) else None

    def _task(self, group_id: int, prompt: Prompt) -> Task:
        sampling = self._sampling
        if prompt.max_tokens:
            sampling = msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, prompt.max_tokens))
        message = Generate(self._version, group_id, int_bytes(prompt.ids), prompt.text, prompt.sample, sampling)
        return Task(message, self.lengths.expect(prompt, sampling.max_tokens))

    def _await_servers(self) -> None:
        end = time.monotonic() + self.config.rollout.start_s
        ready: set[str] = set()
        while len(ready) < len(self.names):
            item = self._next(self._replies, end - time.monotonic())
            if item is None:
                missing = ", ".join(n for n in self.names if n not in ready)
                raise RolloutError(f"{missing} not ready within rollout.start_s={self.config.rollout.start_s}")
            ready.add(item[0])
            progress("servers ready", len(ready), len(self.names))

    def _await_group(self) -> tuple[Group, float]:
        limit = self.config.rollout.deadline_s
        item = self._next(self._groups, limit)
        if item is None:
            raise RolloutError(f"no group finished within rollout.deadline_s={limit}, {self.in_flight} missing")
        return item

    def _next(self, source: queue.SimpleQueue[Any], timeout_s: float) -> Any:
        """Next item, or None after the timeout; raises the producer thread's failure, which also ends the wait."""
        end = time.monotonic() + timeout_s
        while True:
            if self._failed.is_set():
                raise self._failure
            left = end - time.monotonic()
            try:
                item = source.get(timeout=max(left, 0.0)) if left > 0 else source.get_nowait()
            except queue.Empty:
                return None
            if item is not _WAKE:
                return item

    def _command(self, act: Callable[[], None]) -> None:
        self._commands.put(act)
        self._channel.wake()

    # Below: the producer thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                for server, message in self._channel.receive(self.config.rollout.heartbeat_s):
                    self._handle(server, message)
                while not self._commands.empty():
                    self._commands.get()()
                self._dispatch()
                self._check_silence()
        except Exception as error:
            self._failure = error if isinstance(error, PasyncError) else RolloutError(f"{type(error).__name__}: {error}")
            log.exception("the producer thread failed")
            self._failed.set()
            self._groups.put(_WAKE)
            self._replies.put(_WAKE)

    def _handle(self, server: str, message: ToTrainer) -> None:
        now = time.monotonic()
        if isinstance(message, Hello):
            if server not in self.names:
                return self._channel.reader.drop(f"a Hello of {server!r}, which is no server of this run")
            self._servers[server] = Server(slots=message.credits, free=message.credits, last_heard=now)
            self._replies.put((server, message))
            return
        if server not in self._servers:
            return self._channel.reader.drop(f"a {type(message).__name__} of {server!r}, which has not said Hello")
        self._servers[server].last_heard = now
        match message:
            case GroupDone(group=group, freed=freed):
                self._servers[server].free += freed
                self._collect(self._servers[server], group)
            case Freed(responses=freed):
                self._servers[server].free += freed
            case Failed(error=name, message=text):
                raise error_named(name, f"{server}: {text}")
            case Heartbeat(dropped_frames=dropped):
                self._dropped[server] = dropped
            case _:
                self._replies.put((server, message))

    def _collect(self, server: Server, group: Group) -> None:
        key = (group.version, group.group_id)
        if key not in server.working_on:
            return self._channel.reader.drop(f"group {key}, which its server was not asked for or has given before")
        del server.working_on[key]
        self._groups.put((group, time.time()))

    def _enqueue(self, tasks: list[Task]) -> None:
        pending = self._pending + tasks
        self._pending = [pending[i] for i in order(self.config.rollout.admission, [task.expected_tokens for task in pending])]

    def _dispatch(self) -> None:
        names = list(self._servers)
        while self._pending:
            task = self._pending[0]
            size = task.message.sampling.num_responses
            loads = [server.load for server in self._servers.values()]
            chosen = choose(self.config.rollout.admission, loads, size, len(self._pending))
            if chosen is None:
                return
            server = self._servers[names[chosen]]
            server.free -= size
            server.working_on[task.message.version, task.message.group_id] = task.expected_tokens
            self._channel.send(names[chosen], task.message)
            del self._pending[0]

    def _check_silence(self) -> None:
        limit = self.config.rollout.silence_s
        for name, server in self._servers.items():
            silent = time.monotonic() - server.last_heard
            if silent > limit:
                raise RolloutError(f"{name} was not heard of for {silent:.1f} s, rollout.silence_s={limit}")

    def _stop(self) -> None:
        self._stopping = True
        for name in self._servers:
            self._channel.send(name, Stop())


_WAKE: Any = object()
"""Ends a wait on a queue after a failure."""
