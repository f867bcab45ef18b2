"""The configuration file: read once by every process, written once by the launcher.

    YAML file + "a.b=c" overrides --load()--> Config --save()--> <run>/config.yaml, itself loadable

Every problem is found before anything starts and all are reported together: unknown keys, wrong types,
and combinations that cannot work.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from pasync.config import Config
from pasync.conflicts import conflicts
from pasync.errors import ConfigError, nearest
from pasync.sections import PREPARED, DatasetConfig

Dataset = TypeVar("Dataset", bound=DatasetConfig)


def load(path: str | Path, overrides: list[str] | None = None, further: Callable[[Config], list[str]] = lambda _: []) -> Config:
    """Read a configuration file and apply `key.sub=value` overrides.

    Args:
        path: YAML file.
        overrides: for instance ["optimizer.lr=1e-6", "data.eval=null"]; values are YAML.
        further: checks that know more than the tree, such as this machine's devices; returns problems.

    Raises:
        ConfigError: lists every problem, each with its key, value, what is allowed, and the nearest valid name.
    """
    path = Path(path)
    try:
        raw = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: holds {type(raw).__name__}, must be a mapping of keys to values")
    problems: list[str] = []
    tree = _known(_merge(raw, overrides or []), Config, "", problems)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_report(problems + _type_problems(error))) from None
    config = _with_absolute_paths(config, path.resolve().parent)
    problems += conflicts(config) + further(config)
    if problems:
        raise ConfigError(_report(problems))
    return config


def save(config: Config, path: Path) -> None:
    """Write the resolved tree as YAML that `load` reads back to an equal Config."""
    path.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


def _merge(raw: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    wrong = [o for o in overrides if "=" not in o or o.startswith("=")]
    if wrong:
        raise ConfigError(_report([f"{o}: an override must look like key.sub=value" for o in wrong]))
    try:
        tree = OmegaConf.merge(OmegaConf.create(raw), OmegaConf.from_dotlist(overrides))
        merged = OmegaConf.to_container(tree, resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"cannot apply overrides {overrides}: {error}") from error
    assert isinstance(merged, dict)
    return {str(key): value for key, value in merged.items()}


def _known(tree: dict[str, Any], section: type[BaseModel], prefix: str, problems: list[str]) -> dict[str, Any]:
    """The tree without unknown keys, which are added to `problems`, so that the rest can be checked all the same."""
    known: dict[str, Any] = {}
    for key, value in tree.items():
        field = section.model_fields.get(key)
        if field is None:
            allowed = section.model_fields
            problems.append(f"{prefix}{key}={value}: unknown key, allowed are {', '.join(allowed)}{nearest(key, allowed)}")
            continue
        kinds = (field.annotation, *get_args(field.annotation))
        inner = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
        named = next((members[1] for k in kinds if get_origin(k) is dict and issubclass((members := get_args(k))[1], BaseModel)), None)
        if inner and isinstance(value, dict):
            value = _known(value, inner, f"{prefix}{key}.", problems)
        elif named and isinstance(value, dict):
            value = {n: _known(v, named, f"{prefix}{key}.{n}.", problems) if isinstance(v, dict) else v for n, v in value.items()}
        known[key] = value
    return known


def _type_problems(error: ValidationError) -> list[str]:
    rows = []
    for e in error.errors():
        key = ".".join(map(str, e["loc"]))
        allowed = e.get("ctx", {}).get("expected", "")
        hint = nearest(e["input"], str(allowed).replace("'", "").replace(" or ", ", ").split(", ")) if e["type"] == "literal_error" else ""
        given = "" if e["type"] == "missing" else f"={e['input']}"
        rows.append(f"{key}{given}: {e['msg'][0].lower() + e['msg'][1:]}{hint}")
    return rows


def _report(problems: list[str]) -> str:
    return f"{len(problems)} problem{'s' * (len(problems) > 1)} in the configuration:\n" + "\n".join(f"  {p}" for p in problems)


def _with_absolute_paths(config: Config, base: Path) -> Config:
    """Make dataset and model paths independent of the working folder, so the saved copy loads from anywhere."""
    def absolute(text: str) -> str:
        return str((base / text).resolve()) if (base / text).exists() else text

    def dataset(d: Dataset, part: str) -> Dataset:
        prepared = base / "data" / f"{d.source}_{part}.jsonl"
        return d.model_copy(update={"source": str(prepared.resolve()) if d.source in PREPARED else absolute(d.source)})

    held_out = config.data.eval and {name: dataset(d, "test") for name, d in config.data.eval.items()}
    data = config.data.model_copy(update={"train": dataset(config.data.train, "train"), "eval": held_out})
    model = config.model.model_copy(update={"path": absolute(config.model.path)})
    replayed = config.replayed_run
    source = f"replay:{replayed.resolve()}" if replayed else config.rollout.source  # of the working folder: it is typed, not written
    rollout = config.rollout.model_copy(update={"source": source})
    return config.model_copy(update={"data": data, "model": model, "rollout": rollout})
