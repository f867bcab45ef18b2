"""Models of a few thousand to a million weights: `tiny-sort`, which learns in minutes, and random ones for tests.

Both read bytes: a byte-level BPE without merges has a token for every byte, and is the one small tokenizer that
transformers loads unchanged for all three model families.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from pasync.data.tasks import Row, sort_row, sorting
from pasync.observe.console import progress

Family = Literal["qwen2", "qwen3", "llama"]

# Qwen's names: its tokenizer class would add any that is missing, beyond the end of the embedding
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, START, END, *(f"<spare-{i}>" for i in range(5)))  # with 256 bytes: 264 tokens, a multiple of 8
CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WARM_ACCURACY, WARM_STEPS, WARM_BATCH, WARM_LR = 0.68, 400, 128, 2e-3
"""Supervised learning stops at this sampled accuracy."""
START_ACCURACY = 0.41
"""Then the logits are flattened until sampling is right so often only. Like a large model, `tiny-sort` then knows more than its
samples show, and one update per batch raises them steadily; unflattened models of this accuracy gained half as much."""


def random_model(folder: Path, family: Family, tied: bool, seed: int = 0, heads: int = 2) -> None:
    """Save a random model of 2 layers and its tokenizer.

    Biases and norm weights are random too, so that a forgotten or swapped one changes the output.

    Args:
        folder: is created.
        tied: the LM head is the embedding.
        seed: the same seed gives the same weights; the global random state is left alone.
        heads: query heads; half as many for keys and values. vLLM on CPU computes no more than 2 of this width.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = new_model(family, hidden=64, layers=2, heads=heads, intermediate=128, positions=1024, tied=tied)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight), alpha=0.1)
    save_model(model, folder)


def sort_model(folder: Path) -> None:
    """Train `tiny-sort` and save it: 0.8M weights whose samples sort 4 to 6 digits right two times in five.

    Deterministic on one machine; no held-out row is trained on. About 28 seconds of one core.

    Args:
        folder: is created.

    Raises:
        RuntimeError: the accuracy was not reached, which no seed or platform seen so far has done.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = new_model("qwen2", hidden=128, layers=4, heads=4, intermediate=384, positions=256, tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_LR, weight_decay=0.01)
    held_out, draw = sorting()[1], random.Random(1)
    forbidden = {row["answer"] for row in held_out}
    for step in range(WARM_STEPS):
        optimizer.param_groups[0]["lr"] = WARM_LR * min(1.0, (step + 1) / 30)
        rows = [row for row in (sort_row(draw) for _ in range(WARM_BATCH)) if row["answer"] not in forbidden]
        loss = -answer_logprobs(model, rows).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            accuracy = sampled_accuracy(model, held_out)
            progress("warm-up of tiny-sort, percent right", round(100 * accuracy), round(100 * WARM_ACCURACY))
            if accuracy >= WARM_ACCURACY:
                _flatten(model, held_out)
                return save_model(model, folder)
    raise RuntimeError(f"tiny-sort did not reach an accuracy of {WARM_ACCURACY} in {WARM_STEPS} steps")


@torch.no_grad()
def _flatten(model: PreTrainedModel, rows: list[Row]) -> None:
    """Scale the logits down, which the last norm does for all of them: the best answer stays the best."""
    while sampled_accuracy(model, rows) > START_ACCURACY:
        model.get_decoder().norm.weight *= 0.98


@torch.no_grad()
def sampled_accuracy(model: PreTrainedModel, rows: list[Row]) -> float:
    """Exact chance that a response sampled at temperature 1 is right, mean over the rows: no sampling noise."""
    return answer_logprobs(model, rows).exp().mean().item()


def answer_logprobs(model: PreTrainedModel, rows: list[Row]) -> Tensor:
    """[rows] log-probability of the right answer and the end token, given the question."""
    encode = byte_tokenizer()
    asked = [len(encode(row["question"])["input_ids"]) for row in rows]
    texts = [encode(row["question"] + row["answer"] + END, return_tensors="pt")["input_ids"][0] for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=0)  # [rows, T], pads after the end
    logp = model(input_ids=ids[:, :-1]).logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    at = torch.arange(1, ids.shape[1])
    of_answer = (at >= torch.tensor(asked)[:, None]) & (at < torch.tensor([len(t) for t in texts])[:, None])
    return (logp * of_answer).sum(-1)


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """One token per byte, plus the special ones, with a chat template."""
    vocab = {token: i for i, token in enumerate((*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False)
    tokenizer.chat_template = CHAT
    return tokenizer


def new_model(family: str, *, hidden: int, layers: int, heads: int, intermediate: int, positions: int, tied: bool) -> PreTrainedModel:
    """A model of the byte vocabulary with transformers' random weights, float32."""
    config = AutoConfig.for_model(
        family,
        vocab_size=len(SPECIAL) + 256,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,  # 32: the smallest that vLLM computes on CPU
        intermediate_size=intermediate,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        pad_token_id=SPECIAL.index(PAD),
        bos_token_id=SPECIAL.index(START),
        eos_token_id=SPECIAL.index(END),
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write a model of the byte vocabulary and its tokenizer."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
