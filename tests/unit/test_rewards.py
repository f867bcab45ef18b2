r"""What counts as a right answer, and what a policy could try instead."""

import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import math_verify
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pasync.errors import ConfigError
from pasync.rewards.functions import exact, final_answer, last_boxed, math_reward, reference, resolve


def boxed(text: str) -> str:
    return f"so \\boxed{{{text}}}."


def score(response: str, gold: object) -> float:
    return math_reward("", response, [], {"answer": gold})


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        (72, boxed("72")),
        ("#### 72", boxed("72")),
        ("48/2 = 24\n48+24 = 72\n#### 72", "#### 72"),
        ("\\boxed{72}", "It is 72."),
        ("5", boxed("x=5")),
        ("1234", boxed("1,234")),
        ("1,234", boxed("1{,}234")),
        ("1/2", boxed("0.5")),
        ("0.5", boxed("\\frac12")),
        ("1/2", "it is $\\frac{1}{2}$"),
        ("3", boxed("3.0")),
        ("-3", boxed("\u22123")),
        ("7/2", boxed("3\\frac{1}{2}")),
        ("50%", boxed("1/2")),
        ("50%", boxed("50\\%")),
        ("12", boxed("12\\text{ cm}")),
        ("12", "it is 12 cm"),
        ("15", "That costs $15"),
        ("1200", boxed("1.2 \\times 10^3")),
        ("2", boxed("\\sqrt{4}")),
        ("2\\sqrt{3}", boxed("\\sqrt{12}")),
        ("\\{1,2\\}", boxed("\\{2,1\\}")),
        ("(1,2)", boxed("\\left(1, 2\\right)")),
        ("x^2+1", boxed("1+x^2")),
        ("A", boxed("\\text{A}")),
        ("4", "<answer>4</answer>"),
        ("7", "3+4=7"),
        ("8", boxed("1") + " no, " + boxed("8")),
    ],
)
def test_the_same_value_in_another_notation_is_right(gold: object, response: str) -> None:
    assert score(response, gold) == 1.0


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("4", boxed("1=2=3=4")),
        ("4", boxed("1=4")),
        ("4", boxed("x!=4")),
        ("4", boxed("1,2,3,4")),
        ("4", boxed("x=1, x=4")),
        ("4", boxed("4 \\text{ or } 5")),
        ("4", boxed("\\pm 4")),
        ("4", boxed("\\{4,5\\}")),
        ("4", boxed("x \\in \\{4\\}")),
        ("\\sqrt2", boxed("\\sqrt2, \\sqrt3")),
        ("7", boxed("3+4")),
        ("24", boxed("4!")),
        ("4", boxed("2^2")),
        ("12 m", boxed("12 cm")),
        ("50%", boxed("50")),
        ("2024", "on 2024-01-02"),
        ("1000000", boxed("1000001")),
        ("0", boxed("0.0000001")),
        ("31/2", boxed("3 1/2")),
        ("(1,2)", boxed("(2,1)")),
        ("4", boxed("4") + boxed("5")),
        ("4", "\\boxed{4"),
        ("4", "1 2 3 4 5"),
        ("4", ""),
        ("", ""),
    ],
)
def test_a_guess_a_hedge_or_an_unsolved_sum_is_wrong(gold: str, response: str) -> None:
    assert score(response, gold) == 0.0


@pytest.mark.parametrize(
    "response",
    [
        boxed("9^{9^9}"),
        boxed("{" * 5000 + "1" + "}" * 5000),
        " ".join(map(str, range(10_000))),
        boxed(",".join(map(str, range(10_000)))),
        "(1+" * 30_000,
        "1" * 100_000,
        "$" * 5000,
        "\\(" * 3000,
        boxed("1/0"),
    ],
)
def test_a_hostile_answer_to_a_number_scores_zero_at_once(response: str) -> None:
    assert score(response, "4") == 0.0


def test_only_the_end_of_a_response_is_read() -> None:
    assert score(boxed("4") + " " * 3000, "4") == 0.0


@settings(max_examples=200, deadline=None)
@given(st.integers(), st.text(max_size=80))
def test_an_integer_in_the_last_box_is_right_after_any_text(number: int, text: str) -> None:
    assert score(text + boxed(str(number)), number) == 1.0
    assert score(text + boxed(str(number + 1)), number) == 0.0


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789+-*/=.,{}()[]\\$ abxfrcoxed^%#\n", max_size=60), st.booleans())
def test_finding_the_answer_never_fails(text: str, numeric: bool) -> None:
    assert isinstance(final_answer(text, numeric) + reference(text), str)


def test_nested_braces_of_a_box_are_kept() -> None:
    assert last_boxed("\\boxed{1} \\boxed{\\frac{1}{2}} end") == "\\frac{1}{2}"


def test_exact_compares_text_after_stripping() -> None:
    assert exact("", " 12\n", [], {"answer": 12}) == 1.0
    assert exact("", "12.", [], {"answer": 12}) == 0.0


def test_names_of_built_in_rewards_resolve() -> None:
    assert resolve("math") is math_reward
    assert resolve("exact") is exact


def test_a_function_is_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_reward_b.py").write_text("def one(prompt, response, response_ids, sample):\n    return 1\n")
    assert resolve("own_reward_b:one")("", "", [], {}) == 1
    with pytest.raises(ConfigError, match="no function once. Did you mean one"):
        resolve("own_reward_b:once")
    with pytest.raises(ConfigError, match="Did you mean own_reward_b"):
        resolve("own_rewerd_b:one")


@pytest.mark.parametrize(
    ("name", "message"), [("maths", "Did you mean math"), ("json:", "module:function"), ("json:dump3", "Did you mean dump")]
)
def test_a_wrong_name_suggests_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(name)


def test_a_module_that_fails_to_import_is_named_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "own_reward_c.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match="own_reward_c: ZeroDivisionError"):
        resolve("own_reward_c:f")


def test_only_its_own_work_takes_time_from_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a busy machine, where each takes longer, scores as any other."""
    parse = math_verify.parse
    assert score(boxed("x + 1"), "1 + x") == 1.0  # and its grammar is loaded now

    def starved(*args: Any, **options: Any) -> Any:
        time.sleep(0.3)
        return parse(*args, **options)

    monkeypatch.setattr("pasync.rewards.functions.MATH_VERIFY_S", 0.5)
    monkeypatch.setattr(math_verify, "parse", starved)
    assert score(boxed("x + 1"), "1 + x") == 1.0


def test_an_endless_comparison_ends_though_every_error_in_it_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*args: Any, **options: Any) -> bool:
        while True:
            with suppress(Exception):  # as math-verify does
                sum(range(1000))

    monkeypatch.setattr("pasync.rewards.functions.MATH_VERIFY_S", 0.2)
    monkeypatch.setattr(math_verify, "verify", endless)
    assert score(boxed("x + 1"), "2 + x") == 0.0
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
