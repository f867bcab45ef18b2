"""The part of a causal LM that one pipeline stage holds; a pipeline of one stage holds the whole model.

    token ids --> [embedding, layers 0 .. a] --hidden [T, E]--> [layers a .. b] --> .. --> [layers .. L, norm, head] --> log-probs [N]

Modules are those of the unmodified Hugging Face model, under their own names, so weights of all stages together are its checkpoint.

Letters: T packed tokens, N response tokens, E hidden size, L layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pasync.data.packing import MicroBatch
from pasync.errors import ConfigError
from pasync.model import shared_prompt
from pasync.model.logprob import token_logprobs


class Stage(nn.Module):
    """Stage `index` of `count` of a Qwen2, Qwen3 or Llama model.

    It refers to modules of `model`; once the caller drops `model`, the other stages' part is freed. Gradient checkpointing and train
    mode stay as they were set on the model.

    Raises:
        ConfigError: the model has fewer layers than there are stages.
    """

    hidden_size: int
    """E."""
    dtype: torch.dtype
    """Of hidden states."""
    lm_head: nn.Linear | None

    def __init__(self, model: PreTrainedModel, index: int, count: int) -> None:
        super().__init__()
        # any other attention would ignore the layout without a word, and be wrong
        assert model.config._attn_implementation in map(shared_prompt.implementation, shared_prompt.KINDS)
        first, last = index == 0, index == count - 1
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        self.hidden_size, self.dtype = model.config.hidden_size, model.dtype
        self.model = _Decoder(model.get_decoder(), _layers_of(model, index, count), first=first, last=last)
        self.lm_head = head if last else None
        self._head_is_copied = head.weight is embedding.weight and first != last

    @property
    def tied_weight(self) -> Tensor | None:
        """Where the head is the embedding, and first and last of several stages each hold a copy: that copy; else None.

        Both must step by the sum of their gradients. On the last stage its name is `lm_head.weight`, which the checkpoint does not have.
        """
        if not self._head_is_copied:
            return None
        holder = self.model.embed_tokens if self.lm_head is None else self.lm_head
        assert holder is not None
        return holder.weight

    def forward(self, batch: MicroBatch, hidden: Tensor | None = None) -> Tensor:
        """Go through this stage's layers, up to the final norm.

        Args:
            batch: on the model's device.
            hidden: [T, E] from the stage before; None on the first, which begins with the batch's token ids.

        Returns:
            [T, E].
        """
        return self._through_layers(batch, hidden)

    def _through_layers(self, batch: MicroBatch, hidden: Tensor | None) -> Tensor:
        positions = batch.layout.positions[None]  # [1, T]
        if self.model.embed_tokens is not None:
            hidden = self.model.embed_tokens(batch.input_ids)
        assert hidden is not None
        hidden = hidden[None]  # [1, T, E]
        rotary = self.model.rotary_emb(hidden, positions)
        for layer in self.model.layers.values():
            result = layer(
                hidden,
                attention_mask=None,
                position_ids=positions,
                position_embeddings=rotary,
                use_cache=False,
                shared_prompt=batch.layout,
            )
            hidden = result[0] if isinstance(result, tuple) else result
        return hidden[0]

    def logprobs(self, batch: MicroBatch, hidden: Tensor | None = None, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs of all response tokens, and entropies. Only on the last stage.

        Args:
            batch, hidden: as in `forward`.
            temperature: the sampling temperature.

        Returns:
            two of [N] float32, with gradient.
        """
        assert self.lm_head is not None and self.model.norm is not None
        rows = self.model.norm(self._through_layers(batch, hidden)).index_select(0, batch.layout.rows)  # [N, E]
        peers = getattr(self.lm_head, "peers", None)  # of a head that holds a slice of the vocabulary
        return token_logprobs(rows, self.lm_head.weight, batch.targets, temperature=temperature, peers=peers)


class _Decoder(nn.Module):
    """Of transformers' decoder what a stage holds; layers keep their numbers."""

    embed_tokens: nn.Embedding | None
    norm: nn.Module | None
    rotary_emb: nn.Module

    def __init__(self, whole: Any, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.embed_tokens = whole.embed_tokens if first else None
        self.layers = nn.ModuleDict({str(i): whole.layers[i] for i in layers})
        self.norm = whole.norm if last else None
        self.rotary_emb = whole.rotary_emb


def split_layers(layers: int, count: int, *, head: float) -> list[range]:
    """Layers of every stage: at least one, and about equal work, counting the LM head as so many layers.

    Raises:
        ConfigError: there are fewer layers than stages.
    """
    if layers < count:
        raise ConfigError(f"{count} pipeline stages need at least {count} layers, the model has {layers}")
    even = [round(stage * (layers + head) / count) for stage in range(count + 1)]
    starts = [min(max(at, stage), layers - count + stage) for stage, at in enumerate(even)]
    return [range(a, b) for a, b in zip(starts, starts[1:], strict=False)]


def _layers_of(model: PreTrainedModel, index: int, count: int) -> range:
    """Work goes with the number of weights: every token meets each of them once."""
    layers, head = model.get_decoder().layers, model.get_output_embeddings()
    in_layer = sum(p.numel() for p in layers[0].parameters())
    return split_layers(len(layers), count, head=head.weight.numel() / in_layer)[index]
