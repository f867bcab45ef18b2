"""A few responses of every iteration, for people to read.

    groups --Samples--> <run>/samples.jsonl    best and worst of each batch; the first problems of each held-out set, each time they are
                                               evaluated

Bounded: two lines per iteration and HELD_OUT per set and evaluation, texts cut in the middle. The file is ASCII: whatever a model or a
data set says, lone surrogates and U+2028 included, is escaped, so a line is a line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pasync.data.prompts import Prompt
from pasync.messages import Group, Response, int_bytes
from pasync.observe.trace import drop_lines, whole_lines

HELD_OUT = 16
"""Problems of a set whose answers are kept at every evaluation."""
KEPT_CHARACTERS = 2000
"""Of each text."""


class Samples:
    """Writes one run's samples. Used on rank 0 only.

    Args:
        first: iteration that the run begins with; lines from it on are removed, they are done again.
    """

    def __init__(self, run: Path, first: int) -> None:
        self.path = run / "samples.jsonl"
        drop_lines(self.path, first)

    def batch(self, iteration: int, groups: list[Group], prompts: list[Prompt]) -> None:
        """Keep the best and the worst response; of equals, those to the prompt whose responses differ most.

        Args:
            prompts: of the batch; groups of others (refilled ones) are not looked at.
        """
        known = {int_bytes(prompt.ids): prompt for prompt in prompts}
        spread = sorted((g for g in groups if g.prompt_ids in known), key=lambda g: (min(g.rewards) - max(g.rewards), g.group_id))
        answers = [(known[group.prompt_ids], response) for group in spread for response in group.responses]
        if answers:
            self._write(iteration, "best", *max(answers, key=lambda answer: answer[1].reward))
            self._write(iteration, "worst", *min(answers, key=lambda answer: answer[1].reward))

    def held_out(self, iteration: int, name: str, groups: list[Group], prompts: list[Prompt]) -> None:
        """Keep the first response to each of the first prompts of a held-out set."""
        answers = {group.prompt_ids: group.responses[0] for group in groups}
        for prompt in prompts[:HELD_OUT]:
            if response := answers.get(int_bytes(prompt.ids)):
                self._write(iteration, "held-out", prompt, response, name)

    def _write(self, iteration: int, kind: str, prompt: Prompt, response: Response, name: str = "") -> None:
        line = {
            "iteration": iteration, "kind": kind, "set": name, "index": prompt.index, "prompt": _cut(prompt.text),
            "response": _cut(response.text), "reward": response.reward, "reward_error": response.reward_error,
            "tokens": len(response.ids) // 4, "ended": response.ended,
        }  # fmt: skip
        with self.path.open("a", encoding="ascii") as file:
            file.write(json.dumps(line) + "\n")


def read_samples(run: Path) -> list[dict[str, Any]]:
    """All samples of a run; none if it kept none."""
    path = run / "samples.jsonl"
    return [json.loads(line) for line in whole_lines(path)] if path.exists() else []


def most_changed(samples: list[dict[str, Any]], count: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(first, last) answer to those held-out problems whose reward changed most, at most `count`; the same texts are left out."""
    by_problem: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for sample in samples:
        if sample["kind"] == "held-out":
            by_problem.setdefault((sample["set"], sample["index"]), []).append(sample)
    pairs = [(found[0], found[-1]) for found in by_problem.values() if found[0]["response"] != found[-1]["response"]]
    return sorted(pairs, key=lambda pair: -abs(pair[1]["reward"] - pair[0]["reward"]))[:count]


def _cut(text: str) -> str:
    """The same, or its beginning and end: answers stand at the end."""
    half = KEPT_CHARACTERS // 2
    left_out = len(text) - KEPT_CHARACTERS
    return f"{text[:half]}\n[.. {left_out} characters ..]\n{text[-half:]}" if left_out > 0 else text
