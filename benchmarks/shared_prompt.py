"""What a shared prompt saves: `python -m benchmarks.shared_prompt [--case 1024,64,16 ..] [--dtype float32 ..]`, one JSON line per case.

Forward and backward of a slice of SmolLM2-135M (its widths, 2 layers, no LM head: that sees the same rows either way) over one group of
K responses of R tokens to a prompt of P:

    copies          K sequences [prompt | response] in one batch, stock causal scaled-dot-product attention: no mask, no padding
    shared          [prompt | r1 .. rK] in one row, as pasync trains
    prefix_grouper  the same row through the package prefix-grouper

CPU seconds of one pinned core: one untimed round, then the three in turn, medians. `limit` is the ratio of floating-point operations of
copies and shared, causal attention counted exactly. Timed steps reuse the process's memory, as ranks do. One round before them runs
on fresh memory, every tensor in pages of its own, given back when it is freed: its peak over what is resident (weights and gradients)
is what was alive, and its time says what page faults would add (`gain_fresh_memory`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from functools import partial
from typing import Any

import torch
from prefix_grouper import PrefixGrouper
from prefix_grouper.forward import AttentionForward
from torch import Tensor
from transformers import AttentionInterface, AutoModel, LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.memory import cpu_seconds, keep_memory, on_fresh_memory, own_pages
from pasync import device as devices
from pasync.data.layout import lay_out
from pasync.model import shared_prompt

CASES = ("64,256,8", "512,64,8", "1024,64,16", "2048,32,32")
WIDTHS: dict[str, Any] = dict(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64)
LAYERS, VOCABULARY = 2, 512
LEAST_S = 20.0
"""Each case is repeated until the copies took so long together, but at least three times."""


def grouper_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, scaling: float | None = None,
    prefix_grouper: PrefixGrouper, masks: dict[tuple[int, int], Tensor | None], **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Prefix-grouper's two attention calls on scaled-dot-product attention, with the cheapest masks: none where causal is enough."""

    def attend(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        rows, keys = q.shape[2], k.shape[2]
        if (rows, keys) not in masks:
            assert bool(padding.all())  # responses of one length
            masks[rows, keys] = None if rows == keys else torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)[None, None]
        return sdpa_attention_forward(module, q, k, v, masks[rows, keys], scaling=scaling)[0]

    return AttentionForward(attend)(prefix_grouper, query, key, value), None


AttentionInterface.register("prefix_grouper", grouper_attention)


