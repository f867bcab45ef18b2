"""Rewards in processes of their own: an answer can hang, crash or fill one of them, and only scores 0.

    server's event loop --score()--> queue --> worker: limits set, function loaded, waits
                        <--(reward, error)--/   killed and replaced when a call exceeds rewards.timeout_s

Workers are spawned, never forked: the server's process has threads, and holds devices.
"""

from __future__ import annotations

import asyncio
import logging
import math
import multiprocessing
import os
import resource
import signal
import threading
import traceback
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import psutil
from pebble import ProcessExpired, ProcessPool

from pasync.errors import ConfigError
from pasync.messages import KILLED
from pasync.processes import die_with_parent
from pasync.rewards.functions import Reward, math_reward, resolve
from pasync.sections import RewardConfig

START_S = 120.0
"""Longest wait for a first worker that has loaded the reward function."""
LATE = f"no worker had loaded it after {START_S} s, the server's log may say why"
ENDED = "loading it ends its process"
CLOSE_S = 10.0
"""Longest wait for the workers to end."""
ERROR_CHARACTERS = 200
MEMORY_EXIT = 99
"""Exit code of a worker that reached its memory limit."""
TIMEOUT, CRASH, OUT_OF_MEMORY = KILLED

log = logging.getLogger(__name__)


class RewardPool:
    """Score responses with the configured function, whatever they contain.

    Use as a context manager, entered in a thread that outlives it (workers die with the thread that started them).

    Args:
        rewards: function, number of workers and their limits.

    Raises (on entering):
        ConfigError: the function cannot be loaded.
    """

    def __init__(self, rewards: RewardConfig) -> None:
        self.rewards = rewards
        self._pool: ProcessPool | None = None

    def __enter__(self) -> RewardPool:
        pool = self._start()
        problem = self._problem(pool)
        if problem == ENDED:  # somebody else may have killed it
            self._close(pool)
            pool = self._start()
            problem = self._problem(pool)
        if problem:
            self._close(pool)
            raise ConfigError(f"rewards.function={self.rewards.function}: {problem}" if problem in (ENDED, LATE) else problem)
        self._pool = pool
        return self

    def __exit__(self, *_: object) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            self._close(pool)

    async def score(self, prompt: str, response: str, response_ids: list[int], sample: dict[str, Any]) -> tuple[float, str]:
        """Reward of one response, and "" or why there is none.

        Never raises for what a response contains. The time limit counts from when a worker begins.

        Returns:
            (reward, ""), or (0.0, reason): "timeout" (killed), "crash" (its process died), "out of memory" (ended by itself), all three
            with a new worker in its place, "not a number" (None, NaN, infinite or of another type), or "ExceptionName: message", at
            most 200 characters.
        """
        for _ in range(2):  # pebble gives up all calls, innocent ones too, if a worker dies before its call is known to have begun
            pool = self._pool
            assert pool is not None, "score() is called outside of the with block"
            try:
                future = pool.schedule(_score, args=(prompt, response, response_ids, sample), timeout=self.rewards.timeout_s)
                return await asyncio.shield(asyncio.wrap_future(future))  # who gives up waiting must not cost a worker: pebble kills it
            except FutureTimeout:
                return 0.0, TIMEOUT
            except ProcessExpired as error:
                return 0.0, OUT_OF_MEMORY if error.exitcode == MEMORY_EXIT else CRASH
            except RuntimeError:  # BrokenProcessPool for a call under way, its base for a new one
                await self._replace(pool)
        return 0.0, CRASH

    @staticmethod
    def _problem(pool: ProcessPool) -> str:
        """Why the function cannot be used; "" if it can."""
        try:
            return str(pool.schedule(_load_problem).result(START_S))
        except FutureTimeout:
            return LATE
        except (BrokenProcessPool, ProcessExpired):
            return ENDED

    async def _replace(self, broken: ProcessPool) -> None:
        """Go on with new workers; of many calls that find the pool broken, the first replaces it."""
        if self._pool is not broken:
            return
        log.warning("the reward processes ended unexpectedly and are started again")
        self._pool = self._start()
        await asyncio.to_thread(self._close, broken)

    def _start(self) -> ProcessPool:
        arguments = (self.rewards.function, self.rewards.memory_bytes)
        context = multiprocessing.get_context("spawn")
        pool = ProcessPool(self.rewards.workers, initializer=_begin, initargs=arguments, context=context)
        pool.active  # noqa: B018  starts the processes now, in this thread
        return pool

    @staticmethod
    def _close(pool: ProcessPool) -> None:
        pool.stop()
        closing = threading.Thread(target=pool.join, daemon=True)  # join(timeout) of a stopped pool ignores its timeout
        closing.start()
        closing.join(CLOSE_S)


# In a worker

_function: Reward | None = None
_problem = "its process is not initialised"


def _begin(name: str, memory_bytes: int) -> None:
    """Make this process killable, load and warm up the function, and only then limit memory.

    The limit is on address space, of which imports alone reserve hundreds of MB: what is held now is not counted.
    """
    global _function, _problem
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's handler would wait for C code that never returns
    try:
        _function, _problem = resolve(name), ""
    except ConfigError as error:
        _problem = str(error)
    if _function is math_reward:
        math_reward("", "\\boxed{x}", [], {"answer": "\\sqrt{2}"})  # imports sympy, builds its tables
    limit = psutil.Process().memory_info().vms + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _load_problem() -> str:
    return _problem


def _score(prompt: str, response: str, response_ids: list[int], sample: dict[str, Any]) -> tuple[float, str]:
    """Only a float and a short text leave the process, so nothing a reward returns or raises is ever unpickled."""
    if _function is None:  # a new worker in the place of another, after the function's file was changed
        return 0.0, _problem[:ERROR_CHARACTERS]
    try:
        return _checked(_function(prompt, response, response_ids, sample))
    except MemoryError:
        os._exit(MEMORY_EXIT)  # whatever the function still holds would fail the next call
    except BaseException as error:  # also SystemExit: a reward's failure is its own, the worker serves the next call
        return 0.0, _describe(error)


def _checked(value: object) -> tuple[float, str]:
    """A finite float; bool, numpy and tensor scalars count as numbers, text does not."""
    try:
        number = math.nan if isinstance(value, (str, bytes, bytearray)) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    return (number, "") if math.isfinite(number) else (0.0, "not a number")


def _describe(error: BaseException) -> str:
    text = traceback.format_exception_only(error)[-1].strip()  # survives an exception whose __str__ fails
    text = text.removeprefix(f"{type(error).__module__}.")[:ERROR_CHARACTERS]
    return text.encode("utf-8", "replace").decode()
