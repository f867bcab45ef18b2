"""Whole models on packed rows against one forward of the unmodified model per sequence."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from groups import make_batch, make_group, response_logprobs
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pasync.errors import ConfigError
from pasync.model import shared_prompt
from pasync.model.causal_lm import empty_model
from pasync.model.tiny import random_model
from pasync.sections import ModelConfig

FAMILIES = {"qwen2": (Qwen2ForCausalLM, Qwen2Config), "qwen3": (Qwen3ForCausalLM, Qwen3Config), "llama": (LlamaForCausalLM, LlamaConfig)}
SHAPES = [(7, [3, 5, 2]), (1, [1, 0, 4]), (12, [0, 0]), (5, [6, 6, 6])]
SIZES = dict(vocab_size=264, hidden_size=64, intermediate_size=96, num_hidden_layers=2, pad_token_id=0)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)


def tiny(family: str, tied: bool = True, layers: int = 2):
    torch.manual_seed(0)
    model, config = FAMILIES[family]
    return model(config(**{**SIZES, "num_hidden_layers": layers}, **HEADS, tie_word_embeddings=tied))


def packing(oracle, checkpointing: bool = False, kind: str = "merged"):
    """The same model with attention over packed rows."""
    model = copy.deepcopy(oracle)
    model.set_attn_implementation(shared_prompt.implementation(kind))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def separate_logprobs(model, groups, temperature):
    """Oracle: one forward of the unmodified model for every response, no packing, no sharing."""
    rows = []
    for group in groups:
        for response in group.responses:
            prompt = np.frombuffer(group.prompt_ids, "<i4")
            ids = torch.from_numpy(np.concatenate([prompt, response.token_ids]).astype(np.int64))[None]
            logits = model(ids).logits[0].float() / temperature
            rows.append(logits[len(prompt) - 1 : -1].log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0])
    return torch.cat(rows)


def assert_equal_to_separate_sequences(oracle, packed, groups, shared: bool = True) -> None:
    logp, _ = response_logprobs(packed, make_batch(groups, shared_prompt=shared), temperature=0.7)
    expected = separate_logprobs(oracle, groups, 0.7)
    weights = torch.randn(len(logp), generator=torch.Generator().manual_seed(0))
    oracle.zero_grad()
    (logp * weights).sum().backward()
    (expected * weights).sum().backward()
    assert (logp - expected).abs().max() < 1e-5  # float32
    for (name, a), b in zip(packed.named_parameters(), oracle.parameters(), strict=True):
        off = (a.grad - b.grad).norm() / b.grad.norm()
        # a bias of keys shifts all scores of a row alike: its gradient is zero but for rounding
        assert off < 2e-6 or name.endswith("k_proj.bias"), (name, off)


@pytest.mark.parametrize(("kind", "shared"), [("merged", True), ("merged", False), ("concat", True), ("concat", False)])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_groups_equal_separate_sequences(family, tied, checkpointing, kind, shared):
    oracle, rng = tiny(family, tied), np.random.default_rng(1)
    groups = [make_group(rng, p, r) for p, r in SHAPES]
    assert_equal_to_separate_sequences(oracle, packing(oracle, checkpointing, kind), groups, shared)


def test_the_first_use_on_a_device_may_be_inside_a_checkpointed_layer():
    shared_prompt.choose.cache_clear()  # as in a new process: the backend is compared with plain attention during this forward
    logp, _ = response_logprobs(packing(tiny("qwen2"), checkpointing=True), make_batch([make_group(np.random.default_rng(0), 5, [3, 4])]),
                                temperature=1.0)  # fmt: skip
    logp.sum().backward()


@settings(max_examples=18, deadline=None)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    checkpointing=st.booleans(),
    shapes=st.lists(st.tuples(st.integers(1, 200), st.lists(st.integers(0, 200), min_size=2, max_size=16)), min_size=1, max_size=4),
)
@pytest.mark.timeout(300)
def test_any_layout_of_groups_equals_separate_sequences(family, checkpointing, shapes):
    rng = np.random.default_rng(0)
    groups = [make_group(rng, p, r) for p, r in [*shapes, (3, [2, 2])]]
    oracle = tiny(family)
    assert_equal_to_separate_sequences(oracle, packing(oracle, checkpointing), groups)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_those_of_transformers_own_cache_in_two_passes(family):
    """A second oracle, without any attention of ours: the prompt's cache, repeated for all responses."""
    oracle, group = tiny(family), make_group(np.random.default_rng(2), 9, [6, 6, 6])
    prompt = torch.from_numpy(np.frombuffer(group.prompt_ids, "<i4").astype(np.int64))[None]
    responses = torch.stack([torch.from_numpy(r.token_ids.astype(np.int64)) for r in group.responses])  # [K, R]
    cache = DynamicCache()
    first = oracle(prompt, past_key_values=cache, use_cache=True).logits[:, -1:].expand(3, -1, -1)
    cache.batch_repeat_interleave(3)
    rest = oracle(responses, past_key_values=cache, use_cache=True).logits[:, :-1]
    logits = torch.cat([first, rest], 1)  # [K, R, V]
    expected = logits.log_softmax(-1).gather(-1, responses[..., None]).flatten()
    logp, _ = response_logprobs(packing(oracle), make_batch([group]), temperature=1.0)
    assert (logp - expected).abs().max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_close_to_float32_as_padded_copies(family):
    """The bar is 1.3 times the error of copies; bfloat16 against bfloat16 would say nothing, both are 1e-2 from the truth."""
    truth, rng = tiny(family, layers=4), np.random.default_rng(3)
    with torch.no_grad():  # start from weights that both types hold
        for p in truth.parameters():
            p.copy_(p.bfloat16())
    groups = [make_group(rng, 60, [40, 25, 40, 9]), make_group(rng, 12, [30, 8])]
    narrow = copy.deepcopy(truth).bfloat16()
    results = {}
    for name, model in (("truth", truth), ("copies", narrow), ("packed", packing(narrow))):
        model.zero_grad()
        if name == "packed":
            logp, _ = response_logprobs(model, make_batch(groups), temperature=1.0)
        else:
            logp = padded_logprobs(model, groups)
        weights = torch.randn(len(logp), generator=torch.Generator().manual_seed(0))
        (logp * weights).sum().backward()
        results[name] = logp.detach(), torch.cat([p.grad.flatten().float() for p in model.parameters()])
    for mine, copies, exact in zip(*(results[n] for n in ("packed", "copies", "truth")), strict=True):
        assert (mine - exact).norm() <= 1.3 * (copies - exact).norm()


