"""The trainer's side of generation: a thread that keeps the servers busy and collects finished groups.

    main thread                      producer thread                          servers
      submit(batch)  --commands-->   pending --credit--> Generate  ------->   sample, score
      next_group()   <--queue-----   check, drop late ones         <-------   GroupDone

The whole batch is submitted at once and `submit` returns at once; groups come back in the order in which they finish. Servers
pull: what one gets when depends on its free slots (see admission.py). They may come and go (see fleet.py); what nobody can go on
after is raised by every later call, with its cause.

    muster: who is there  -->  weights of version t to them, checked  -->  admit(t): these get groups of version t
    evaluate(held-out sets)  -->  sampled by servers that have nothing else  -->  next_evaluated
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import msgspec

from pasync.config import Config
from pasync.data.prompts import Prompt
from pasync.errors import PasyncError, RolloutError
from pasync.messages import Generate, Group, Hello, Message, Sampling, ToTrainer, Unsynced, int_bytes
from pasync.observe.console import progress, status
from pasync.rollout.admission import Lengths
from pasync.rollout.fleet import ENDED, WAKE, Fleet, Task, log_of
from pasync.transport.channel import Keys, ServerChannel

SHOW_EVERY_S = 1.0
log = logging.getLogger(__name__)


class RolloutProducer:
    """Context manager on rank 0; its methods belong to the main thread.

    Args:
        address: to bind the servers' socket to.
        keys: of that socket; needed beyond loopback.
    """

    def __init__(self, config: Config, address: str, keys: Keys | None = None) -> None:
        self.config = config
        self.names: list[str] = []
        """Servers that take part in the sync, since the last `muster`."""
        self._admitted: list[str] = []  # those of the sync before, until it has succeeded
        self.in_flight = 0
        """Groups submitted and not yet taken."""
        self.taken: list[tuple[Group, float]] = []
        """Groups taken since the last submit, in the order taken, with the unix times at which they arrived."""
        self.evaluating = False
        """Whether an evaluation has begun and `next_evaluated` has not come to its end."""
        self._channel = ServerChannel(address, keys)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._groups: queue.SimpleQueue[tuple[Group, float]] = queue.SimpleQueue()
        self._evaluated: queue.SimpleQueue[tuple[Group, float]] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[tuple[str, ToTrainer]] = queue.SimpleQueue()
        self.lengths = Lengths()
        self._prompts: list[Prompt] = []  # of the batch submitted last, by group id
        self._sampling, self._version = Sampling(1, 1.0, 1), -1
        self._failed, self._failure = threading.Event(), PasyncError("not failed")
        # its methods: the producer thread only
        self._fleet = Fleet(config, self._channel, self._groups, self._evaluated, self._replies)
        self._stopping, self._shown = False, 0.0
        self._thread = threading.Thread(target=self._run, name="producer", daemon=True)

    def __enter__(self) -> RolloutProducer:
        self._thread.start()
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
        tasks = [self._task(i, p, self._version, self._sampling) for i, p in enumerate(prompts, len(self._prompts))]
        self._prompts += prompts
        self.in_flight += len(tasks)
        self._command(lambda: self._fleet.enqueue(tasks))

    def next_group(self, version: int, *, wait: bool = True) -> Group | None:
        """The next finished group, in completion order; None if the servers are all lost (`stranded`).

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

    def evaluate(self, held_out: dict[str, list[Prompt]], version: int, samplings: dict[str, Sampling]) -> None:
        """Hand over held-out sets; group i of a set belongs to its prompt i. Returns at once. No group of a batch waits for them."""
        assert not self.evaluating
        self.evaluating = True
        sets = [(name, i, p) for name, prompts in held_out.items() for i, p in enumerate(prompts)]
        tasks = [self._task(i, p, version, samplings[name], name) for name, i, p in sets]
        self._command(lambda: self._fleet.evaluate(tasks))

    def next_evaluated(self, wait_s: float) -> Group | None:
        """The next held-out group. None at the end (not `evaluating` then), if none comes within `wait_s`, or if all servers are lost."""
        item = self._next(self._evaluated, wait_s, until=lambda: self.deserted)
        if item is ENDED:
            self.evaluating = False
        return None if item is None or item is ENDED else item[0]

    def end_evaluation(self) -> None:
        """Cancel what is left of it. Returns at once; the end comes when no server works on it."""
        self._command(self._fleet.end_evaluation)

    @property
    def deserted(self) -> bool:
        """Whether all servers are lost that were admitted last."""
        return not set(self._admitted) & set(self._fleet.present)

    @property
    def stranded(self) -> bool:
        """Whether groups are in flight of which none can be finished before a server gets the weights again."""
        return self.in_flight > 0 and self.deserted

    @property
    def requeued(self) -> int:
        """Groups taken back from lost servers so far."""
        return self._fleet.requeued

    @property
    def dropped_frames(self) -> int:
        """Frames dropped so far, here and by the servers."""
        return self._channel.reader.dropped + self._fleet.dropped_by_servers

    def require_idle(self) -> None:
        """Raise RolloutError if a server may be sampling a group: weights must not change under it."""
        if (self.in_flight or self.evaluating) and not self.deserted:
            held_out = ", and held-out ones" * self.evaluating
            raise RolloutError(f"{self.in_flight} groups are still in flight{held_out}, weights cannot change now")

    def muster(self) -> bool:
        """Take the servers that are there as those of the next sync; a new one gets no group before `admit`.

        Waits for one, at most `rollout.deadline_s`.

        Returns:
            Whether they are others than those of the last call.

        Raises:
            RolloutError: there is none.
        """
        limit = self.config.rollout.deadline_s
        end = time.monotonic() + limit
        while not (present := list(self._fleet.present)):
            if self._next(self._replies, end - time.monotonic()) is None:
                raise RolloutError(f"no server is left and none came back within rollout.deadline_s={limit}: logs/server-*.log")
        changed, self.names = present != self.names, present
        return changed

    def admit(self, version: int) -> None:
        """The mustered servers hold this version, and so may sample it."""
        names = self._admitted = self.names
        self._command(lambda: self._fleet.admit(names, version))

    def lost_any(self) -> bool:
        """Whether a server is gone since it was mustered."""
        return not set(self.names) <= set(self._fleet.present)

    def tell(self, server: str, message: Message) -> None:
        """Send a message to one server."""
        self._command(lambda: (self._fleet.send(server, message), None)[1])

    def replies(self, kind: type[Any], *, deadline_s: float) -> dict[str, Any]:
        """One answer of the given type from every mustered server; one that gives none in time is given up.

        Raises:
            RolloutError: a server is lost or answered something else; only after all others have answered.
        """
        answers: dict[str, Any] = {}
        wrong: dict[str, str] = {}
        end = time.monotonic() + deadline_s
        while missing := [n for n in self.names if n not in answers and n not in wrong]:
            server, message = self._next(self._replies, end - time.monotonic()) or ("", None)
            if not server:
                self._command(partial(self._give_up, missing, kind.__name__, deadline_s))
                end += deadline_s  # for the word that they are lost
            elif isinstance(message, kind):
                answers[server] = message
            elif server in self.names and not isinstance(message, Hello):
                other = f"{server} answered {type(message).__name__} where {kind.__name__} was due"
                wrong[server] = message.message if isinstance(message, Unsynced) else other
        if wrong:
            raise RolloutError("; ".join(wrong.values()))
        return answers

    def failure(self, *, wait_s: float) -> Exception | None:
        """The failure of a server, if there is one or one is noticed within `wait_s`."""
        return self._failure if self._failed.wait(wait_s) else None

    def _task(self, group_id: int, prompt: Prompt, version: int, sampling: Sampling, held_out: str = "") -> Task:
        if prompt.max_tokens:
            sampling = msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, prompt.max_tokens))
        message = Generate(version, group_id, int_bytes(prompt.ids), prompt.text, prompt.sample, sampling, held_out)
        return Task(message, self.lengths.expect(prompt, sampling.max_tokens))

    def _await_servers(self) -> None:
        limit, count = self.config.rollout.start_s, self.config.rollout.servers
        end, missing = time.monotonic() + limit, set(range(count))
        while missing:
            progress("servers ready", count - len(missing), count)
            item = self._next(self._replies, end - time.monotonic())
            if item is None:
                late = [f"server-{i}" for i in sorted(missing)]
                raise RolloutError(f"{', '.join(late)} not ready within rollout.start_s={limit}: {', '.join(map(log_of, late))}")
            if isinstance(item[1], Hello):
                missing.discard(item[1].server)
        progress("servers ready", count, count)

    def _await_group(self) -> tuple[Group, float] | None:
        limit = self.config.rollout.deadline_s
        item = self._next(self._groups, limit, until=lambda: self.stranded)
        if item is None and not self.stranded:
            waits = f"no group finished within rollout.deadline_s={limit}, {self.in_flight} missing"
            raise RolloutError(f"{waits}; {self._fleet.outstanding()}")
        return item  # type: ignore[no-any-return]

    def _next(self, source: queue.SimpleQueue[Any], timeout_s: float, until: Callable[[], bool] = lambda: False) -> Any:
        """Next item, or None after the timeout or once `until` holds; raises the producer thread's failure, which also ends the wait."""
        end = time.monotonic() + timeout_s
        while True:
            if self._failed.is_set():
                raise self._failure
            left = 0.0 if until() else end - time.monotonic()
            try:
                item = source.get(timeout=left) if left > 0 else source.get_nowait()
            except queue.Empty:
                return None
            if item is not WAKE:
                return item

    def _command(self, act: Callable[[], None]) -> None:
        self._commands.put(act)
        self._channel.wake()

    # Below: the producer thread.

    def _run(self) -> None:
        try:
            while True:
                for server, message in self._channel.receive(self.config.rollout.heartbeat_s):
                    self._fleet.handle(server, message)
                while not self._commands.empty():
                    self._commands.get()()
                if self._stopping:
                    return  # servers leave as soon as they are told: one that is gone now is not lost
                self._fleet.dispatch()
                self._fleet.check()
                self._show()
        except Exception as error:
            self._failure = error if isinstance(error, PasyncError) else RolloutError(f"{type(error).__name__}: {error}")
            log.exception("the producer thread failed")
            self._failed.set()
            for waited_on in (self._groups, self._evaluated, self._replies):
                waited_on.put(WAKE)

    def _show(self) -> None:
        """Tell who watches what goes on, about once a second."""
        if time.monotonic() - self._shown >= SHOW_EVERY_S:
            self._shown = time.monotonic()
            status(ready=self._groups.qsize(), waiting=self._fleet.waiting, servers=self._fleet.busy)

    def _give_up(self, names: list[str], due: str, deadline_s: float) -> None:
        for name in names:
            self._fleet.lose(name, RolloutError(f"no {due} from {name} within sync.deadline_s={deadline_s}: {log_of(name)}"))

    def _stop(self) -> None:
        self._stopping = True
        self._fleet.stop()
