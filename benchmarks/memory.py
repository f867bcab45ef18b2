"""CPU time and peak memory of a piece of work in this process, on fresh memory or on memory that the process keeps. For glibc."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")
libc = ctypes.CDLL("libc.so.6")


def own_pages() -> None:
    """Every tensor from here on is mapped by itself and unmapped when freed, so that the peak is what was alive."""
    libc.mallopt(-4, 1 << 16)  # M_MMAP_MAX: as many mappings as needed
    libc.mallopt(-3, 1 << 14)  # M_MMAP_THRESHOLD: bytes


def keep_memory() -> None:
    """Freed memory stays in the process from here on, as in the environment that pasync gives its ranks. Cannot be undone."""
    libc.mallopt(-4, 0)  # M_MMAP_MAX
    libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: never


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Of this process, in user and system mode."""
    gc.collect()
    began = time.process_time()
    work()
    return time.process_time() - began


def on_fresh_memory(work: Callable[[], Result]) -> tuple[float, int, Result]:
    """(CPU seconds, peak of resident bytes over those before, result), all free memory given back to the system first."""
    gc.collect()
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the present size
    before = _status_bytes("VmRSS")
    began = time.process_time()
    result = work()
    return time.process_time() - began, _status_bytes("VmHWM") - before, result


def _status_bytes(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024
