r"""Reward functions: (prompt, response, response_ids, sample) -> number, and how a name in the config becomes one.

    "math"  math-verify behind a stricter gate     "exact"  the same text     "module:function"  your own

A response is written by the policy that is rewarded for it, so whatever a checker lets pass will be found: `math` looks at one
final answer only, and compares plain numbers itself.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from types import ModuleType
from typing import Any

from pasync.errors import ConfigError, nearest

Reward = Callable[[str, str, list[int], dict[str, Any]], float]

TAIL_CHARACTERS = 2000
"""The final answer is looked for in so much of a response's end."""
LONGEST_ANSWER = 400
"""Longer answers are not parsed."""
MATH_VERIFY_S = 2
"""CPU time for one answer, ended by a signal (so main thread only). Not by math-verify's own limit, which is wall time: on a busy machine
a right answer would score 0. A signal costs 2 s where a kill costs rewards.timeout_s and a new process; what the signal cannot interrupt,
such as one huge power in C, the kill ends."""

_NUMBER = re.compile(r"([-+]?(?:\d{1,3}(?:,\d{3})+|\d*)(?:\.\d+)?)(?:/(\d+))?(%)?")
_FRACTION = re.compile(r"([-+]?)\\[dt]?frac(?:{(\d+)}{(\d+)}|(\d)(\d))")
_CANDIDATE = re.compile(
    r"\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]"  # a formula
    r"|([-+]?\\[dt]?frac{[^{}]*}{[^{}]*}|(?<![\w.)}])[-+]?\.?\d[\w.,/:%^-]*)",  # a bare number
    re.S,
)
_IDLE = re.compile(r"\\(?:left|right|displaystyle)(?![a-z])|\\[,!;: ]|\\?\$|(?<!\d)\s+|\s+(?!\d)|\.$")
_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*{([^{}]*)}")
_SEVERAL = re.compile(r"[,;<>]|\\{|\b(?:or|and)\b|\\(?:pm|mp|in|cup|vee|lor|wedge|land|leq?|geq?|neq?|approx|sim)(?![a-z])")
_TO_DO = re.compile(r"[\w)}]\s*[-+*!]|(?<!10)\^|\\(?:times|cdot)(?!\s*10\b)|\\(?:div|d?binom|sum|prod|int)(?![a-z])")
_EQUATION = re.compile(r"[^=<>!]*[A-Za-z][^=<>!]*=([^=]*)")
_UNIT = re.compile(r"[\d.,/]+([A-Za-z]+)")


def exact(prompt: str, response: str, response_ids: list[int], sample: dict[str, Any]) -> float:
    """1 if the response is the reference answer, character by character after stripping; else 0."""
    return float(response.strip() == str(sample["answer"]).strip())


def math_reward(prompt: str, response: str, response_ids: list[int], sample: dict[str, Any]) -> float:
    r"""1 if the final answer of the response has the value of the reference answer; else 0. Config name: `math`.

    The final answer is the last \boxed{} within the last 2,000 characters; without a box, the last number (or the last expression
    or line, for a reference that is not a single number). It must be one value, worked out: a list of guesses, a chain of
    equalities or `3+4` does not match a single number.

    Args:
        sample: its "answer" is a number or an expression, plain, in LaTeX, boxed, or behind a `####`.
    """
    gold = reference(str(sample["answer"]))
    answer = final_answer(response[-TAIL_CHARACTERS:], numeric=_number(gold) is not None)
    return float(_plain(answer) == _plain(gold) != "" or _same_value(answer, gold))


def vote(function: str, response: str, sample: dict[str, Any]) -> str:
    """What a response answers, spelled so that the same answers are the same text; "" if it answers nothing.

    Args:
        function: the reward's name; responses to another than `math` are compared as they are.
    """
    if function != "math":
        return response.strip()
    answer = final_answer(response[-TAIL_CHARACTERS:], numeric=_number(reference(str(sample["answer"]))) is not None)
    value = _number(answer)
    return _plain(answer) if value is None else str(value)


def reference(answer: str) -> str:
    r"""The value itself from a reference answer: what follows the last ####, without \boxed{} and $."""
    answer = answer.rsplit("####", 1)[-1].strip()
    return (last_boxed(answer) or answer).strip().strip("$").strip()


