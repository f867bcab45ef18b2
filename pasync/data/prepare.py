r"""Public data sets in the run's format: `python -m pasync.data.prepare NAME [--from FOLDER_OR_FILE] [--to configs/data]`.

    hub, or your folder --published files--> rows of "question" and "answer" --> <to>/<name>_<part>.jsonl
                                                                                 <to>/<name>.json   sha256 of all these files, and the
                                                                                                    template that fits the `math` reward

The same files give the same bytes. Answers stay as published: `math` reads plain values, LaTeX, and what follows a `####`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pasync.data.sources import Row, load_rows
from pasync.errors import ConfigError
from pasync.rewards.functions import LONGEST_ANSWER, reference
from pasync.sections import DatasetConfig

TEMPLATE = "{question}\nReason step by step and put the final answer into \\boxed{{}}."
"""`data.template` for all of them: `math` scores the last box."""


@dataclass(frozen=True)
class Published:
    """A data set on the hub; its answers are in the column "answer"."""

    repository: str
    files: dict[str, str]
    """The published file of each part."""
    question: str
    """Column of the questions."""


KNOWN = {
    "gsm8k": Published(
        "openai/gsm8k", {"train": "main/train-00000-of-00001.parquet", "test": "main/test-00000-of-00001.parquet"}, "question"
    ),
    "deepscaler": Published("agentica-org/DeepScaleR-Preview-Dataset", {"train": "deepscaler.json"}, "problem"),
    "aime24": Published("HuggingFaceH4/aime_2024", {"test": "data/train-00000-of-00001.parquet"}, "problem"),
    "math500": Published("HuggingFaceH4/MATH-500", {"test": "test.jsonl"}, "problem"),
}


def prepare(name: str, place: Path | None, to: Path) -> dict[str, int]:
    """Write one data set and its manifest; nothing is written unless all of it can be read.

    Args:
        name: one of KNOWN.
        place: folder that holds the published files, or the file itself; None fetches them from the hub.
        to: folder to write to, made if need be.

    Returns:
        Rows of each written file.

    Raises:
        ConfigError: a file is not there or cannot be had (says which to place where), or rows lack a column.
    """
    known = KNOWN[name]
    files = {part: _local(name, file, place) if place else _fetched(name, file, to) for part, file in known.files.items()}
    rows = {part: load_rows(name, DatasetConfig(source=str(file), prompt_column=known.question)) for part, file in files.items()}
    to.mkdir(parents=True, exist_ok=True)
    written: dict[str, dict[str, Any]] = {}
    for part, every in rows.items():
        usable = [row for row in every if _usable(row)]
        target = to / f"{name}_{part}.jsonl"
        plain = ({"question": str(row["question"]), "answer": str(row["answer"])} for row in usable)
        target.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in plain))
        written[target.name] = {"sha256": _sha256(target), "rows": len(usable), "left_out": len(every) - len(usable)}
    read = {known.files[part]: _sha256(file) for part, file in files.items()}
    manifest = {"repository": known.repository, "read": read, "written": written, "template": TEMPLATE}
    (to / f"{name}.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return {file: about["rows"] for file, about in written.items()}


def _usable(row: Row) -> bool:
    """Whether there is a question, and an answer that `math` would look at; a few published rows have none."""
    answer = "" if row["answer"] is None else reference(str(row["answer"]))
    return bool(row["question"]) and 0 < len(answer) <= LONGEST_ANSWER


def _local(name: str, file: str, place: Path) -> Path:
    """A published file, or the same part as .jsonl, .json or .parquet, in a user's folder."""
    if place.is_file() and len(KNOWN[name].files) == 1:
        return place
    base = Path(file).name
    part = base.split("-")[0].split(".")[0]
    names = [file, base, *(f"{part}{suffix}" for suffix in (".jsonl", ".json", ".parquet"))]
    found = next((place / n for n in names if (place / n).is_file()), None)
    if found is None:
        raise ConfigError(f"{name}: {place} holds none of {', '.join(dict.fromkeys(names))}")
    return found


def _fetched(name: str, file: str, to: Path) -> Path:
    """A published file from the hub, kept in its cache."""
    from huggingface_hub import hf_hub_download

    known = KNOWN[name]
    try:
        return Path(hf_hub_download(known.repository, file, repo_type="dataset"))
    except OSError as error:  # base of what the hub's client raises
        files = "\n".join(f"  {to / name / published}" for published in known.files.values())
        raise ConfigError(
            f"{name}: {known.repository} cannot be fetched from the hub ({type(error).__name__}). "
            f"Place its files by hand as\n{files}\nand run: python -m pasync.data.prepare {name} --from {to / name}"
        ) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(argv: list[str] | None = None) -> int:
    """Prepare one data set; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pasync.data.prepare", description="Write a public data set in the run's format.")
    parser.add_argument("name", choices=KNOWN)
    parser.add_argument("--from", dest="place", type=Path, metavar="FOLDER_OR_FILE", help="read the published files here, not on the hub")
    parser.add_argument("--to", type=Path, default=Path("configs/data"), metavar="FOLDER")
    args = parser.parse_args(argv)
    try:
        rows = prepare(args.name, args.place, args.to)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    for file, count in rows.items():
        print(f"{args.to / file}: {count} rows")
    print(f"{args.to / args.name}.json: checksums, and the template to use as data.template")
    return 0


if __name__ == "__main__":
    sys.exit(main())
