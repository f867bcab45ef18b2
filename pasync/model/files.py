"""Weights of a Hugging Face checkpoint, of which each process reads only what it holds.

    model.safetensors, or model-0000x-of-y.safetensors with an index --part()--> a weight, or this process's slice of it

Reading maps the file, so nothing but the part asked for takes memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from pasync.errors import ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightFiles:
    """The safetensors files of a folder, open while in the block.

    Raises:
        ConfigError: there are none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._open = folder, ExitStack()
        self._handles: dict[str, Any] = {}
        if (folder / INDEX).is_file():
            self._places: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        else:
            self._places = dict.fromkeys(self._handle(SINGLE).keys(), SINGLE)

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.close()

    def part(self, name: str, dim: int | None, index: int, count: int) -> Tensor:
        """Part `index` of `count` equal ones of a weight along `dim`; all of it if `dim` is None. In the memory of the mapped file.

        Raises:
            ConfigError: the checkpoint has no such weight.
        """
        if name not in self._places:
            raise ConfigError(f"model.path={self._folder}: the checkpoint has no weight {name}")
        stored = self._handle(self._places[name]).get_slice(name)
        if dim is None:
            return stored[:]
        size = stored.get_shape()[dim] // count
        return stored[(slice(None),) * dim + (slice(index * size, (index + 1) * size),)]

    def fill(self, module: nn.Module, weights: Mapping[str, tuple[str, int | None]], index: int, count: int) -> None:
        """Replace a module's empty parameters by part `index` of `count` of the checkpoint's weights, in the types that they have.

        Args:
            weights: of each of `module.named_parameters()`, the name in the checkpoint and the dimension along which it is cut.
        """
        made: dict[nn.Parameter, nn.Parameter] = {}
        for name, p in module.named_parameters():
            stored, dim = weights[name]
            part = self.part(stored, dim, index, count).to(p.dtype, copy=True)  # the file's own memory would be another model's too
            if part.shape != p.shape:
                said = f"its config.json says {list(p.shape)}"
                raise ConfigError(f"model.path={self._folder}: {stored} is of {list(part.shape)}, {said}")
            made[p] = nn.Parameter(part, p.requires_grad)
        module.load_state_dict({key: made[p] for key, p in module.state_dict(keep_vars=True).items()}, assign=True)  # tied ones stay one

    def _handle(self, file: str) -> Any:
        if file not in self._handles:
            if not (self._folder / file).is_file():
                raise ConfigError(f"model.path={self._folder}: there is no {file}; weights must be in safetensors files")
            self._handles[file] = self._open.enter_context(safe_open(self._folder / file, framework="pt"))
        return self._handles[file]
