"""What evaluation inside the bubble costs: `python -m benchmarks.evaluation [--config configs/tiny_cpu.yaml] [--pairs N]`.

One server on core 0 and one rank on core 1 alternate between iterations with an evaluation and without. `growth_frac` is that of one with
an evaluation, `mean_growth_frac` what it makes of all iterations at the configuration's own `eval.every`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.alternate import alternated, median
from pasync.configfile import load

NEVER = 1 << 30
"""`eval.every` beyond the last iteration: only the first one is evaluated, and not counted."""


def measure(path: Path, pairs: int, folder: Path) -> dict[str, Any]:
    """The JSON line."""
    config = load(path)
    tree = config.model_dump(mode="json")
    without, with_one = alternated(folder, tree, f"eval.every={NEVER}", "eval.every=1", rounds=pairs)
    assert all(line["eval/unfinished"] == 0 for line in with_one) and not any("eval/problems" in line for line in without)
    plain_s, evaluated_s = median(without, "time/step_s"), median(with_one, "time/step_s")
    growth = evaluated_s / plain_s - 1
    return {
        "config": path.stem,
        "problems": with_one[0]["eval/problems"],
        "step_s": plain_s,
        "evaluated_step_s": evaluated_s,
        "growth_frac": growth,
        "mean_growth_frac": growth / config.eval.every,
        "every": config.eval.every,
        "eval_s": median(with_one, "time/eval_s"),
        "bubble_s": median(with_one, "time/eval_bubble_s"),
        "delay_s": median(with_one, "time/eval_delay_s"),
        "mean_delay_frac": median(with_one, "time/eval_delay_s") / plain_s / config.eval.every,
        "server_idle_frac": median(without, "time/server_idle_frac"),
        "pairs": pairs,
    }


def main() -> None:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/tiny_cpu.yaml"))
    parser.add_argument("--pairs", type=int, default=9, help="measured iterations of each kind")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(measure(options.config, options.pairs, Path(scratch).resolve())))


if __name__ == "__main__":
    main()
