"""What an expression of our code may stand for, as far as libraries are concerned.

A value of a library is known by the dotted name of its class or function; instances, lists, iterators and awaitables of a class all go by
the name of the class.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

MOST_NESTED = 3
"""Tuples in tuples that are told apart; without a limit a tuple that is put into itself would grow for ever."""


@dataclass(frozen=True)
class Foreign:
    """Something of a library."""

    key: str


@dataclass(frozen=True)
class Own:
    """A module, class (or an instance of it) or function of ours."""

    name: str


@dataclass(frozen=True)
class Several:
    """A tuple."""

    parts: tuple[frozenset[Any], ...]


@dataclass(frozen=True)
class Keys:
    """A dict: keys and, where constant, their strings; `open` if there are others."""

    known: frozenset[tuple[str, str | None]]
    open: bool = False


Values = frozenset[Any]
NOTHING: Values = frozenset()


def merged(values: Values) -> Values:
    """The same with at most one dict."""
    dicts = [v for v in values if isinstance(v, Keys)]
    if len(dicts) < 2:
        return values
    whole = Keys(frozenset(chain.from_iterable(d.known for d in dicts)), any(d.open for d in dicts))
    return frozenset(v for v in values if not isinstance(v, Keys)) | {whole}


def part(values: Values, index: int, width: int) -> Values:
    """What one of `width` names gets that a value is unpacked into."""
    found: Values = NOTHING
    for value in values:
        if not isinstance(value, Several):
            found |= frozenset({value}) if not isinstance(value, Keys) else NOTHING
        elif len(value.parts) == width:
            found |= value.parts[index]
        else:
            found |= frozenset(chain.from_iterable(value.parts))
    return found


def several(parts: Iterable[Values], depth: int = MOST_NESTED) -> Several:
    """A tuple of these parts."""
    def cut(values: Values) -> Values:
        inner = [several(v.parts, depth - 1) if depth else None for v in values if isinstance(v, Several)]
        return frozenset(v for v in values if not isinstance(v, Several)) | frozenset(filter(None, inner))

    return Several(tuple(map(cut, parts)))
