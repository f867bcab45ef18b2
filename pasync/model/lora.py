"""Low-rank adapters by peft: W + (alpha / r) B A, of which only A [r, in] and B [out, r] are trained (LoRA, arXiv 2106.09685).

    policy      adapters on                 reference   the same modules, adapters off
    servers     whole weights, merged       <run>/adapter   A and B as peft saves them

Servers get merged weights, so they need to know nothing of adapters and every check of the weight transfer holds. In bfloat16 the
merged weight is rounded once more than what the trainer computes with; `policy/engine_logprob_gap` shows how little that is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import Tensor, nn

from pasync.errors import ConfigError
from pasync.model.stage import Stage
from pasync.sections import LoraConfig

A, B = (f".lora_{part}.default.weight" for part in "AB")


def add_adapters(stage: Stage, config: LoraConfig, seed: int) -> dict[str, nn.Parameter]:
    """Put an adapter beside every target layer and freeze all else. Before the first step it changes nothing, as B is zero.

    Args:
        seed: of A; the same on all replicas.

    Returns:
        The adapters' parameters, by names that `merged` understands.

    Raises:
        ConfigError: the model has no layer of a target's name.
    """
    names = {name.rpartition(".")[2] for name, module in stage.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    if absent := set(config.targets) - names:
        raise ConfigError(f"lora.targets={sorted(absent)}: the model has no such layers, allowed are {', '.join(sorted(names))}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(_peft_config(config), stage)
    return {name: p for name, p in stage.named_parameters() if p.requires_grad}


def merged(name: str, weight: Tensor, adapters: Mapping[str, Tensor], config: LoraConfig) -> Tensor:
    """W + (alpha / r) B A in the weight's type, added up in float32; the weight itself if it has no adapter.

    Args:
        name: of the weight in the checkpoint.
        adapters: from `add_adapters`, or the like.
    """
    layer = name.removesuffix(".weight")
    if layer + A not in adapters:
        return weight
    low, high = (adapters[layer + part].detach().float() for part in (A, B))  # [r, in], [out, r]
    return torch.addmm(weight.detach().float(), high, low, alpha=config.alpha / config.rank).to(weight.dtype)


class AdaptersOff:
    """A stage as it was before training."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._layers = [module for module in stage.modules() if isinstance(module, LoraLayer)]

    def __call__(self, *args: Any) -> Tensor:
        """As the stage's."""
        with self._off():
            return self._stage(*args)

    def logprobs(self, *args: Any, **more: Any) -> tuple[Tensor, Tensor]:
        """As the stage's."""
        with self._off():
            return self._stage.logprobs(*args, **more)

    @contextmanager
    def _off(self) -> Iterator[None]:
        for layer in self._layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.enable_adapters(True)


def save_adapters(folder: Path, adapters: Mapping[str, Tensor], config: LoraConfig, base: Path) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained(base model, folder)` reads."""
    folder.mkdir(exist_ok=True)
    weights = {f"base_model.model.{name.replace('.default', '')}": p.detach().cpu().contiguous() for name, p in adapters.items()}
    save_file(weights, folder / SAFETENSORS_WEIGHTS_NAME)
    settings = _peft_config(config)
    settings.base_model_name_or_path, settings.inference_mode = str(base), True
    settings.save_pretrained(str(folder))


def _peft_config(config: LoraConfig) -> peft.LoraConfig:
    return peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=list(config.targets), task_type="CAUSAL_LM")