def padded_logprobs(model, groups):
    """One forward of the unmodified model per group: repeated prompts, responses padded on the right."""
    found = []
    for group in groups:
        prompt = np.frombuffer(group.prompt_ids, "<i4").astype(np.int64)
        rows = [torch.from_numpy(np.concatenate([prompt, r.token_ids.astype(np.int64)])) for r in group.responses]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        table = model(ids, attention_mask=None).logits.float().log_softmax(-1)
        for row, tokens in zip(table, rows, strict=True):
            at = torch.arange(len(prompt), len(tokens))
            found.append(row[at - 1, tokens[at]])
    return torch.cat(found)


@pytest.mark.parametrize("kind", ["merged", "concat"])
def test_changing_one_response_leaves_every_other_bit_for_bit_alone(kind):
    model, rng = packing(tiny("qwen2"), kind=kind), np.random.default_rng(0)
    groups = [make_group(rng, 5, [4, 7, 4]), make_group(rng, 3, [6, 2])]
    other = make_group(rng, 5, [4, 7, 4])
    changed = type(groups[0])(0, 0, groups[0].prompt_ids, [groups[0].responses[0], other.responses[1], groups[0].responses[2]], 0.0, 0.0)
    first, second = (response_logprobs(model, make_batch(g), temperature=1.0)[0] for g in (groups, [changed, groups[1]]))
    kept = torch.ones(len(first), dtype=torch.bool)
    kept[4:11] = False
    assert torch.equal(first[kept], second[kept]) and not torch.equal(first[~kept], second[~kept])


