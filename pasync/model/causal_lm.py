"""An unmodified Hugging Face causal LM that reads packed groups."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from pasync.config import ModelConfig
from pasync.data.packing import MicroBatch
from pasync.model import shared_prompt
from pasync.model.logprob import token_logprobs


def load_model(config: ModelConfig, folder: Path, device: torch.device) -> PreTrainedModel:
    """Read a checkpoint in the training ranks' compute type, with attention over packed groups.

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
    torch.nn.Module.to(model, device)
    return model.train()  # train mode only switches checkpointing on: these families have no dropout


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer."""
    return AutoTokenizer.from_pretrained(folder)


def response_logprobs(model: PreTrainedModel, batch: MicroBatch, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of all response tokens of a micro-batch, and entropies.

    Only the rows that predict a response token reach the LM head. With a model that is cut over processes (see
    `pasync.parallel.tensor`) a collective, forward and backward; all get the same results.

    Args:
        batch: on the model's device.
        temperature: the sampling temperature.

    Returns:
        ([N] float32 with gradient, [N] float32 without).
    """
    # any other attention would ignore the layout without a word, and be wrong
    assert model.config._attn_implementation in map(shared_prompt.implementation, shared_prompt.KINDS)
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    output = decoder(
        input_ids=batch.input_ids[None],
        position_ids=batch.layout.positions[None],
        use_cache=False,
        shared_prompt=batch.layout,
    )
    hidden = output.last_hidden_state[0].index_select(0, batch.layout.rows)  # [N, E]
    peers = getattr(head, "peers", None)  # of a head that holds a slice of the vocabulary
    return token_logprobs(hidden, head.weight, batch.targets, temperature=temperature, peers=peers)
