"""What a long run gathers: `python -m benchmarks.soak [--iterations N] [--stub] [key=value ...]`. Growth of memory, open files, threads
and sockets of every process of the tiny run, with the real vLLM or a stub server.

    samples, evenly spread over the iterations after the warm-up --> mean of the last quarter - mean of the first, per 100 iterations
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from pasync.processes import all_in_run

SMALL = ["algorithm.batch_groups=4", "algorithm.group_responses=2", "eval.every=0", "data.eval=null", "rollout.servers=2"]
STUB = ["rewards.function=benchmarks.stub_run:reward", "sync.probe_tolerance=1e9"]
BOUNDS = {"rss_bytes": 2 << 20, "open_files": 0.5, "threads": 0.5, "sockets": 0.5}
"""Largest growth per 100 iterations."""
ONCE = {"rss_bytes": 4 << 20}
"""And what may come once: a new arena of an allocator is no leak, and in a short run looks like one."""
SAMPLES = 40
KINDS = {
    "pasync.guard": "guard",
    "resource_tracker": "tracker",
    "spawn_main": "reward worker",
    "serve ": "server",
    "distributed.run": "torchrun",
}
"""By a part of the command line."""
Sample = dict[str, dict[str, int]]


def sample(run: str, launcher: psutil.Process) -> Sample:
    """The counts of every process by its name."""
    found = {}
    for process in (launcher, *launcher.children(recursive=False), *all_in_run(run)):
        with suppress(psutil.Error):
            found[name(process, launcher)] = {
                "rss_bytes": process.memory_info().rss,
                "open_files": process.num_fds(),
                "threads": process.num_threads(),
                "sockets": len(process.net_connections()),
            }
    return found


def name(process: psutil.Process, launcher: psutil.Process) -> str:
    """Kind and pid: a process that takes another's place is a new one."""
    words, rank = " ".join(process.cmdline()), process.environ().get("RANK")
    kind = "launcher" if process == launcher else f"rank-{rank}" if rank else "engine" if "EngineCore" in process.name() + words else None
    return f"{kind or next((kind for part, kind in KINDS.items() if part in words), process.name())} {process.pid}"


def iterations_done(run: Path) -> int:
    """Lines of metrics.jsonl."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def growth(samples: list[tuple[int, Sample]]) -> dict[str, dict[str, float]]:
    """Per 100 iterations, of those that were there from the first sample to the last."""
    quarter = max(1, len(samples) // 4)
    first, last = samples[:quarter], samples[-quarter:]
    stayed = set.intersection(*(set(counts) for _, counts in samples))
    return {
        who: {key: (_mean(last, who, key) - _mean(first, who, key)) / hundreds(samples) for key in BOUNDS} for who in sorted(stayed)
    }


def hundreds(samples: list[tuple[int, Sample]]) -> float:
    """Iterations between the middles of the quarters that `growth` compares, in hundreds."""
    quarter = max(1, len(samples) // 4)
    return (statistics.fmean(t for t, _ in samples[-quarter:]) - statistics.fmean(t for t, _ in samples[:quarter])) / 100


def _mean(samples: list[tuple[int, Sample]], who: str, key: str) -> float:
    return statistics.fmean(counts[who][key] for _, counts in samples)


def watch(run: Path, process: subprocess.Popen[bytes], warm_up: int, iterations: int) -> list[tuple[int, Sample]]:
    """SAMPLES samples until the last iteration."""
    samples: list[tuple[int, Sample]] = []
    launcher, due = psutil.Process(process.pid), float(warm_up)
    while process.poll() is None and len(samples) < SAMPLES:
        done = iterations_done(run)
        if done >= due:
            samples.append((done, sample(str(run), launcher)))
            due += (iterations - warm_up) / SAMPLES
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    return samples


def main() -> None:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--stub", action="store_true", help="servers without vLLM")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    warm_up = min(options.iterations // 2, 500)  # a rank was seen to take megabytes in its first 200, and no more
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        module = ["benchmarks.stub_run", "launch"] if options.stub else ["pasync.launch"]
        more = [*SMALL, *(STUB if options.stub else []), f"run.dir={run}", f"iterations={options.iterations}", *options.overrides]
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", *module, "configs/tiny_cpu.yaml", *more], stdout=sys.stderr, env=os.environ | {"STUB_S": "0.002"}
        )
        samples = watch(run, process, warm_up, options.iterations)
        if code := process.wait():
            raise SystemExit(code)
    print(json.dumps(report(samples) | {"iterations": options.iterations, "stub": options.stub, "seconds": time.monotonic() - began}))


def report(samples: list[tuple[int, Sample]]) -> dict[str, Any]:
    """The JSON line."""
    found = growth(samples)
    most = {key: bound + ONCE.get(key, 0) / hundreds(samples) for key, bound in BOUNDS.items()}
    over = {who: key for who, counts in found.items() for key, value in counts.items() if value > most[key]}
    return {"growth_per_100": found, "bounds": most, "over": over, "last": samples[-1][1], "flat": not over}


if __name__ == "__main__":
    main()
