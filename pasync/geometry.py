"""Sizes of a model, from its config.json alone. No torch.

    config.json --read_geometry--> Geometry --> numbers of weights, what a layer keeps for the backward pass

Letters: E hidden size, I intermediate size, H query heads, G key/value heads, D head size, V vocabulary, s bytes of a number.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pasync.errors import ConfigError

REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class Geometry:
    """Sizes of a Qwen2, Qwen3 or Llama model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool
    """The LM head is the embedding."""
    input_bias: bool
    """Of q, k and v."""
    output_bias: bool
    """Of o."""
    mlp_bias: bool
    head_norms: bool
    """q and k are normalised per head (Qwen3)."""

    @property
    def num_parameters(self) -> int:
        """Numbers in the checkpoint, a tied head counted once: V E embedding, V E head, E last norm, and the layers."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden + self.layers * self.layer_parameters

    def stage_parameters(self, stages: int) -> int:
        """Of the largest pipeline stage: its layers, and embedding or head."""
        if stages == 1:
            return self.num_parameters
        return -(-self.layers // stages) * self.layer_parameters + self.vocabulary * self.hidden + self.hidden

    @property
    def layer_parameters(self) -> int:
        """Numbers in one decoder layer.

        2 E norms, (H + 2 G) D E in q, k and v, H D E in o, 3 E I in gate, up and down, and the biases and 2 D of head norms that the
        family has.
        """
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        weights = self.hidden * (2 + queries + 2 * keys + queries + 3 * self.intermediate) + self.head_norms * 2 * self.head_size
        attention_biases = self.input_bias * (queries + 2 * keys) + self.output_bias * self.hidden
        mlp_biases = self.mlp_bias * (2 * self.intermediate + self.hidden)
        return weights + attention_biases + mlp_biases

    def adapter_parameters(self, rank: int, targets: list[str]) -> int:
        """Numbers in the adapters of all layers: r (in + out) of each target."""
        queries, keys, hidden = self.heads * self.head_size, self.kv_heads * self.head_size, self.hidden
        sides = {"q_proj": hidden + queries, "k_proj": hidden + keys, "v_proj": hidden + keys, "o_proj": queries + hidden}
        sides |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), hidden + self.intermediate)
        return self.layers * rank * sum(sides.get(target, 0) for target in targets)

    @property
    def largest_tensor(self) -> int:
        """Numbers in the largest weight."""
        return max(self.vocabulary * self.hidden, self.hidden * self.intermediate, self.hidden * self.heads * self.head_size)

    def layer_row_bytes(self, item_bytes: int, shards: int = 1) -> int:
        """What autograd keeps of one decoder layer for one row until the backward pass, as transformers writes these layers.

        Tensor-parallel shards keep the norms whole and their part of the rest.

        norms      2 (4 + 2 s) E           its input in float32, normalised, scaled (which q, k, v, gate and up share)
        attention  2 s (H + G) D + 4 H     q, k, v, output, and the float32 log-sum-exp
        head norms (4 + s) (H + G) D       input in float32, normalised; Qwen3 only
        MLP        4 s I                   gate, silu(gate), up, their product
        """
        heads = (self.heads + self.kv_heads) * self.head_size
        cut = self.head_norms * (4 + item_bytes) * heads + 2 * item_bytes * heads + 4 * self.heads + 4 * item_bytes * self.intermediate
        return 2 * (4 + 2 * item_bytes) * self.hidden + cut // shards


PUBLISHED = {
    "Qwen2.5-7B-Instruct": Geometry(3584, 18944, 28, 28, 4, 128, 152064, False, True, False, False, False),
    "Qwen3-8B": Geometry(4096, 12288, 36, 32, 8, 128, 151936, False, False, False, False, True),
    "DeepSeek-R1-Distill-Qwen-32B": Geometry(5120, 27648, 64, 40, 8, 128, 152064, False, True, False, False, False),
}
"""Models of configs/ by the name of their folder, as their config.json says: they can be planned for before they are there."""


def read_geometry(folder: Path) -> Geometry:
    """Sizes of the model in `folder`, from its config.json.

    Raises:
        ConfigError: there is none, or it is of another family.
    """
    try:
        settings: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={folder}: {error}") from None
    missing = [key for key in REQUIRED if not isinstance(settings.get(key), int)]
    family = settings.get("model_type")
    if missing or family not in ("qwen2", "qwen3", "llama"):
        raise ConfigError(f"model.path={folder}: config.json describes no Qwen2, Qwen3 or Llama model")
    hidden, intermediate, layers, heads, vocabulary = (settings[key] for key in REQUIRED)
    bias = bool(settings.get("attention_bias"))
    return Geometry(
        hidden, intermediate, layers, heads,
        kv_heads=settings.get("num_key_value_heads") or heads,
        head_size=settings.get("head_dim") or (128 if family == "qwen3" else hidden // heads),
        vocabulary=vocabulary,
        tied=bool(settings.get("tie_word_embeddings")),
        input_bias=bias or family == "qwen2",
        output_bias=bias and family != "qwen2",
        mlp_bias=bool(settings.get("mlp_bias")) and family == "llama",
        head_norms=family == "qwen3",
    )  # fmt: skip
