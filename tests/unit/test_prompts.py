"""Every prompt once per epoch, in an order that needs no state, tokenized once."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pasync.config import Config
from pasync.data.prompts import PromptStream
from pasync.errors import ConfigError

CHAT = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)


def make_tokenizer(closing: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level, puts BOS before and, if asked, EOS after every text."""
    names = ["<bos>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|im_start|>"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<|im_end|>", additional_special_tokens=special)
    end = " <|im_end|>" if closing else ""
    rule = processors.TemplateProcessing(single=f"<bos> $A{end}", special_tokens=[("<bos>", 0), ("<|im_end|>", 2)])
    tokenizer.backend_tokenizer.post_processor = rule
    tokenizer.chat_template = CHAT
    return tokenizer


def make_config(folder: Path, rows: int = 5, groups: int = 2, seed: int = 0, eval_rows: int = 0, **data: Any) -> Config:
    def source(name: str, count: int) -> dict[str, str]:
        lines = [json.dumps({"question": f"{i}+1=", "answer": i + 1, "hint": "add"}) for i in range(count)]
        (folder / name).write_text("\n".join(lines))
        return {"source": str(folder / name)}

    return Config.model_validate({
        "name": "t", "seed": seed, "iterations": 1, "model": {"path": "m"}, "optimizer": {"lr": 1}, "rollout": {"max_tokens": 1},
        "algorithm": {"batch_groups": groups, "group_responses": 2},
        "data": {"train": source("train.jsonl", rows), "eval": {"h": source("eval.jsonl", eval_rows)} if eval_rows else None, **data},
    })


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 12), groups=st.integers(1, 9), seed=st.integers(0, 9))
def test_no_prompt_is_lost_or_repeated_inside_an_epoch(tmp_path: Path, rows: int, groups: int, seed: int) -> None:
    stream = PromptStream(make_config(tmp_path, rows, groups, seed), make_tokenizer())
    dealt = [p.index for t in range(3 * rows) for p in stream.batch(t)]
    epochs = [dealt[i:i + rows] for i in range(0, len(dealt), rows)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)


def test_a_batch_depends_on_seed_and_iteration_only(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    first, again, other = (PromptStream(make_config(tmp_path, 50, 8, seed), tokenizer) for seed in (1, 1, 2))
    later = first.batch(9)
    assert [first.batch(t) for t in range(9)] and first.batch(9) == later == again.batch(9)
    assert other.batch(9) != later
    assert [p.index for p in first.batch(0)] != list(range(8))


def test_a_chat_prompt_has_one_beginning_and_ends_where_the_answer_starts(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(closing=True)
    stream = PromptStream(make_config(tmp_path, system="Be brief.", template="{question} ({hint})"), tokenizer)
    prompt = next(p for p in stream.batch(0) + stream.batch(1) if p.index)
    asked = f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{prompt.index}+1= (add)<|im_end|>\n"
    assert prompt.text == f"<bos>{asked}<|im_start|>assistant\n"
    assert prompt.ids.count(0) == 1 and tokenizer.decode(prompt.ids) == prompt.text
    assert prompt.sample == {"question": f"{prompt.index}+1=", "answer": prompt.index + 1, "hint": "add"}


@pytest.mark.parametrize("closing", [False, True])
def test_a_raw_prompt_follows_the_tokenizers_rule_but_is_left_open(tmp_path: Path, closing: bool) -> None:
    stream = PromptStream(make_config(tmp_path, 1, chat=False), make_tokenizer(closing))
    assert make_tokenizer().decode(stream.batch(0)[0].ids) == "<bos>0+1="
    assert stream.batch(0)[0].text == "0+1="


def test_held_out_prompts_keep_their_order(tmp_path: Path) -> None:
    assert PromptStream(make_config(tmp_path), make_tokenizer()).held_out == {}
    held_out = PromptStream(make_config(tmp_path, eval_rows=4), make_tokenizer()).held_out["h"]
    assert [p.index for p in held_out] == [0, 1, 2, 3]


def test_refills_are_the_other_prompts_in_an_order_of_their_own(tmp_path: Path) -> None:
    stream, again = (PromptStream(make_config(tmp_path, 10, 4, 1), make_tokenizer()) for _ in range(2))
    for t in range(6):
        refill, batch = [p.index for p in stream.refill(t)], [p.index for p in stream.batch(t)]
        assert sorted(refill + batch) == list(range(10)) and refill == [p.index for p in again.refill(t)]
    assert len({tuple(p.index for p in stream.refill(t)) for t in (0, 5, 10)}) > 1


def test_rows_may_carry_their_own_longest_response(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    rows = [json.dumps({"question": "1+1=", "answer": n, "limit": n}) for n in (3, 7)]
    Path(config.data.train.source).write_text("\n".join(rows))
    for column, expected in (("limit", {3, 7}), (None, {None})):
        train = config.data.train.model_copy(update={"max_tokens_column": column})
        data = config.data.model_copy(update={"train": train})
        stream = PromptStream(config.model_copy(update={"data": data}), make_tokenizer())
        assert {p.max_tokens for p in stream.batch(0)} == expected
    data = config.data.model_copy(update={"train": config.data.train.model_copy(update={"max_tokens_column": "limt"})})
    with pytest.raises(ConfigError, match="max_tokens_column=limt: must hold positive integers.*Did you mean limit"):
        PromptStream(config.model_copy(update={"data": data}), make_tokenizer())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"template": "{questoin}"}, "no column questoin, there are question, answer, hint. Did you mean question"),
        ({"template": "{"}, "is no format string"),
        ({"template": "{}"}, "is no format string"),
        ({"template": "{question.x}"}, "is no format string"),
        ({"max_prompt_tokens": 5, "chat": False}, "2 of 12 prompts of data.train are longer, the longest has 6 tokens, .* row 10"),
    ],
)
def test_a_prompt_that_cannot_be_built_is_an_error(tmp_path: Path, data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PromptStream(make_config(tmp_path, 12, **data), make_tokenizer())


def test_a_tokenizer_without_chat_template_asks_for_raw_text(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="set data.chat=false"):
        PromptStream(make_config(tmp_path), tokenizer)