def final_answer(text: str, numeric: bool) -> str:
    """The one expression that a response ends with, "" if there is none.

    Args:
        numeric: the reference is a number, so without a box the last number of the text counts, else its last formula or line.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    found = [m for m in _CANDIDATE.finditer(text) if (re.search(r"\d", m[0]) if numeric else not m[4])]
    if found:
        return found[-1][found[-1].lastindex or 0].strip().rstrip(".,:-^")
    return "" if numeric else (text.strip().splitlines() or [""])[-1]


def last_boxed(text: str) -> str | None:
    r"""Content of the last \boxed{}: None without any box, "" if its braces never close."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed")
    for i in range(begin, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[begin + 1:i]
    return ""


def resolve(name: str) -> Reward:
    """Find the reward function that a config names.

    Imports of `module:function` see the working directory first.

    Args:
        name: `math`, `exact` or `module:function`.

    Raises:
        ConfigError: there is no such module or function, or importing it fails.
    """
    known: dict[str, Reward] = {"math": math_reward, "exact": exact}
    if name in known:
        return known[name]
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ConfigError(f"rewards.function={name}: must be math, exact or module:function{nearest(name, known)}")
    module = _import(name, module_name, os.getcwd())
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value)]
        raise ConfigError(f"rewards.function={name}: {module_name} has no function {function_name}{nearest(function_name, functions)}")
    return function


def _import(name: str, module_name: str, folder: str) -> ModuleType:
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module raises, it is the config that names it
        missing = isinstance(error, ModuleNotFoundError) and error.name == module_name.split(".")[0]
        hint = nearest(module_name, (m.name for m in pkgutil.iter_modules([folder]))) if missing else ""
        raise ConfigError(f"rewards.function={name}: cannot import {module_name}: {type(error).__name__}: {error}{hint}") from error


def _same_value(answer: str, gold: str) -> bool:
    """Plain numbers are compared here; the rest goes to math-verify unless it could only be right by hedging."""
    if "=" in answer and "=" not in gold:
        equation = _EQUATION.fullmatch(answer)
        answer = equation[1].strip() if equation else ""
    mine, true = _number(answer), _number(gold)
    if mine is not None and true is not None:
        return abs(mine - true) <= min(Fraction(1), abs(true)) / 1_000_000
    hedged = _SEVERAL.search(answer) and not _SEVERAL.search(gold)
    unsolved = true is not None and _TO_DO.search(answer)
    if not answer or len(answer) > LONGEST_ANSWER or hedged or unsolved or _other_unit(answer, gold):
        return False
    return _verify(answer, gold)


def _verify(answer: str, gold: str) -> bool:
    """What math-verify thinks of two expressions; an answer it cannot read or finish is wrong."""
    from math_verify import LatexExtractionConfig, parse, verify  # imports sympy: only where answers are scored

    with suppress(_OutOfTime), _cpu_limit(MATH_VERIFY_S):
        mine, true = (
            parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
            for text in (answer, gold)
        )
        return bool(mine and true and verify(true, mine, timeout_seconds=None))
    return False


class _OutOfTime(BaseException):
    """No Exception: math-verify catches those of one comparison and goes on with the next."""


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Raise `_OutOfTime` inside the block once it has taken so much CPU time, and again if that was lost, as in a destructor."""

    def expire(*_: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGPROF, expire)
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.5)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    finally:  # also if the signal came just before the line above, or it would strike the worker later
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _plain(text: str) -> str:
    """The same answer without markup that never changes its value; a space between digits may."""
    return _IDLE.sub("", _WRAPPED.sub(r"\1", text.strip().replace("{,}", ",").replace("\u2212", "-")))


def _number(text: str) -> Fraction | None:
    """Value of a plain integer, decimal, fraction or percentage, None for anything else; exponents are not read."""
    if len(text) > LONGEST_ANSWER:
        return None
    text = _plain(text).replace("\\%", "%")
    fraction = _FRACTION.fullmatch(text)
    if fraction:
        text = f"{fraction[1]}{fraction[2] or fraction[4]}/{fraction[3] or fraction[5]}"
    number = _NUMBER.fullmatch(text)
    if not number or not re.search(r"\d", number[1]) or (number[2] and not int(number[2])):
        return None
    return Fraction(number[1].replace(",", "")) / int(number[2] or 1) / (100 if number[3] else 1)


def _other_unit(answer: str, gold: str) -> bool:
    """Both name a unit, and not the same: math-verify would drop it."""
    mine, true = _UNIT.fullmatch(_plain(answer)), _UNIT.fullmatch(_plain(gold))
    return bool(mine and true and mine[1] != true[1])