class Case:
    """One group of random tokens, and a step in three ways.

    The loss is a random projection of the rows that predict a response token, the same rows each way.
    """

    def __init__(self, prompt: int, response: int, responses: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.sizes = prompt, response, responses
        config = LlamaConfig(**WIDTHS, vocab_size=VOCABULARY, num_hidden_layers=LAYERS, dtype=dtype)
        self.model: Any = AutoModel.from_config(config)
        self.model.embed_tokens.requires_grad_(False)
        self.prompt = torch.randint(VOCABULARY, (prompt,))
        self.responses = torch.randint(VOCABULARY, (responses, response))
        self.projection = torch.randn(responses * response, WIDTHS["hidden_size"], dtype=dtype)
        self.layout = lay_out([(prompt, (response,) * responses)], shared=True)

    def step(self, way: str) -> Tensor:
        """Forward and backward; returns the rows of hidden states."""
        hidden = getattr(self, way)()  # [K R, E]
        (hidden * self.projection).sum().backward()
        return hidden.detach()

    def copies(self) -> Tensor:
        self.model.set_attn_implementation("sdpa")
        ids = torch.cat([self.prompt.expand(len(self.responses), -1), self.responses], 1)  # [K, P + R]
        hidden = self.model(ids, use_cache=False).last_hidden_state  # [K, P + R, E]
        return hidden[:, len(self.prompt) - 1 : -1].flatten(0, 1)

    def shared(self) -> Tensor:
        self.model.set_attn_implementation(shared_prompt.implementation("merged"))
        return self._packed(shared_prompt=self.layout)

    def prefix_grouper(self) -> Tensor:
        self.model.set_attn_implementation("prefix_grouper")
        prompt, response, responses = self.sizes
        return self._packed(prefix_grouper=PrefixGrouper([[prompt] + [response] * responses]), masks={})

    def _packed(self, **keywords: Any) -> Tensor:
        ids = torch.cat([self.prompt, self.responses.flatten()])[None]
        output = self.model(ids, position_ids=self.layout.positions[None], use_cache=False, **keywords)
        return output.last_hidden_state[0].index_select(0, self.layout.rows)

    def limit(self) -> float:
        """Operations of copies over operations of shared."""
        weights = sum(p.numel() for p in self.model.layers.parameters() if p.ndim == 2)
        return operations_ratio(weights, LAYERS * WIDTHS["num_attention_heads"] * WIDTHS["head_dim"], *self.sizes)


def operations_ratio(weights: int, heads: int, prompt: int, response: int, responses: int, head: int = 0) -> float:
    """Operations of copies over operations of shared: linear layers 6 per weight and token, attention 14 H D per pair of tokens.

    Args:
        weights: of all linear layers.
        heads: layers x heads x size of a head.
        head: weights of the LM head, which sees the rows of response tokens either way.
    """

    def operations(tokens: int, pairs: float) -> float:
        return 6 * (weights * tokens + head * responses * response) + 14 * heads * pairs

    def triangle(n: int) -> float:
        return n * (n + 1) / 2

    whole = prompt + response
    copies = operations(responses * whole, responses * triangle(whole))
    pairs = triangle(prompt) + responses * (response * prompt + triangle(response))
    return copies / operations(prompt + responses * response, pairs)


WAYS = ("copies", "shared", "prefix_grouper")


def measure(name: str, dtype: str) -> dict[str, Any]:
    """The JSON line of one case."""
    prompt, response, responses = map(int, name.split(","))
    case = Case(prompt, response, responses, getattr(torch, dtype))
    warm = Case(16, 8, 2, getattr(torch, dtype))
    for way in WAYS:
        warm.step(way)
        case.model.get_parameter("norm.weight").grad = None
    for parameter in case.model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    fresh, peak, rows = {}, {}, {}
    own_pages()
    for way in WAYS:
        fresh[way], peak[way], rows[way] = on_fresh_memory(partial(case.step, way))
    off = ((rows["shared"] - rows["copies"]).norm() / rows["copies"].norm()).item()
    keep_memory()
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for way in WAYS:
        case.step(way)
    while sum(times["copies"]) < LEAST_S or len(times["copies"]) < 3:
        for way in WAYS:
            times[way].append(cpu_seconds(partial(case.step, way)))
    median = {way: statistics.median(t) for way, t in times.items()}
    gain, limit = median["copies"] / median["shared"], case.limit()
    return {
        "case": name,
        "dtype": dtype,
        "gain": gain,
        "limit": limit,
        "of_limit": gain / limit,
        "memory_gain": peak["copies"] / peak["shared"],
        "vs_prefix_grouper": median["prefix_grouper"] / median["shared"],
        "memory_vs_prefix_grouper": peak["prefix_grouper"] / peak["shared"],
        "gain_fresh_memory": fresh["copies"] / fresh["shared"],
        "relative_difference": off,
        "copies_s": median["copies"],
        "copies_bytes": peak["copies"],
        "repeats": len(times["copies"]),
    }


def main() -> None:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", default=CASES, metavar="P,R,K")
    parser.add_argument("--dtype", nargs="+", default=("float32", "bfloat16"))
    options = parser.parse_args()
    if len(options.case) * len(options.dtype) == 1:
        devices.pin(devices.device_ids("cpu")[-1:])
        print(json.dumps(measure(options.case[0], options.dtype[0])))
        return
    for name in options.case:
        for dtype in options.dtype:  # each in a process of its own: one that kept memory cannot measure it again
            subprocess.run([sys.executable, "-m", "benchmarks.shared_prompt", "--case", name, "--dtype", dtype], check=True)


if __name__ == "__main__":
    main()
