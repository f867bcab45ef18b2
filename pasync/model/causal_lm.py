"""An unmodified Hugging Face causal LM that reads packed groups."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from pasync.model import shared_prompt
from pasync.sections import ModelConfig


def empty_model(config: ModelConfig, folder: Path) -> PreTrainedModel:
    """A checkpoint's model in the training ranks' compute type, with attention over packed groups, but without its weights.

    Parameters have shapes and no memory (device "meta"); buffers, which are functions of the configuration, are there.

    Args:
        folder: of a Qwen2, Qwen3 or Llama-like model in Hugging Face format.

    Raises:
        ConfigError: the architecture is not one of these, or has sliding windows or dropout.
    """
    settings = AutoConfig.from_pretrained(folder)
    shared_prompt.check_supported(settings)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            settings, dtype=getattr(torch, config.dtype), attn_implementation=shared_prompt.implementation(config.attention)
        )
    model.tie_weights()
    if (folder / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()  # train mode only switches checkpointing on: these families have no dropout


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer."""
    return AutoTokenizer.from_pretrained(folder)
