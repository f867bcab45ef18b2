"""What the scan finds: our code's uses of libraries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """Arguments of a call."""

    positional: int
    keywords: frozenset[str]
    texts: frozenset[tuple[str, str]] = frozenset()
    """Keyword arguments that are constant strings."""


@dataclass(frozen=True)
class Use:
    """One place where our code relies on a library."""

    key: str
    where: str
    call: Call | None = None
    replaced_by: tuple[str, ...] | None = None
    """Parameters of our function that is put in this place."""
    problem: str = ""
