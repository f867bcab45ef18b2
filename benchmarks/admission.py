"""What the order of groups is worth: `python -m benchmarks.admission [--lengths long_tailed|uniform]`.

A real vLLM server on core 0 and a training rank on core 1 do the same work, alternating between `admission=fifo` and
`longest_first`; lengths were seen in the iteration before, as in a second epoch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.alternate import alternated, median
from benchmarks.overlap import Case, configuration
from benchmarks.work import write_rows

SHAPE = Case(hidden=128, layers=2, groups=48, responses=4, response_tokens=0)
MEDIAN_TOKENS, LONGEST_TOKENS = 64, 640


def response_lengths(kind: str, groups: int) -> list[int]:
    """Tokens of the responses to each prompt, in the order of the file (each epoch is shuffled anyway).

    "long_tailed" has the quantiles of a log-normal, so that its shape does not depend on luck; "uniform" is all alike.
    """
    if kind == "uniform":
        return [103] * groups  # as many tokens in all
    normal = statistics.NormalDist()
    quantiles = np.array([normal.inv_cdf((i + 0.5) / groups) for i in range(groups)])
    sigma = np.log(LONGEST_TOKENS / MEDIAN_TOKENS) / quantiles[-1]
    return np.round(MEDIAN_TOKENS * np.exp(sigma * quantiles)).astype(int).tolist()


def measure(kind: str, pairs: int, folder: Path) -> dict[str, Any]:
    """The JSON line."""
    lengths = response_lengths(kind, SHAPE.groups)
    tree = configuration(folder, SHAPE._replace(response_tokens=max(lengths)))
    write_rows(folder / "rows.jsonl", lengths, tree["data"]["max_prompt_tokens"])
    tree["rollout"]["max_num_seqs"] = 8 * SHAPE.responses
    fifo, longest = alternated(folder, tree, "rollout.admission=fifo", "rollout.admission=longest_first", rounds=pairs)
    fifo_s, longest_s = median(fifo, "time/step_s"), median(longest, "time/step_s")
    return {
        "lengths": kind,
        "max_over_median": max(lengths) / statistics.median(lengths),
        "groups": SHAPE.groups,
        "fifo_step_s": fifo_s,
        "longest_first_step_s": longest_s,
        "saved_frac": 1 - longest_s / fifo_s,
        "fifo_tail_s": median(fifo, "time/tail_s"),
        "longest_first_tail_s": median(longest, "time/tail_s"),
        "fifo_generate_s": median(fifo, "time/generate_s"),
        "longest_first_generate_s": median(longest, "time/generate_s"),
        "train_s": median(longest, "time/train_s"),
        "runs": pairs,
    }


def main() -> None:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", choices=("long_tailed", "uniform"), default="long_tailed")
    parser.add_argument("--pairs", type=int, default=9, help="measured iterations of each admission")
    parser.add_argument("--out", type=Path, help="keep the run here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        print(json.dumps(measure(options.lengths, options.pairs, folder.resolve())))


if __name__ == "__main__":
    main()
