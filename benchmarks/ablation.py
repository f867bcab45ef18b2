"""What each part of the method is worth, alone and together: `python -m benchmarks.ablation`. One JSON line per variant.

    sync | periodic    wait for the whole batch, or train on groups as they arrive
    shared prompt      each prompt once for its K responses, or once for every response
    single pass        policy and reference together, or the reference over the whole batch first, as with a job for each model
    admission          fifo, group_first, longest_first

A real vLLM server on core 0 and a training rank on core 1 do the same work in every variant, one iteration of each in turn. The limit of
a variant follows from the times of the plain one, in which nothing runs side by side, by counting: T_g of generation, T_t of training,
s of the weight sync; a shared prompt divides T_t by a ratio of operations; of T_t a quarter is the reference's (one forward of four).

    sync                    T_g + T_t + s
    periodic, single pass   max(T_g, T_t) + s
    periodic, passes apart  max(T_g, T_t / 4) + 3 T_t / 4 + s
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.alternate import alternated, median
from benchmarks.overlap import Case, configuration
from benchmarks.shared_prompt import operations_ratio

SHAPE = Case(hidden=384, layers=3, groups=12, responses=8, response_tokens=24, prompt_tokens=128, kl_coef=0.01)
PARTS = ("generate", "train", "sync")


class Variant(NamedTuple):
    """Which parts are there."""

    periodic: bool = False
    shared: bool = False
    single: bool = False
    admission: str = "fifo"

    @property
    def name(self) -> str:
        parts = ["periodic" if self.periodic else "sync", "shared prompt" * self.shared, "single pass" * self.single]
        return " + ".join(filter(None, [*parts, self.admission * (self.admission != "fifo")]))

    @property
    def overrides(self) -> str:
        """For `alternated`."""
        schedule = "periodic" if self.periodic else "sync"
        overrides = f"schedule={schedule} model.shared_prompt={str(self.shared).lower()} rollout.admission={self.admission}"
        return overrides if self.single else f"apart {overrides}"

    def limit(self, generate_s: float, train_s: float, transfer_s: float, ratio: float) -> float:
        """Seconds of a step, from those of the plain variant."""
        train_s /= ratio if self.shared else 1.0
        if not self.periodic:
            return generate_s + train_s + transfer_s
        first_s = train_s if self.single else train_s / 4
        return max(generate_s, first_s) + train_s - first_s + transfer_s


PLAIN = Variant()
VARIANTS = (
    PLAIN,
    Variant(periodic=True),
    Variant(shared=True),
    Variant(single=True),
    Variant(admission="group_first"),
    Variant(periodic=True, shared=True),
    Variant(periodic=True, shared=True, single=True),
    Variant(periodic=True, shared=True, single=True, admission="group_first"),
    Variant(periodic=True, shared=True, single=True, admission="longest_first"),
)


def ratio_of_operations(shape: Case) -> float:
    """Training on copies of the prompt over training with one."""
    attention, mlp = 3 * shape.hidden**2, 3 * 3 * shape.hidden**2  # of `endless_model`: half as many key/value heads as heads, 3 x hidden
    weights = shape.layers * (attention + mlp)
    return operations_ratio(weights, shape.layers * shape.hidden, shape.prompt_tokens, shape.response_tokens, shape.responses)


def measure(rounds: int, groups: int, folder: Path) -> Iterator[dict[str, Any]]:
    """The JSON lines."""
    shape = SHAPE._replace(groups=groups)
    tree = configuration(folder, shape)
    tree["parallel"]["micro_batch_tokens"] = shape.prompt_tokens + shape.responses * shape.response_tokens
    found = alternated(folder, tree, *(variant.overrides for variant in VARIANTS), rounds=rounds)
    generate_s, train_s, transfer_s = (median(found[0], f"time/{part}_s") for part in PARTS)
    plain_s, ratio = median(found[0], "time/step_s"), ratio_of_operations(shape)
    for variant, lines in zip(VARIANTS, found, strict=True):
        step_s, limit_s = median(lines, "time/step_s"), variant.limit(generate_s, train_s, transfer_s, ratio)
        yield {
            "case": variant.name,
            "step_s": step_s,
            "speedup": plain_s / step_s,
            "limit_step_s": limit_s,
            "limit": plain_s / limit_s,
            "of_limit": limit_s / step_s,
            **{f"{part}_s": median(lines, f"time/{part}_s") for part in PARTS},
            "runs": rounds,
        }


def main() -> None:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="measured iterations of each variant")
    parser.add_argument("--groups", type=int, default=SHAPE.groups, help="fewer save time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for line in measure(options.rounds, options.groups, Path(scratch).resolve()):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
