"""The NPUs of this machine, as the vendor's `npu-smi` tells them. No torch, no driver library.

    npu-smi info -m              --> NPU id, chip id --> logic id, which ASCEND_RT_VISIBLE_DEVICES and torch count by
    npu-smi info -t health -i N  --> OK, Warning (minor), Alarm (major), Critical, UNKNOWN
    npu-smi info                 --> processes on every chip

In a container logic ids count from 0 whichever NPUs it was given, NPU ids are those of the host.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from functools import cache

ANSWER_S = 30.0
"""Longest wait for one answer; a driver in trouble may never give it."""
_CHIP = re.compile(r"^\s*(\d+)\s+(\d+)\s+(\d+)\s+\S", re.MULTILINE)
_HEALTH = re.compile(r"^\s*Health[^:\n]*:\s*(\w+)", re.MULTILINE)
_PROCESS = re.compile(r"^\|\s*(\d+)\s+(\d+)\s*\|\s*(\d+)\s*\|([^|]*)\|\s*(\d+)\s*\|", re.MULTILINE)

Chip = tuple[int, int]
"""NPU id, chip id."""


@dataclass(frozen=True)
class Npu:
    """One chip."""

    logic_id: int
    health: str
    users: list[str]
    """Processes that hold memory on it, in words."""


@cache
def npus() -> list[Npu]:
    """All NPUs by logic id; none where there is no `npu-smi` or it has nothing to say. Asked once per process."""
    logic_ids = chips(_ask("-m"))
    if not logic_ids:
        return []
    healths = {npu: health(_ask("-t", "health", "-i", str(npu))) for npu in {npu for npu, _ in logic_ids}}
    on_chip = users(_ask())
    return sorted((Npu(logic, healths[chip[0]], on_chip.get(chip, [])) for chip, logic in logic_ids.items()), key=lambda n: n.logic_id)


def chips(text: str) -> dict[Chip, int]:
    """Logic id of every chip that has one (the card's controller has none), from `npu-smi info -m`."""
    return {(int(npu), int(chip)): int(logic) for npu, chip, logic in _CHIP.findall(text)}


def health(text: str) -> str:
    """The state in `npu-smi info -t health`; of several chips the first that is not OK; UNKNOWN if there is none."""
    states = _HEALTH.findall(text) or ["UNKNOWN"]
    return next((state for state in states if state != "OK"), "OK")


def users(text: str) -> dict[Chip, list[str]]:
    """Processes on every chip that has any, from the second table of `npu-smi info`."""
    found: dict[Chip, list[str]] = {}
    for npu, chip, pid, name, megabytes in _PROCESS.findall(text):
        words = f"pid {pid}{f' ({name.strip()})' if name.strip() else ''} with {megabytes} MB"
        found.setdefault((int(npu), int(chip)), []).append(words)
    return found


def _ask(*arguments: str) -> str:
    """What `npu-smi info` answers; nothing if it is not there, fails, or is late."""
    try:
        answer = subprocess.run(["npu-smi", "info", *arguments], capture_output=True, text=True, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""
