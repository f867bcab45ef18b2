"""Reference pages, made from the code: `python -m pasync.reference docs`.

    config.Config   --> docs/config.md      every key with its values, its default and its docstring
    metrics.METRICS --> docs/metrics.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pasync.config import Config
from pasync.observe.metrics import METRICS

LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def pages() -> dict[str, str]:
    """Name and text of every page."""
    rows = [(f"`{key}`", text) for key, text in METRICS.items()]
    metrics = "# Metrics\n\nOne line of `metrics.jsonl` per iteration.\n\n" + _table(("key", "meaning"), rows)
    return {"config.md": _config(), "metrics.md": metrics}


def _config() -> str:
    schema = Config.model_json_schema()
    sections = {"A run": schema, **_sections(schema, schema["$defs"], "")}
    named: dict[str, list[str]] = {}  # a kind of section may stand in several places
    for place, section in sections.items():
        named.setdefault(section["title"], []).append(place)
    page = "# Configuration\n\nAny key can be replaced on the command line, by its section's name and its own: `optimizer.lr=1e-6`.\n"
    for places in named.values():
        section = sections[places[0]]
        rows = [_row(key, about, section) for key, about in section["properties"].items() if not _reference(about)]
        page += f"\n## {', '.join(places)}\n\n" * bool(rows) + _table(("key", "values", "default", "meaning"), rows) * bool(rows)
    return page


def _sections(section: dict[str, Any], known: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The sections in a section, by their dotted names, each followed by those in it."""
    found: dict[str, Any] = {}
    for key, about in section["properties"].items():
        if name := _reference(about):
            found |= {prefix + key: known[name]} | _sections(known[name], known, f"{prefix}{key}.")
    return found


def _row(key: str, about: dict[str, Any], section: dict[str, Any]) -> tuple[str, ...]:
    default = "required" if key in section.get("required", []) else f"`{json.dumps(about['default'])}`"
    return f"`{key}`", ", ".join(_values(about)), default, " ".join(about.get("description", "").split())


def _values(about: dict[str, Any]) -> Iterator[str]:
    """What a key may be."""
    for option in about.get("anyOf", []):
        yield from _values(option)
    if "enum" in about:
        yield from (f"`{value}`" for value in about["enum"])
    elif kind := about.get("type"):
        limits = "".join(f" {sign} {about[name]:,}" for name, sign in LIMITS.items() if name in about)
        items = f" of {', '.join(_values(about['items']))}" if about.get("items") else ""
        yield kind + items + limits


def _reference(about: dict[str, Any]) -> str:
    """Name of the section that stands there, "" for a plain value."""
    for option in (about, *about.get("anyOf", [])):
        if "$ref" in option:
            return str(option["$ref"]).rpartition("/")[2]
    return ""


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    for name, text in pages().items():
        Path(sys.argv[1], name).write_text(text, encoding="utf-8")
