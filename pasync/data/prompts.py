"""Prompts of every iteration: built once, then dealt as a pure function of (seed, iteration).

    rows --template--> text --chat template--> text --tokenizer--> Prompt
    epoch 0: shuffle(seed, 0) | epoch 1: shuffle(seed, 1) | ...     batch t takes positions t*B .. t*B + B - 1 of this endless line

Nothing has to be saved to resume: iteration t has the same prompts in every run of one config.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from pasync.config import Config
from pasync.data.sources import Row, load_rows
from pasync.errors import ConfigError, nearest
from pasync.sections import DataConfig, DatasetConfig


@dataclass(frozen=True)
class Prompt:
    """What is asked, as the very tokens that the model sees."""

    index: int
    """Row of the data set."""
    ids: tuple[int, ...]
    text: str
    """The same before tokenization, for rewards and logs."""
    sample: Row
    """The whole row, for rewards."""
    max_tokens: int | None = None
    """The row's own longest response."""


class PromptStream:
    """Prompts of the training set, iteration by iteration, and the held-out ones.

    Args:
        tokenizer: a Hugging Face tokenizer.

    Raises:
        ConfigError: the data, the template or the length of a prompt does not fit the config.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.seed, self.batch_groups = config.seed, config.algorithm.batch_groups
        self._data, self._tokenizer = config.data, tokenizer
        self._train = self._build("data.train", config.data.train)
        self.held_out = {name: self._build(f"data.eval.{name}", held_out) for name, held_out in (config.data.eval or {}).items()}
        """Prompts of the sets of data.eval, in order."""

    def __len__(self) -> int:
        """Prompts of one epoch."""
        return len(self._train)

    def batch(self, t: int) -> list[Prompt]:
        """The B prompts of iteration t: every prompt once per epoch, each epoch in its own order."""
        positions = range(t * self.batch_groups, (t + 1) * self.batch_groups)
        return [self._train[epoch_order(self.seed, p // len(self), len(self))[p % len(self)]] for p in positions]

    def refill(self, t: int) -> Iterator[Prompt]:
        """More prompts for iteration t, should some of its batch be of no use: all that are not in the batch, in an order of their own."""
        batch = {prompt.index for prompt in self.batch(t)}
        order = np.random.default_rng((self.seed, t, len(self))).permutation(len(self)).tolist()
        yield from (self._train[i] for i in order if self._train[i].index not in batch)

    def _build(self, key: str, dataset: DatasetConfig) -> list[Prompt]:
        limits = dataset.max_tokens_column
        prompts = [self._prompt(i, row, row_limit(key, limits, row)) for i, row in enumerate(load_rows(key, dataset))]
        limit = self._data.max_prompt_tokens
        long = [p for p in prompts if len(p.ids) > limit]
        if long:
            longest = max(len(p.ids) for p in long)
            raise ConfigError(
                f"data.max_prompt_tokens={limit}: {len(long)} of {len(prompts)} prompts of {key} are longer, "
                f"the longest has {longest} tokens, the first is row {long[0].index}; raise it, or leave them out"
            )
        return prompts

    def _prompt(self, index: int, row: Row, max_tokens: int | None) -> Prompt:
        text = fill(self._data, row)
        if self._data.chat:
            text = self._chat(text)
        ids = list(self._tokenizer(text, add_special_tokens=not self._data.chat)["input_ids"])
        if not self._data.chat and ids[-1:] == [self._tokenizer.eos_token_id] and not text.endswith(self._tokenizer.eos_token):
            ids.pop()  # some tokenizers close every text; the response must continue it
        if not ids:
            raise ConfigError(f"data.template={self._data.template}: row {index} gives an empty prompt, at least one token is needed")
        return Prompt(index, tuple(ids), text, row, max_tokens)

    def _chat(self, text: str) -> str:
        """The text of the whole conversation; it spells its own special tokens, BOS included."""
        if not self._tokenizer.chat_template:
            raise ConfigError("data.chat=true: the tokenizer has no chat template, set data.chat=false")
        messages = [{"role": "system", "content": self._data.system}] if self._data.system is not None else []
        messages.append({"role": "user", "content": text})
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def row_limit(key: str, column: str | None, row: Row) -> int | None:
    """The row's own longest response, if the data set has them. Raises ConfigError if the column is missing or no positive integer."""
    if column is None:
        return None
    value = row.get(column)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key}.max_tokens_column={column}: must hold positive integers, a row has {value!r}{nearest(column, row)}")
    return value


def fill(data: DataConfig, row: Row) -> str:
    """The template with a row's columns in it.

    Raises:
        ConfigError: it names a column that is not there, or is no format string.
    """
    try:
        return data.template.format(**row)
    except KeyError as error:
        name = str(error.args[0])
        raise ConfigError(f"data.template={data.template}: no column {name}, there are {', '.join(row)}{nearest(name, row)}") from None
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise ConfigError(f"data.template={data.template}: is no format string ({error}); write {{{{ for a plain brace") from None


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    """A permutation of range(size), the same for the same arguments."""
    return tuple(np.random.default_rng((seed, epoch)).permutation(size).tolist())
