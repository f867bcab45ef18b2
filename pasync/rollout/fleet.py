"""The servers of a run as they come and go, and the groups they work on. Belongs to the producer thread.

    Hello --> present --admit(version)--> gets groups of that version --GroupDone--> queue of finished groups
                 |
                 +-- silent, disconnected, failed, replaced --> lost: its groups go to the others, the launcher starts it again

Held-out groups are for servers that have no other: a server samples either kind at a time. As soon as a group of the batch waits, all
that evaluate are told to Cancel, and what they had of it is handed out again later.

A name stands for one process, `server-0 (pid 4711)`. So nothing that a lost one still says is taken for its successor's: it is dropped and
counted, and answered with Stop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from pasync.config import Config
from pasync.errors import RolloutError, error_named
from pasync.messages import (
    Cancel,
    Cancelled,
    Failed,
    Freed,
    Generate,
    Group,
    GroupDone,
    Heartbeat,
    Hello,
    Message,
    Ping,
    Stop,
    ToTrainer,
    Unsynced,
)
from pasync.observe.console import say
from pasync.processes import report_lost
from pasync.rollout.admission import Load, choose, order
from pasync.transport.channel import ServerChannel, server_name

log = logging.getLogger(__name__)
WAKE: Any = object()
"""Ends a wait on a queue, so that the waiter looks again at what has changed."""
ENDED: Any = object()
"""In the queue of held-out groups: no more come of this evaluation, and no server works on it."""
Key = tuple[int, str, int]


@dataclass(frozen=True)
class Task:
    """A group to be sampled."""

    message: Generate
    expected_tokens: float


@dataclass
class Server:
    """What is known of one server process."""

    hello: Hello
    free: int
    """Responses it could start now; negative if some wait for a slot."""
    last_heard: float
    version: int | None = None
    """Of the groups it may get; None until it is admitted."""
    working_on: dict[Key, Task] = field(default_factory=dict)
    """By (version, held-out set, group id): what it was given and has not answered."""
    recalled: float | None = None
    """When it was told to Cancel, until it has."""
    dropped_frames: int = 0
    """As it last said."""

    @property
    def load(self) -> Load:
        expected = sum(task.expected_tokens for task in self.working_on.values())
        return Load(self.hello.credits, self.free, len(self.working_on), expected)

    @property
    def evaluates(self) -> bool:
        """Whether its groups are held-out ones."""
        return self.recalled is not None or any(task.message.held_out for task in self.working_on.values())

    @property
    def may_evaluate(self) -> bool:
        """Whether it has no group of the batch, and is not being recalled."""
        return self.recalled is None and (not self.working_on or self.evaluates)


class Fleet:
    """Gives groups to servers, and takes them back from those that are lost.

    Args:
        groups: gets each finished group with its unix time, and WAKE when a server is lost.
        evaluated: the same of held-out groups, and ENDED.
        replies: gets (name, message) of all else: Hello, answers, and Unsynced of a server that is lost.
    """

    def __init__(
        self, config: Config, channel: ServerChannel, groups: SimpleQueue[Any], evaluated: SimpleQueue[Any], replies: SimpleQueue[Any]
    ) -> None:
        self.config, self._channel, self._groups, self._evaluated, self._replies = config, channel, groups, evaluated, replies
        self.present: tuple[str, ...] = ()
        """Names of the servers that are there. Never changed but replaced, so that any thread may read it."""
        self.requeued = self.dropped_by_servers = 0
        """Groups taken back from lost servers, and frames that servers dropped, lost ones included. Any thread may read them."""
        self._servers: dict[str, Server] = {}
        self._lost: set[str] = set()
        self._pending: list[Task] = []
        self._held_out: list[Task] = []
        self._evaluating = self._ending = False
        self._pinged = 0.0

    @property
    def waiting(self) -> int:
        """Groups that no server has yet."""
        return len(self._pending)

    @property
    def busy(self) -> list[int | None]:
        """How many groups every server of the run has, None for one that is not there."""
        there = {server.hello.server: len(server.working_on) for server in self._servers.values()}
        return [there.get(i) for i in range(self.config.rollout.servers)]

    def handle(self, name: str, message: ToTrainer) -> None:
        """Act on what a server says."""
        if name in self._servers:
            self._servers[name].last_heard = time.monotonic()
            self._take(name, self._servers[name], message)
        elif name in self._lost:
            self._channel.reader.drop(f"a {type(message).__name__} of {name!r}, which is given up")
            self._stop(name)
        elif isinstance(message, Hello) and name == server_name(message.server, message.pid):
            self._welcome(name, message)
        else:
            self._channel.reader.drop(f"a {type(message).__name__} of {name!r}, which has not said Hello under its name")

    def enqueue(self, tasks: list[Task]) -> None:
        """Add groups to those that no server has yet."""
        self._order(self._pending + tasks)

    def evaluate(self, tasks: list[Task]) -> None:
        """Hand out held-out groups, in this order, while servers have nothing else; then ENDED."""
        self._held_out, self._evaluating, self._ending = tasks, True, False

    def end_evaluation(self) -> None:
        """Hand out no more of it and cancel what is under way; then ENDED."""
        self._ending = True

    def admit(self, names: list[str], version: int) -> None:
        """From here on these servers get groups of `version`."""
        for name in names:
            if name in self._servers:
                self._servers[name].version = version

    def dispatch(self) -> None:
        """Give out groups as far as servers that hold their version have room."""
        self._hand_out(self._pending, self.config.rollout.admission, lambda server: not server.evaluates)
        if self._pending or self._ending:
            self._recall()
        else:
            self._hand_out(self._held_out, "group_first", lambda server: server.may_evaluate)
        over = self._ending or not self._held_out
        if self._evaluating and over and not any(server.evaluates for server in self._servers.values()):
            self._held_out, self._evaluating = [], False
            self._evaluated.put(ENDED)

    def check(self) -> None:
        """Find those that are silent, or whose connection is gone: it closes when a process ends."""
        now, limit, cancel_s = time.monotonic(), self.config.rollout.silence_s, self.config.sync.deadline_s
        # Without restarts only silence counts: a connection may come back, and nobody else could do the work.
        ping = bool(self.config.rollout.max_restarts) and now - self._pinged >= self.config.rollout.heartbeat_s
        self._pinged = now if ping else self._pinged
        for name, server in list(self._servers.items()):
            silent = now - server.last_heard
            if silent > limit:
                self.lose(name, RolloutError(f"{name} was not heard of for {silent:.1f} s, rollout.silence_s={limit}: {log_of(name)}"))
            elif server.recalled is not None and now - server.recalled > cancel_s:
                self.lose(name, RolloutError(f"{name} did not cancel its evaluation within sync.deadline_s={cancel_s}: {log_of(name)}"))
            elif ping:
                self.send(name, Ping())

    def send(self, name: str, message: Message) -> bool:
        """Send to a server that is there; one that cannot be reached is lost. Returns whether it went out."""
        if name not in self._servers:
            return False
        try:
            self._channel.send(name, message)  # type: ignore[arg-type]
        except RolloutError as error:
            self.lose(name, error)
            return False
        return True

    def lose(self, name: str, error: Exception) -> None:
        """Count on a server no more and put its groups first in the queue. Raises `error` if a lost server is to end the run."""
        if name not in self._servers:
            return
        if not self.config.rollout.max_restarts:
            raise error
        server = self._servers.pop(name)
        self._lost.add(name)
        self._note_present()
        tasks = list(server.working_on.values())
        self.requeued += len(tasks)
        self._put_back(tasks)
        say(f"{type(error).__name__}: {error}; {len(tasks)} groups go to other servers")
        self._stop(name)
        report_lost(f"server-{server.hello.server}", server.hello.pid, error)
        self._replies.put((name, Unsynced(str(error))))
        self._groups.put(WAKE)
        self._evaluated.put(WAKE)

    def outstanding(self) -> str:
        """Who works on which groups, and where its log is. Any thread may ask."""
        working = [(name, [group for _, _, group in list(server.working_on)]) for name, server in list(self._servers.items())]
        found = [f"{name} works on groups {sorted(groups)}: {log_of(name)}" for name, groups in working if groups]
        return "; ".join(found) or "no server works on any"

    def stop(self) -> None:
        """Tell all servers that the run is over."""
        for name in self._servers:
            self._stop(name)

    def _welcome(self, name: str, hello: Hello) -> None:
        for other, server in list(self._servers.items()):
            if server.hello.server == hello.server:
                self.lose(other, RolloutError(f"{name} takes the place of {other}"))
        self._servers[name] = Server(hello, free=hello.credits, last_heard=time.monotonic())
        self._note_present()
        self._replies.put((name, hello))

    def _take(self, name: str, server: Server, message: ToTrainer) -> None:
        match message:
            case GroupDone(group=group, freed=freed):
                server.free += freed
                if server.working_on.pop(key := _key(group), None):
                    (self._evaluated if group.held_out else self._groups).put((group, time.time()))
                else:
                    self._channel.reader.drop(f"group {key}, which {name} was not asked for or has given before")
            case Freed(responses=freed):
                server.free += freed
            case Cancelled() if server.recalled is not None:
                self._put_back(list(server.working_on.values()))
                server.free, server.recalled = server.hello.credits, None
                server.working_on.clear()
            case Cancelled():
                self._channel.reader.drop(f"a Cancelled of {name} that it was not asked for")
            case Failed(error=error, message=text):
                self.lose(name, error_named(error, f"{name}: {text}"))
            case Heartbeat(dropped_frames=dropped):
                self.dropped_by_servers += dropped - server.dropped_frames
                server.dropped_frames = dropped
            case Hello():
                self._channel.reader.drop(f"another Hello of {name}")
            case _:
                self._replies.put((name, message))

    def _hand_out(self, tasks: list[Task], admission: str, takes: Callable[[Server], bool]) -> None:
        while tasks:
            message = tasks[0].message
            version, size = message.version, message.sampling.num_responses
            able = [name for name, server in self._servers.items() if server.version == version and takes(server)]
            chosen = choose(admission, [self._servers[n].load for n in able], size, len(tasks))
            if chosen is None:
                return
            if self.send(able[chosen], message):
                server = self._servers[able[chosen]]
                server.free -= size
                server.working_on[_key(message)] = tasks.pop(0)

    def _recall(self) -> None:
        """Tell those that evaluate to Cancel."""
        for name, server in list(self._servers.items()):
            if server.evaluates and server.recalled is None:
                server.recalled = time.monotonic()
                self.send(name, Cancel())

    def _put_back(self, tasks: list[Task]) -> None:
        """Groups that are to be handed out again, before those that never were."""
        self._held_out[:0] = [task for task in tasks if task.message.held_out]
        self._order([task for task in tasks if not task.message.held_out] + self._pending)

    def _order(self, tasks: list[Task]) -> None:
        self._pending[:] = [tasks[i] for i in order(self.config.rollout.admission, [task.expected_tokens for task in tasks])]

    def _note_present(self) -> None:
        self.present = tuple(sorted(self._servers, key=lambda name: self._servers[name].hello.server))

    def _stop(self, name: str) -> None:
        with suppress(RolloutError):  # it may be gone
            self._channel.send(name, Stop())


def _key(message: Generate | Group) -> Key:
    return message.version, message.held_out, message.group_id


def log_of(name: str) -> str:
    """Where the server of this name says what it does, in the run folder."""
    return f"logs/{name.partition(' ')[0]}.log"
