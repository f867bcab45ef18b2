"""Held-out sets, scored with the weights of one version by servers that have nothing to sample for training (rank 0 only).

    submit batch t, start(t) --> ranks train .. last groups, optimizer step --> finish(): wait, cancel the rest --> scores
                 servers:        batch t .. | held-out prompts of version t ........ |

A set is scored as a whole or not at all: what is finished early is what is short, so the scores of a part would be those of easy problems.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean
from typing import Protocol

from pasync.algorithm.scores import Answered, scores
from pasync.batch import require_reward
from pasync.config import Config
from pasync.data.prompts import Prompt
from pasync.errors import RolloutError
from pasync.messages import Group, Sampling
from pasync.observe.console import progress
from pasync.observe.metrics import busy_s
from pasync.preemption import preemption
from pasync.rewards.functions import vote


class HeldOutSource(Protocol):
    """Where held-out groups come from: `RolloutProducer`."""

    evaluating: bool

    @property
    def deserted(self) -> bool: ...

    def evaluate(self, held_out: dict[str, list[Prompt]], version: int, samplings: dict[str, Sampling]) -> None: ...
    def next_evaluated(self, wait_s: float) -> Group | None: ...
    def end_evaluation(self) -> None: ...


class Evaluation:
    """Evaluates one version at a time.

    Args:
        held_out: prompts of each set.
    """

    def __init__(self, config: Config, source: HeldOutSource, held_out: dict[str, list[Prompt]]) -> None:
        self.config, self._source, self._held_out = config, source, held_out
        tokens, sets = config.eval.max_tokens or config.rollout.max_tokens, config.data.eval or {}
        self._samplings = {name: Sampling(s.responses, config.eval.temperature, tokens) for name, s in sets.items()}
        self.groups: dict[str, list[Group]] = {}
        """Finished groups of each set, of the evaluation begun last."""
        self.version = -1

    @property
    def total(self) -> int:
        """Problems of all sets."""
        return sum(map(len, self._held_out.values()))

    @property
    def running(self) -> bool:
        """Whether it was started and has not been finished."""
        return self._source.evaluating

    def start(self, version: int) -> None:
        """Hand over all prompts; returns at once."""
        self.version, self.groups = version, {name: [] for name in self._held_out}
        self._source.evaluate(self._held_out, version, self._samplings)

    def wait(
        self, limit_s: float | None, revive: Callable[[], None] | None = None, heard: Callable[[], None] | None = None
    ) -> None:
        """Until all is finished, or `limit_s` are over, or all servers are lost and nobody revives them.

        Args:
            revive: gives the same weights to servers that come back.
            heard: called with every group that comes.

        Raises:
            RolloutError: nothing is finished for `rollout.deadline_s`, or a group is of another version.
            RewardError: the reward failed, with `rewards.on_error=raise`.
            Preempted: SIGTERM; `finish` may be called then.
        """
        deadline_s = self.config.rollout.deadline_s
        end = time.monotonic() + limit_s if limit_s is not None else float("inf")
        while self.running and (left := end - time.monotonic()) > 0:
            with preemption.ends_wait():
                group = self._source.next_evaluated(min(left, deadline_s))
            if group:
                self._take(group)
                if heard:
                    heard()
            elif self.running and self._source.deserted:
                if revive is None:
                    return
                revive()
            elif self.running and left > deadline_s:
                raise RolloutError(f"no held-out group finished within rollout.deadline_s={deadline_s}, {self._missing} missing")

    def finish(self, waited_since: float) -> dict[str, float]:
        """Cancel what is left, and score the sets that are complete.

        Args:
            waited_since: unix time from which on training has waited.

        Returns:
            Metrics `eval/..` and `time/eval_..`.
        """
        self._source.end_evaluation()
        limit = 2 * self.config.sync.deadline_s  # after one the producer gives up a server that does not cancel
        end = time.monotonic() + limit
        while self.running:
            if group := self._source.next_evaluated(self.config.sync.deadline_s):
                self._take(group)
            elif self.running and time.monotonic() > end:
                raise RolloutError(f"the evaluation did not end within {limit} s")
        delay_s, groups = time.time() - waited_since, [group for each in self.groups.values() for group in each]
        complete = {name: each for name, each in self.groups.items() if len(each) == len(self._held_out[name])}
        by_set = {name: scores([self._answered(name, group) for group in each]) for name, each in complete.items()}
        values = {f"eval/{name}/{key}": value for name, of_set in by_set.items() for key, value in of_set.items()}
        if len(complete) == len(self._held_out):
            values["eval/accuracy_frac"] = fmean(next(iter(of_set.values())) for of_set in by_set.values())
        return values | {
            "eval/problems": sum(map(len, complete.values())),
            "eval/unfinished": self._missing,
            "time/eval_s": max(g.finished for g in groups) - min(g.started for g in groups) if groups else 0.0,
            "time/eval_bubble_s": busy_s(groups, self.config.rollout.servers, waited_since) / self.config.rollout.servers,
            "time/eval_delay_s": delay_s,
        }

    @property
    def _missing(self) -> int:
        return self.total - sum(map(len, self.groups.values()))

    def _take(self, group: Group) -> None:
        if group.version != self.version:
            raise RolloutError(f"held-out group {group.group_id} was sampled by version {group.version}, evaluated is {self.version}")
        if self.config.rewards.on_error == "raise":
            require_reward(group)
        self.groups[group.held_out].append(group)
        progress("evaluating", self.total - self._missing, self.total)

    def _answered(self, name: str, group: Group) -> Answered:
        sample, function = self._held_out[name][group.group_id].sample, self.config.rewards.function
        votes = [vote(function, r.text, sample) if r.ended else "" for r in group.responses]
        return Answered(group.rewards, votes)
