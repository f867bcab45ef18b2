"""What our code uses of vLLM, vllm-ascend and torch_npu, found without running it.

    import, class path in a string, torch.get_device_module --> value
        --assigned, passed, returned, unpacked, through all of pasync--> attribute, call = one Use

What an attribute or a call gives, rows.py says. Whatever cannot be followed into a call (an unpacked dict of unknown keys) becomes a Use
with a problem.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

from uses import Use
from walk import Walk

VARIABLE = re.compile(
    "(ASCEND|ATB|CPU_AFFINITY|CUBLAS|CUDA|GLOO|HCCL|HF|LCCL|MALLOC|NCCL|OMP|PYTORCH|RANK_TABLE|TASK_QUEUE|TOKENIZERS|TORCH|TORCHELASTIC|VLLM)"
    "_[A-Z0-9_]+"
)


def scan(sources: dict[str, tuple[str, str]], gives: Callable[[str], str | None]) -> set[Use]:
    """All uses in modules given as {dotted name: (file, source)}.

    Args:
        gives: class of what reading or calling a name of a library gives; None if nothing that matters.
    """
    walk = Walk(sources, gives)
    while walk.changed:
        walk.changed = False
        walk.run()
    walk.uses.clear()
    walk.run()
    return walk.uses


def package(root: Path) -> dict[str, tuple[str, str]]:
    """All modules of pasync below `root`."""
    found = {}
    for path in sorted((root / "pasync").rglob("*.py")):
        file = path.relative_to(root)
        parts = file.with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = (str(file), path.read_text())
    return found


def variables_named(source: str) -> set[str]:
    """Environment variables of libraries whose names stand in a source, on whatever branch."""
    constants = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return set(filter(VARIABLE.fullmatch, constants))
