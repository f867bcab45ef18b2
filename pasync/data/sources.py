"""Rows of a data set as plain dicts, from a generator or from files.

    reasoning-gym:<task> | .jsonl | .json | .parquet | folder of save_to_disk  -->  [{"question": .., "answer": .., other columns}]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from pasync.errors import ConfigError, nearest
from pasync.sections import DatasetConfig

Scalar = str | int | float | bool | None
Row = dict[str, Scalar]

GENERATOR = "reasoning-gym:"
INTEGERS = range(-(1 << 63), 1 << 64)
"""What msgpack can carry; a larger integer becomes text."""


def load_rows(key: str, dataset: DatasetConfig) -> list[Row]:
    """Read a data set; every row has "question" and "answer" besides its own columns.

    Values are scalars that survive the wire: lists and mappings become JSON text, and text is valid UTF-8.

    Args:
        key: where the data set stands in the config, for messages: `data.train`.

    Raises:
        ConfigError: it cannot be read, is empty, or lacks a named column.
    """
    try:
        rows = [_row(key, dataset, raw) for raw in islice(_open(key, dataset), dataset.size)]
    except OSError as error:
        raise ConfigError(f"{key}.source={dataset.source}: cannot be read: {error}") from error
    if not rows:
        raise ConfigError(f"{key}.source={dataset.source}: has no rows, at least one is needed")
    return rows


def _open(key: str, dataset: DatasetConfig) -> Iterator[dict[str, Any]]:
    if dataset.source.startswith(GENERATOR):
        return _generated(key, dataset)
    path = Path(dataset.source)
    readers: dict[str, Callable[[str, Path], Iterator[dict[str, Any]]]] = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}
    reader = _saved if path.is_dir() else readers.get(path.suffix)
    if reader is None or not path.exists():
        what = "there is no such file or folder" if reader else "unknown kind of source"
        neighbours = [str(p) for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = nearest(dataset.source, [GENERATOR, *neighbours])
        raise ConfigError(
            f"{key}.source={dataset.source}: {what}, must be {GENERATOR}<task>, .jsonl, .json, .parquet or a save_to_disk folder{hint}"
        )
    return reader(key, path)


def _generated(key: str, dataset: DatasetConfig) -> Iterator[dict[str, Any]]:
    import reasoning_gym  # over a second, and only this source needs it
    from reasoning_gym.factory import DATASETS

    task = dataset.source.removeprefix(GENERATOR)
    if task not in DATASETS:
        raise ConfigError(f"{key}.source={dataset.source}: reasoning-gym has no task {task}{nearest(task, DATASETS)}")
    try:
        problems = reasoning_gym.create_dataset(task, size=dataset.size, seed=dataset.seed, **dataset.options)
        return iter([problems[i] for i in range(len(problems))])  # within the try: some options fail only when used
    except (TypeError, ValueError, AssertionError) as error:
        options = list(DATASETS[task][1].__dataclass_fields__)
        hint = "".join(nearest(option, options) for option in dataset.options if option not in options)
        raise ConfigError(f"{key}.options={dataset.options}: {task} allows {', '.join(options)}; it says: {error}{hint}") from error


def _jsonl(key: str, path: Path) -> Iterator[dict[str, Any]]:
    """Lines end at the newline byte only: U+2028 may stand inside a string."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{key}.source={path}: line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{key}.source={path}: line {number} holds {type(row).__name__}, must be an object with columns")
            yield row


def _json(key: str, path: Path) -> Iterator[dict[str, Any]]:
    """One array of rows."""
    try:
        rows = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{key}.source={path}: is not JSON: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{key}.source={path}: holds {type(rows).__name__}, must be an array of objects with columns")
    return iter(rows)


def _parquet(key: str, path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{key}.source={path}: is not a Parquet file: {error}") from error


def _saved(key: str, path: Path) -> Iterator[dict[str, Any]]:
    import datasets

    try:
        saved = datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        raise ConfigError(f"{key}.source={path}: was not written by datasets.save_to_disk: {error}") from error
    if isinstance(saved, datasets.DatasetDict):
        raise ConfigError(f"{key}.source={path}: holds the splits {', '.join(saved)}, name the folder of one: {path / next(iter(saved))}")
    return iter(saved)


def _row(key: str, dataset: DatasetConfig, raw: dict[str, Any]) -> Row:
    for option, column in (("prompt_column", dataset.prompt_column), ("answer_column", dataset.answer_column)):
        if column not in raw:
            raise ConfigError(f"{key}.{option}={column}: no such column, there are {', '.join(raw)}{nearest(column, raw)}")
    named = {"question": raw[dataset.prompt_column], "answer": raw[dataset.answer_column]}
    return {_utf8(name): _scalar(value) for name, value in {**raw, **named}.items()}


def _scalar(value: Any) -> Scalar:
    if isinstance(value, str):
        return _utf8(value)
    if value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and value in INTEGERS):
        return value
    return _utf8(json.dumps(value, ensure_ascii=False, default=str))


def _utf8(text: str) -> str:
    r"""Replace lone surrogates, which JSON can spell (\ud800) but UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()
