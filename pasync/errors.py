"""Named failures. What a user wrote wrong is a `ConfigError`; what the system met is one of the others.

All take one string, so they travel between processes as (name, message) and are raised again
under the same name on every rank.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PasyncError(RuntimeError):
    """A failure of the running system, with its root cause in the message."""


class ConfigError(ValueError):
    """One or more values the user gave cannot work; the message lists all of them."""


class RolloutError(PasyncError):
    """Generation did not deliver what was asked: a server is missing, late, or answered wrongly."""


class WeightSyncError(PasyncError):
    """A server does not hold the weights of the version it should."""


class RewardError(PasyncError):
    """The reward function failed and `rewards.on_error` does not let it pass."""


class ProcessDied(PasyncError):
    """A process of the run ended although it should be running."""


class RankLost(PasyncError):
    """A training rank waited for another one in vain."""


class TrainingError(PasyncError):
    """A gradient or loss is not a finite number."""


class CheckpointError(PasyncError):
    """A checkpoint cannot be written, or none that is there can be continued."""


class Preempted(Exception):
    """No failure: the run was asked to end, and can be continued."""


_BY_NAME: dict[str, type[PasyncError | Preempted]] = {
    e.__name__: e
    for e in (PasyncError, RolloutError, WeightSyncError, RewardError, ProcessDied, RankLost, TrainingError, CheckpointError, Preempted)
}


def error_named(name: str, message: str) -> PasyncError | Preempted:
    """Rebuild an error that crossed a process boundary; foreign types keep their name in the message."""
    known = _BY_NAME.get(name)
    return known(message) if known else PasyncError(f"{name}: {message}")


def nearest(word: object, allowed: Iterable[str]) -> str:
    """Sentence that suggests the valid name closest to a wrong one; "" if none is close."""
    near = difflib.get_close_matches(str(word), list(allowed), n=1)
    return f". Did you mean {near[0]}?" if near else ""
