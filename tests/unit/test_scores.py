from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasync.algorithm.scores import Answered, majority, pass_at, scores
from pasync.rewards.functions import vote


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_j_is_the_share_of_all_choices_of_j_with_a_right_one(right, data):
    j = data.draw(st.integers(1, len(right)))
    assert pass_at(j, len(right), sum(right)) == pytest.approx(fmean(any(chosen) for chosen in combinations(right, j)))


def test_pass_at_j_keeps_its_accuracy_where_factorials_are_large():
    assert pass_at(1, 10_000, 1) == pytest.approx(1e-4)
    assert pass_at(5_000, 10_000, 1) == 0.5 and pass_at(64, 1024, 1024) == 1.0


@pytest.mark.parametrize(
    ("answers", "rewards", "expected"),
    [
        (["4", "5", "4"], [1, 0, 1], 1),
        (["4", "5", "5"], [1, 0, 0], 0),
        (["4", "5"], [1, 0], 0.5),
        (["", "", "4"], [0, 0, 1], 1),
        (["", ""], [0, 0], 0),
        (["4", "4", "5"], [1, 0.5, 0], 0.75),
    ],
)
def test_the_majority_is_what_most_votes_name_and_ties_share(answers, rewards, expected):
    assert majority(Answered(rewards, answers)) == expected


def test_scores_are_means_over_problems():
    problems = [Answered([1.0] * 6, ["a"] * 6), Answered([1.0, *[0.0] * 5], ["a", *"bbbbb"])]
    assert scores(problems) == pytest.approx(
        {"avg@6": (1 + 1 / 6) / 2, "pass@2": (1 + 1 / 3) / 2, "pass@4": (1 + 2 / 3) / 2, "pass@6": 1.0, "maj@6": 0.5}
    )
    assert scores([Answered([1.0], ["a"]), Answered([0.0], [""])]) == {"avg@1": 0.5}


def test_the_same_value_is_the_same_vote():
    numeric = {"answer": "1/2"}
    votes = {vote("math", text, numeric) for text in (r"so \boxed{0.5}", r"\boxed{\frac{1}{2}}", "it is 1/2.", r"$\boxed{ 0.50 }$")}
    assert votes == {"1/2"}
    assert vote("math", r"\boxed{x + 1}", {"answer": "x+1"}) == vote("math", r"\boxed{x+1}", {"answer": "x+1"})
    assert vote("math", "no number", numeric) == "" and vote("exact", " 7\n", numeric) == "7"
