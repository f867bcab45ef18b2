"""How close an iteration comes to max(T_g, T_t) + s: `python -m benchmarks.overlap [--case balanced|train_bound|generate_bound]`.

A real vLLM server on core 0 and a training rank on core 1 do the same work, alternating between `schedule=sync` and `periodic`. The
ideal is computed from the times of the sync iterations, in which nothing runs side by side.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.alternate import alternated, median
from benchmarks.work import endless_model, write_rows


class Case(NamedTuple):
    """Sizes that set the ratio of generation to training."""

    hidden: int
    layers: int
    groups: int
    responses: int
    response_tokens: int
    prompt_tokens: int = 16
    kl_coef: float = 0.0
    gradient_checkpointing: bool = False


CASES = {
    "balanced": Case(hidden=640, layers=4, groups=64, responses=8, response_tokens=8, kl_coef=0.01),
    "train_bound": Case(384, 3, 40, responses=8, response_tokens=4, prompt_tokens=288, kl_coef=0.01, gradient_checkpointing=True),
    "generate_bound": Case(hidden=256, layers=2, groups=64, responses=8, response_tokens=12),
}


def configuration(folder: Path, case: Case) -> dict[str, Any]:
    """The run of a case; its model and data are made in `folder`."""
    endless_model(folder / "model", case.hidden, case.layers)
    write_rows(folder / "rows.jsonl", [case.response_tokens] * case.groups, case.prompt_tokens)
    return {
        "name": "overlap",
        "model": {"path": str(folder / "model"), "dtype": "float32", "gradient_checkpointing": case.gradient_checkpointing},
        "data": {
            "train": {"source": str(folder / "rows.jsonl"), "max_tokens_column": "tokens"},
            "chat": False,
            "max_prompt_tokens": case.prompt_tokens,
        },
        "rollout": {"max_tokens": case.response_tokens, "max_num_seqs": case.responses, "kv_cache_bytes": 256 << 20},
        "rewards": {"function": "benchmarks.work:reward", "truncated_is_wrong": False},
        "algorithm": {"batch_groups": case.groups, "group_responses": case.responses, "kl_coef": case.kl_coef},
        "optimizer": {"lr": 1e-6},
        "parallel": {"micro_batch_tokens": 2 * case.responses * case.response_tokens},
    }


def measure(name: str, pairs: int, folder: Path) -> dict[str, Any]:
    """The JSON line."""
    case = CASES[name]
    sync, periodic = alternated(folder, configuration(folder, case), "schedule=sync", "schedule=periodic", rounds=pairs)
    generate_s, train_s, transfer_s = (median(sync, f"time/{part}_s") for part in ("generate", "train", "sync"))
    sync_s, periodic_s = median(sync, "time/step_s"), median(periodic, "time/step_s")
    ideal_s = max(generate_s, train_s) + transfer_s
    return {
        "case": name,
        "groups": case.groups,
        "sync_step_s": sync_s,
        "periodic_step_s": periodic_s,
        "ideal_step_s": ideal_s,
        "speedup": sync_s / periodic_s,
        "of_ideal": ideal_s / periodic_s,
        "first_wait_s": median(periodic, "time/first_group_wait_s"),
        "tail_s": median(periodic, "time/tail_s"),
        "runs": pairs,
        "generate_over_train": generate_s / train_s,
    }


def main() -> None:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, default="balanced")
    parser.add_argument("--pairs", type=int, default=5, help="measured iterations of each schedule")
    parser.add_argument("--out", type=Path, help="keep the run here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        print(json.dumps(measure(options.case, options.pairs, folder.resolve())))


if __name__ == "__main__":
    main()
