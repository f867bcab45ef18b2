"""An unmodified Hugging Face causal LM that reads packed groups."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from pasync.config import ModelConfig
from pasync.model import shared_prompt


def load_model(config: ModelConfig, folder: Path) -> PreTrainedModel:
    """Read a checkpoint into host memory, in the training ranks' compute type, with attention over packed groups.

    Args:
        folder: of a Qwen2, Qwen3 or Llama-like model in Hugging Face format.

    Raises:
        ConfigError: the architecture is not one of these, or has sliding windows or dropout.
    """
    shared_prompt.check_supported(AutoConfig.from_pretrained(folder))
    implementation = shared_prompt.implementation(config.attention)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, config.dtype), attn_implementation=implementation)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()  # train mode only switches checkpointing on: these families have no dropout


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer."""
    return AutoTokenizer.from_pretrained(folder)
