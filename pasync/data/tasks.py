"""The two small tasks that are shipped as files: one-digit addition and sorting digits.

    addition()  "3+4="   -> "7"        sorting()  "5312>"  -> "1235"
        |                                  |
        +---- python -m pasync.data.tasks [folder] ----> configs/data/{addition,sort}_{train,eval}.jsonl

Held-out rows test the task, not memory: no reordering of a training row's digits is held out.
Everything is fixed by seeds, so the files can be made anew at any time.
"""

from __future__ import annotations

import json
import random
import sys
from itertools import combinations_with_replacement
from pathlib import Path

Row = dict[str, str]

EXAMPLES = ((3, 4), (5, 8), (0, 2))
"""Pairs that the few-shot prompt of the addition configs solves, so neither file asks them."""
SORT_TRAIN, SORT_EVAL = 1000, 200


def addition() -> tuple[list[Row], list[Row]]:
    """All sums of two digits, split into training and held-out rows.

    A pair and its mirror are always in the same part. A third of the unordered pairs is held out, from 0+0 to 9+9.

    Returns:
        (train, held out), rows of "question" ("3+4=") and "answer" ("7").
    """
    order = random.Random(6)  # a seed for which every digit is held out in at least two pairs
    pairs = [pair for pair in combinations_with_replacement(range(10), 2) if pair not in EXAMPLES]
    pairs.sort(key=lambda pair: (sum(pair), order.random()))
    held_out = set(pairs[::3])  # every third by size of the sum, so all sizes are in both parts

    def rows(part: set[tuple[int, int]]) -> list[Row]:
        both = sorted({(a, b) for pair in part for a, b in (pair, pair[::-1])})
        return [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in both]

    return rows(set(pairs) - held_out), rows(held_out)


def sorting() -> tuple[list[Row], list[Row]]:
    """Rows that ask for 4 to 6 digits in order; no two rows of either part have the same answer.

    Returns:
        (train, held out), rows of "question" ("5312>") and "answer" ("1235").
    """
    draw = random.Random(0)
    by_answer: dict[str, Row] = {}
    while len(by_answer) < SORT_TRAIN + SORT_EVAL:
        row = sort_row(draw)
        by_answer.setdefault(row["answer"], row)
    rows = list(by_answer.values())
    draw.shuffle(rows)  # answers get rarer while drawing: without this the held-out rows would be the longer ones
    return rows[:SORT_TRAIN], rows[SORT_TRAIN:]


def sort_row(draw: random.Random) -> Row:
    """One random row of the sorting task."""
    digits = draw.choices("0123456789", k=draw.randint(4, 6))
    return {"question": "".join(digits) + ">", "answer": "".join(sorted(digits))}


def write(folder: Path) -> None:
    """Write the four files as JSONL, one row a line."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, parts in (("addition", addition()), ("sort", sorting())):
        for part, rows in zip(("train", "eval"), parts, strict=True):
            (folder / f"{name}_{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "configs/data"))
