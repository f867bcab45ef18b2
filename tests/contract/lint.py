"""Rules for our own source that follow from what torch_npu 2.10 lacks; everything wrong is one line of text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from scan import Use

MEMORY = r"empty_cache|memory_\w+|max_memory_\w+|reset_\w+|get_memory_info"
FORBIDDEN = {
    rf"torch\.accelerator\.({MEMORY})": "torch_npu 2.10 has no c10::DeviceAllocator; use torch.get_device_module",
    r"torch\.cuda\b.*": "would be another device on npu; use torch.get_device_module",
    r"torch\.nn\.attention\.flex_attention\b.*": "torch 2.10 allows it on cpu, cuda, xpu and hpu only",
}
DEVICE_SETTERS = ("to", "set_device")


def forbidden(uses: Iterable[Use]) -> list[str]:
    """Uses of torch that do not exist or do something else on npu."""
    found = ((use, why) for use in uses for name, why in FORBIDDEN.items() if re.fullmatch(name, use.key))
    return sorted(f"{use.where}: {use.key}: {why}" for use, why in found)


def bare_devices(source: str) -> list[str]:
    """Devices given as numbers: torch takes a bare number for an index of its default accelerator, which need not be npu."""
    found = []
    for call in _calls(source):
        name = ast.unparse(call.func).split(".")[-1]
        given = [*(call.args[:1] if name in DEVICE_SETTERS else []), *(k.value for k in call.keywords if k.arg == "device")]
        if any(isinstance(value, ast.Constant) and type(value.value) is int for value in given):
            found.append(f"line {call.lineno}: {ast.unparse(call)[:80]}")
    return found


def float_masks(source: str) -> list[str]:
    """Attention masks that are not visibly made with dtype=torch.bool in the function that passes them: on npu others cost memory of
    rows x keys, and transformers would read them as bool."""
    found = []
    for function in (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)):
        assignments = [n for n in ast.walk(function) if isinstance(n, ast.Assign)]
        assigned = {ast.unparse(target): ast.unparse(a.value) for a in assignments for target in a.targets}
        for call in (n for n in ast.walk(function) if isinstance(n, ast.Call)):
            if ast.unparse(call.func).split(".")[-1] == "scaled_dot_product_attention":
                found += [f"line {call.lineno}: {mask}" for mask in _masks(call) if "dtype=torch.bool" not in assigned.get(mask, mask)]
    return found


def imported(source: str, library: str) -> set[tuple[str, str]]:
    """(module, name) of what a source imports from a library."""
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom) and (n.module or "").split(".")[0] == library]
    return {(str(node.module), alias.name) for node in nodes for alias in node.names}


def _masks(call: ast.Call) -> Iterator[str]:
    """The attn_mask argument: by name, or what follows query, key and value."""
    starred = [i for i, a in enumerate(call.args) if isinstance(a, ast.Starred)]
    yield from (ast.unparse(a) for a in call.args[starred[0] + 1 if starred else 3 :][:1])
    yield from (ast.unparse(k.value) for k in call.keywords if k.arg == "attn_mask")


def _calls(source: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