def test_a_changed_prompt_changes_all_of_its_responses_and_no_other_group():
    model, rng = packing(tiny("qwen2")), np.random.default_rng(0)
    groups = [make_group(rng, 5, [4, 7]), make_group(rng, 3, [6, 2])]
    changed = type(groups[0])(0, 0, make_group(rng, 5, []).prompt_ids, groups[0].responses, 0.0, 0.0)
    first, second = (response_logprobs(model, make_batch(g), temperature=1.0)[0] for g in (groups, [changed, groups[1]]))
    assert torch.equal(first[11:], second[11:]) and not (first[:11] == second[:11]).any()


def test_the_first_pass_of_a_checkpointed_model_may_be_one_with_a_gradient(tmp_path):
    random_model(tmp_path, "llama", tied=True)
    shared_prompt.choose.cache_clear()
    model = empty_model(ModelConfig(path=str(tmp_path), dtype="float32", gradient_checkpointing=True), tmp_path)
    model.load_state_dict(LlamaForCausalLM.from_pretrained(tmp_path).state_dict(), assign=True)
    response_logprobs(model, make_batch([make_group(np.random.default_rng(0), 5, [3, 4])]), temperature=1.0)[0].sum().backward()
    assert shared_prompt.choose.cache_info().currsize == 1, "the layers ask for the same choice"


def test_stock_attention_on_a_packed_row_would_be_wrong_in_silence_so_it_is_refused():
    oracle, group = tiny("qwen2"), make_group(np.random.default_rng(0), 6, [5, 5])
    batch = make_batch([group])
    stock = oracle.model(batch.input_ids[None], position_ids=batch.layout.positions[None], use_cache=False).last_hidden_state[0]
    logp = oracle.lm_head(stock[batch.layout.rows]).log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]
    assert (logp - separate_logprobs(oracle, [group], 1.0)).abs().max() > 1e-3  # the trap is real
    with pytest.raises(AssertionError):
        response_logprobs(oracle, batch, temperature=1.0)
    with pytest.raises(AssertionError, match="without shared_prompt"):
        packing(oracle)(batch.input_ids[None])


def gemma2():
    return Gemma2ForCausalLM(
        Gemma2Config(**SIZES, **HEADS, attn_logit_softcapping=50.0, sliding_window=None, layer_types=["full_attention"] * 2)
    )


def gpt_oss():
    return GptOssForCausalLM(GptOssConfig(**SIZES, **HEADS, layer_types=["full_attention"] * 2, num_local_experts=2, num_experts_per_tok=1))


def mistral():
    return MistralForCausalLM(MistralConfig(**SIZES, **HEADS, sliding_window=8))


@pytest.mark.parametrize(("make", "what"), [(gemma2, "softcap=50"), (gpt_oss, "s_aux"), (mistral, "sliding_window=8")])
def test_attention_that_is_not_plain_softmax_is_refused_layer_by_layer(make, what):
    model, batch = make(), make_batch([make_group(np.random.default_rng(0), 6, [5, 5])])
    model.config._attn_implementation = shared_prompt.implementation("auto")  # past transformers' own checks
    with pytest.raises(ConfigError, match=what):
        response_logprobs(model, batch, temperature=1.0)


def test_models_that_would_be_computed_wrongly_are_refused():
    with pytest.raises(ConfigError, match="mistral is not supported"):
        shared_prompt.check_supported(MistralConfig())
    with pytest.raises(ConfigError, match="sliding"):
        shared_prompt.check_supported(Qwen2Config(use_sliding_window=True, max_window_layers=0, sliding_window=8))
    with pytest.raises(ConfigError, match="dropout"):
        shared_prompt.check_supported(LlamaConfig(attention_dropout=0.1))


def test_a_response_without_log_probs_to_train_on_is_no_row():
    batch = make_batch([make_group(np.random.default_rng(0), 4, [0, 0]), make_group(np.random.default_rng(0), 4, [2, 0])])
    assert batch.num_tokens == 6 and replace(batch).layout.owner.tolist() == [2, 2]
