"""How well the planner predicts: `python -m benchmarks.plan [--only emulated|real]`. One JSON line per case, split and schedule.

    emulated  servers and ranks that sleep (`emulate`): 1+1, 2+1 and 1+2 processes, from the rates that they sleep by; then, for each case,
              which split of three devices, and of all, is the best: predicted and measured
    real      `overlap`: vLLM on core 0, a rank on core 1, both schedules in turns; from the rates of the `sync` iterations, and from those
              of the schedule's own: they differ where others use the cores, too
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import emulate, overlap
from benchmarks.alternate import WARM_UP, alternated, median
from pasync.calibration import calibrate
from pasync.configfile import load
from pasync.estimate import Machine
from pasync.geometry import read_geometry
from pasync.rates import estimate
from pasync.simulate import Iteration, simulate

Line = dict[str, Any]
SPLITS = ((1, 1), (2, 1), (1, 2))


def compared(case: str, split: tuple[int, int], schedule: str, measured_s: float, predicted: Iteration) -> Line:
    """The JSON line."""
    return {
        "case": case,
        "split": "+".join(map(str, split)),
        "schedule": schedule,
        "predicted_s": predicted.step_s,
        "measured_s": measured_s,
        "error_frac": predicted.step_s / measured_s - 1,
    }


def emulated(rounds: int) -> Iterator[Line]:
    """Every case on every split, and the best splits."""
    lines = []
    for split in SPLITS:
        for line in emulate.measured(*split, list(emulate.CASES), rounds):
            config = emulate.configuration(*split).model_copy(update={"schedule": line["schedule"]})
            predicted = simulate(config, emulate.work(line["case"]), emulate.RATES)
            lines.append(compared(line["case"], split, line["schedule"], line["step_s"], predicted))
            yield lines[-1]
    for case in emulate.CASES:
        for schedule in ("sync", "periodic"):
            of_case = [line for line in lines if line["case"] == case and line["schedule"] == schedule]
            yield {"case": case, "schedule": schedule} | {
                f"best_{what}_{how}": min((line for line in of_case if line["split"] in allowed), key=lambda line: cost(line, how))["split"]
                for what, allowed in (("of_three", ("2+1", "1+2")), ("per_device", ("1+1", "2+1", "1+2")))
                for how in ("predicted", "measured")
            }


def cost(line: Line, how: str) -> float:
    """Device seconds of a step."""
    return line[f"{how}_s"] * (3 - (line["split"] == "1+1"))  # type: ignore[no-any-return]


def real(case: str, groups: int | None, pairs: int, folder: Path) -> Iterator[Line]:
    """Both schedules of one case of `overlap`."""
    folder.mkdir(parents=True)
    shape = overlap.CASES[case]
    tree = overlap.configuration(folder, shape._replace(groups=groups or shape.groups))
    tree["rollout"] |= {"start_s": 900, "deadline_s": 900}  # for a machine that others use, too
    lines = alternated(folder, tree, "schedule=sync", "schedule=periodic", rounds=pairs)
    run = folder / "run"
    config = load(run / "config.yaml")
    estimated = estimate(config, read_geometry(Path(config.model.path)), Machine("cpu", 2, None))
    calibrated = [calibrate(run, chosen=range(2 * WARM_UP + i, 2 * (WARM_UP + pairs), 2)) for i in (0, 1)]
    for schedule, own, of_schedule in zip(("sync", "periodic"), calibrated, lines, strict=True):
        predicted, from_own = (
            simulate(config.model_copy(update={"schedule": schedule}), works[0], calibration.scaled(estimated))
            for calibration, works in (calibrated[0], own)
        )
        line = compared(f"overlap {case}", (1, 1), schedule, median(of_schedule, "time/step_s"), predicted)
        line |= {"own_rates_s": from_own.step_s, "own_rates_error_frac": from_own.step_s / line["measured_s"] - 1}
        for part in ("generate", "train"):
            line |= {f"{part}_predicted_s": getattr(predicted, f"{part}_s"), f"{part}_measured_s": median(of_schedule, f"time/{part}_s")}
        yield line


def main() -> None:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("emulated", "real"))
    parser.add_argument("--cases", nargs="+", choices=overlap.CASES, default=list(overlap.CASES), help="real ones")
    parser.add_argument("--groups", type=int, help="of a real case; fewer than its own save time")
    parser.add_argument("--rounds", type=int, default=3, help="measured iterations of each schedule")
    options = parser.parse_args()
    for line in emulated(options.rounds) if options.only != "real" else ():
        print(json.dumps(line), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for case in options.cases if options.only != "emulated" else ():
            for line in real(case, options.groups, options.rounds, Path(scratch).resolve() / case):
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
