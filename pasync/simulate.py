"""One iteration as a discrete-event model, decided by the same functions as a real one (`rollout.admission`). No torch, no clock.

    groups --order, choose--> servers: decode steps --Credit--> arrivals --share--> replicas --optimizer--> Iteration

Between two events every response of a server advances by the same number of decode steps. What is left out: rewards, messages and
preemption take no time, and a micro-batch ends when its last stage has it.

Letters: B groups, K responses of a group, P prompt and R response tokens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import attrgetter

from pasync.config import Config
from pasync.rollout.admission import Credit, Load, choose, order, share


@dataclass(frozen=True)
class GroupWork:
    """What one group costs."""

    prompt: int
    """P."""
    lengths: tuple[int, ...]
    """R of each response, at least 1."""
    expected: float
    """What the trainer expects its longest response to have (`Lengths.expect`)."""

    @property
    def num_tokens(self) -> int:
        """Prompt once plus all responses."""
        return self.prompt + sum(self.lengths)


@dataclass(frozen=True)
class Rates:
    """Seconds of one server and of one replica."""

    step_s: float
    """A decode step, whatever it samples."""
    sequence_s: float
    """The same, for each response in it."""
    context_s: float
    """The same, for each token that these attend to."""
    prompt_s: float
    """A prompt token, once for all responses of its group (prefix cache)."""
    micro_batch_s: float
    """Forward and backward, whatever is in it."""
    token_s: float
    """The same, for each row."""
    pair_s: float
    """The same, for each pair of tokens of which one attends to the other."""
    optimizer_s: float
    """Gradients over the replicas, and the step."""
    sync_s: float
    """s."""
    cache_tokens: float = math.inf
    """KV cache of a server."""


@dataclass(frozen=True)
class Iteration:
    """Where its time goes; names as in `observe.metrics`."""

    step_s: float
    generate_s: float
    train_s: float
    sync_s: float
    first_wait_s: float
    tail_s: float
    server_idle_frac: float
    rank_idle_frac: float
    tokens: int
    """Prompt tokens counted once per response, and response tokens."""

    @property
    def of_ideal_frac(self) -> float:
        return (max(self.generate_s, self.train_s) + self.sync_s) / self.step_s

    def tpspd(self, devices: int) -> float:
        return self.tokens / (self.step_s * devices)


@dataclass(frozen=True)
class Generated:
    """What the servers do in an iteration, from the submission on."""

    arrivals: list[tuple[float, int]]
    """(seconds, group) of each group, ascending."""
    busy_s: float
    """Time in which a server samples, added up."""


@dataclass(frozen=True)
class Trained:
    """What the ranks do in an iteration."""

    end_s: float
    """All gradients are there."""
    busy_s: list[float]
    """Of each replica."""


class _Server:
    """Samples `slots` responses at once, fewer if they fill its cache (each with half of its length), first come first served."""

    def __init__(self, rates: Rates, slots: int) -> None:
        self.free, self.credit, self.expected = slots, Credit(), dict[int, float]()
        """As the trainer knows: free slots, and what it expects of each group that is here."""
        self.busy_s = 0.0
        self.next_end = math.inf
        """When the next response ends, if nothing is added."""
        self._rates, self._slots, self._room = rates, slots, rates.cache_tokens
        self._waiting: deque[tuple[int, int, float, float]] = deque()  # (group, R, tokens it holds, seconds for its prompt)
        self._running: list[tuple[float, int, float]] = []  # (step after which it ends, group, tokens it holds)
        self._at = self._steps = self._prompts_s = 0.0
        self._step_s = rates.step_s

    @property
    def load(self) -> Load:
        return Load(self._slots, self.free, len(self.expected), sum(self.expected.values()))

    def give(self, number: int, group: GroupWork, now: float) -> None:
        """Take a group on."""
        self._advance(now)
        self.free -= len(group.lengths)
        self.expected[number] = group.expected
        for k, length in enumerate(group.lengths):
            prompt_s = 0.0 if k else group.prompt * self._rates.prompt_s
            self._waiting.append((number, length, group.prompt + length / 2, prompt_s))
        self._start()

    def end_response(self) -> int:
        """Go to `next_end`; returns the group of the response that ends there."""
        self._advance(self.next_end)
        self._steps, number, tokens = heappop(self._running)
        self._hold(-tokens)
        self._start()
        return number

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._slots and (not self._running or self._waiting[0][2] <= self._room):
            number, length, tokens, prompt_s = self._waiting.popleft()
            heappush(self._running, (self._steps + length, number, tokens))
            self._hold(tokens)
            self._prompts_s += prompt_s
        left = self._running[0][0] - self._steps if self._running else math.inf
        self.next_end = self._at + self._prompts_s + left * self._step_s

    def _hold(self, tokens: float) -> None:
        """Of one response more, or less where negative."""
        self._room -= tokens
        self._step_s += math.copysign(self._rates.sequence_s, tokens) + self._rates.context_s * tokens

    def _advance(self, now: float) -> None:
        elapsed, self._at = now - self._at, now
        if self._running:
            self.busy_s += elapsed
            prompts_s = min(self._prompts_s, elapsed)
            self._prompts_s -= prompts_s
            self._steps += (elapsed - prompts_s) / self._step_s


def generate(config: Config, groups: Sequence[GroupWork], rates: Rates) -> Generated:
    """Sample every response once, from submission at 0 on, as `Fleet` and `RolloutServer` would."""
    admission = config.rollout.admission
    servers = [_Server(rates, config.rollout.max_num_seqs) for _ in range(config.rollout.servers)]
    pending = deque(order(admission, [group.expected for group in groups]))
    left = [len(group.lengths) for group in groups]
    arrivals: list[tuple[float, int]] = []
    now, freed = 0.0, 1
    while len(arrivals) < len(groups):
        while pending and freed:
            size = len(groups[pending[0]].lengths)
            chosen = choose(admission, [server.load for server in servers], size, len(pending))
            if chosen is None:
                break
            servers[chosen].give(pending[0], groups[pending.popleft()], now)
        server = min(servers, key=attrgetter("next_end"))
        now = server.next_end
        number = server.end_response()
        left[number] -= 1
        freed = server.credit.free(len(groups[number].lengths))
        if not left[number]:
            freed += server.credit.take()
            del server.expected[number]
            arrivals.append((now, number))
        server.free += freed
    return Generated(arrivals, sum(server.busy_s for server in servers))


def train(config: Config, groups: Sequence[GroupWork], arrivals: Sequence[tuple[float, int]], rates: Rates) -> Trained:
    """Forward and backward of every group once, as `stream_micro_batches` deals them out: rank 0 takes what is ready."""
    waiting, budget, replicas = deque(arrivals), config.parallel.micro_batch_tokens, config.replicas
    held: list[GroupWork] = []
    given, busy_s, free_s = [0] * replicas, [0.0] * replicas, [0.0] * replicas
    now = row_s = 0.0
    while waiting or held:
        if not held:
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now and sum(group.num_tokens for group in held) < replicas * budget:
            held.append(groups[waiting.popleft()[1]])
        shares, held = share(held, given, budget, lambda group: group.num_tokens)
        for replica, part in enumerate(shares):
            given[replica] += sum(group.num_tokens for group in part)
            part_s, count = training_time(config, part, rates)
            busy_s[replica] += part_s
            free_s[replica] = max(free_s[replica], now) + part_s
            row_s = part_s / count if count else row_s
        now = free_s[0]
    return Trained(max(free_s) + (config.parallel.pipeline - 1) * row_s, busy_s)


def training_time(config: Config, groups: Sequence[GroupWork], rates: Rates) -> tuple[float, int]:
    """(seconds of one replica, micro-batches) of groups that it is given together; a group too large for one is cut, as `rows` does."""
    budget, rows, pairs = config.parallel.micro_batch_tokens, 0, 0.0
    for group in groups:
        prompts = len(group.lengths)
        if config.model.shared_prompt:
            prompts = math.ceil(sum(group.lengths) / max(1, budget - group.prompt)) if group.num_tokens > budget else 1
        rows += prompts * group.prompt + sum(group.lengths)
        pairs += prompts * group.prompt**2 / 2 + sum(group.prompt * n + n * n / 2 for n in group.lengths)
    count = math.ceil(rows / budget)
    return count * rates.micro_batch_s + rows * rates.token_s + pairs * rates.pair_s, count


def simulate(config: Config, groups: Sequence[GroupWork], rates: Rates) -> Iteration:
    """One iteration of `config.schedule`, in the middle of a run."""
    return iteration(config, groups, rates, generate(config, groups, rates))


def iteration(config: Config, groups: Sequence[GroupWork], rates: Rates, generated: Generated) -> Iteration:
    """The same from what the servers do, which no schedule changes.

    sync:          s, all arrivals, then training
    periodic:      s, training as groups arrive
    one_step_off:  s, then generation of the next batch beside training on this one, which is there
    The M - 1 further updates of a batch (`updates_per_batch`) come after all of it.
    """
    generate_s = generated.arrivals[-1][0]
    there = {"sync": generate_s, "one_step_off": 0.0}.get(config.schedule)
    trained = train(config, groups, [(at if there is None else there, i) for at, i in generated.arrivals], rates)
    again, updates = config.algorithm.updates_per_batch - 1, config.algorithm.updates_per_batch
    busy_s = [updates * (seconds + rates.optimizer_s) for seconds in trained.busy_s]
    end_s = trained.end_s + again * max(trained.busy_s) + updates * rates.optimizer_s
    step_s = rates.sync_s + max(end_s, generate_s)
    return Iteration(
        step_s=step_s,
        generate_s=generate_s,
        train_s=max(busy_s),
        sync_s=rates.sync_s,
        first_wait_s=generated.arrivals[0][0],
        tail_s=max(0.0, end_s - generate_s),
        server_idle_frac=1 - generated.busy_s / (config.rollout.servers * step_s),
        rank_idle_frac=1 - sum(busy_s) / (config.replicas * step_s),
        tokens=sum(len(group.lengths) * group.prompt + sum(group.lengths) for group in groups),
    )
