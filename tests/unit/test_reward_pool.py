"""Whatever a reward does, the pool answers, and the next call works."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pasync.errors import ConfigError
from pasync.rewards.pool import RewardPool
from pasync.sections import RewardConfig

REWARDS = '''
import os, signal, sys, time, numpy

hoard = []

class Odd(Exception):
    def __init__(self, a, b): super().__init__(a)

class Mute(Exception):
    def __str__(self): return 1 / 0

def play(prompt, response, response_ids, sample):
    match response:
        case "hang":
            while True: time.sleep(0.01)
        case "power": return float(9 ** 9 ** 9 > 0)
        case "exit": os._exit(3)
        case "sys.exit": sys.exit(4)
        case "eat": return len(bytearray(8 << 30))
        case "hoard":
            while True: hoard.append(numpy.empty(64 << 20, "u1"))
        case "stop": os.kill(os.getpid(), signal.SIGSTOP)
        case "odd": raise Odd("caf\\ud800", 2)
        case "mute": raise Mute()
        case "long": raise ValueError("x" * 1000)
        case "eval": return eval("1 +")
        case "slow": time.sleep(0.6); return 1.0
        case "pid": return os.getpid()
        case "ids": return sum(response_ids) + sample["bonus"]
    return {"none": None, "nan": float("nan"), "inf": float("inf"), "text": "1.0", "list": [1], "huge": 10 ** 400, "complex": 1j,
            "bool": True, "int": 2, "numpy": numpy.float32(0.5), "flag": numpy.bool_(True)}[response]
'''


BUSY = '''
import os, pathlib
def f(prompt, response, response_ids, sample):
    pathlib.Path(sample["mark"]).write_text(str(os.getpid()))
    return float(9 ** 9 ** 9 > 0)
'''


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardPool]:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "played_rewards.py").write_text(REWARDS)
    with pytest.MonkeyPatch.context() as patch, _pool_in(folder, patch, "played_rewards:play", 1.0) as pool:
        yield pool


def _pool_in(folder: Path, patch: pytest.MonkeyPatch, function: str, timeout_s: float) -> RewardPool:
    """A pool whose workers start in `folder`, where `function` is found."""
    patch.chdir(folder)
    return RewardPool(RewardConfig(function=function, timeout_s=timeout_s, memory_bytes=1 << 28))


def score(pool: RewardPool, response: str, **sample: object) -> tuple[float, str]:
    return asyncio.run(pool.score("p", response, [1, 2], sample))


@pytest.mark.parametrize(("response", "value"), [("bool", 1.0), ("int", 2.0), ("numpy", 0.5), ("flag", 1.0)])
def test_every_kind_of_scalar_is_a_reward(play: RewardPool, response: str, value: float) -> None:
    assert score(play, response) == (value, "")


def test_a_reward_sees_ids_and_sample(play: RewardPool) -> None:
    assert score(play, "ids", bonus=0.5) == (3.5, "")


@pytest.mark.parametrize("response", ["none", "nan", "inf", "text", "list", "huge", "complex"])
def test_anything_else_is_not_a_number(play: RewardPool, response: str) -> None:
    assert score(play, response) == (0.0, "not a number")


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ("unknown", "KeyError: 'unknown'"),
        ("odd", "Odd: caf?"),
        ("mute", "Mute: <exception str() failed>"),
        ("long", "ValueError: " + "x" * 188),
        ("eval", "SyntaxError: invalid syntax"),
        ("sys.exit", "SystemExit: 4"),
    ],
)
def test_an_exception_scores_zero_under_its_name(play: RewardPool, response: str, error: str) -> None:
    assert score(play, response) == (0.0, error)
    assert score(play, "int") == (2.0, "")


@pytest.mark.parametrize(
    ("response", "error"),
    [("hang", "timeout"), ("power", "timeout"), ("stop", "timeout"), ("exit", "crash"), *((r, "out of memory") for r in ("eat", "hoard"))],
)
def test_a_lost_worker_scores_zero_and_is_replaced(play: RewardPool, response: str, error: str) -> None:
    before = score(play, "pid")[0]
    assert score(play, response) == (0.0, error)
    assert score(play, "pid")[0] not in (0.0, before)
    assert not psutil.pid_exists(int(before))


def test_time_in_the_queue_does_not_count(play: RewardPool) -> None:
    async def four() -> list[tuple[float, str]]:
        return await asyncio.gather(*(play.score("p", "slow", [], {}) for _ in range(4)))

    assert asyncio.run(four()) == [(1.0, "")] * 4


def test_a_hang_and_a_crash_do_not_touch_their_neighbours(play: RewardPool) -> None:
    async def mixed() -> list[tuple[float, str]]:
        return await asyncio.gather(*(play.score("p", r, [], {}) for r in ("int", "hang", "int", "exit", "int")))

    assert asyncio.run(mixed()) == [(2.0, ""), (0.0, "timeout"), (2.0, ""), (0.0, "crash"), (2.0, "")]


def test_an_idle_worker_killed_from_outside_is_replaced(play: RewardPool) -> None:
    os.kill(int(score(play, "pid")[0]), signal.SIGKILL)
    assert score(play, "int") == (2.0, "")


def test_a_worker_killed_from_outside_in_a_call_is_a_crash_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "killed_reward.py").write_text(BUSY)
    mark = tmp_path / "mark"

    async def kill() -> tuple[float, str]:
        call = asyncio.ensure_future(pool.score("", "", [], {"mark": str(mark)}))
        while not mark.exists() or not mark.read_text():
            await asyncio.sleep(0.02)
        os.kill(int(mark.read_text()), signal.SIGKILL)
        return await call

    with _pool_in(tmp_path, monkeypatch, "killed_reward:f", 60.0) as pool:
        for _ in range(2):
            assert asyncio.run(kill()) == (0.0, "crash")
            mark.unlink()


def test_hostile_mathematics_ends_within_the_limit() -> None:
    with RewardPool(RewardConfig(timeout_s=3.0)) as pool:
        began = time.monotonic()
        assert score(pool, "\\boxed{0.5}", answer="1/2") == (1.0, "")
        assert time.monotonic() - began < 1.0, "the first call pays for no import"
        for answer in ("9^{9^9}", "{" * 150 + "1" + "}" * 150, ",".join(map(str, range(10_000)))):
            reward, error = score(pool, f"\\boxed{{{answer}}}", answer="\\sqrt{2}")
            assert reward == 0.0 and error in ("", "timeout")
        assert score(pool, "\\boxed{\\sqrt{8}}", answer="2\\sqrt{2}") == (1.0, "")


@pytest.mark.parametrize(
    ("text", "message"),
    [("def g(): pass", "has no function f"), ("1 / 0", "ZeroDivisionError"), ("import os; os._exit(1)", "ends its process")],
)
def test_a_function_that_cannot_be_loaded_is_an_error_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    (tmp_path / "broken_reward.py").write_text(text)
    with pytest.raises(ConfigError, match=message), _pool_in(tmp_path, monkeypatch, "broken_reward:f", 1.0):
        pass


def test_closing_ends_a_busy_worker_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "busy_reward.py").write_text(BUSY)

    async def leave() -> None:
        with _pool_in(tmp_path, monkeypatch, "busy_reward:f", 60.0) as pool:
            call = asyncio.ensure_future(pool.score("", "", [], {"mark": str(tmp_path / "mark")}))
            while not (tmp_path / "mark").exists() or not (tmp_path / "mark").read_text():
                await asyncio.sleep(0.02)
        call.cancel()

    began = time.monotonic()
    asyncio.run(leave())
    assert time.monotonic() - began < 20
    assert not psutil.pid_exists(int((tmp_path / "mark").read_text()))
