import copy

import numpy as np
import pytest
import torch
from groups import make_group
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from pasync.data.packing import pack
from pasync.errors import ConfigError
from pasync.model import shared_prompt
from pasync.model.causal_lm import response_logprobs
from pasync.model.logprob import CHUNK_TOKENS, token_logprobs

FAMILIES = {"qwen2": (Qwen2ForCausalLM, Qwen2Config), "qwen3": (Qwen3ForCausalLM, Qwen3Config), "llama": (LlamaForCausalLM, LlamaConfig)}
SHAPES = [(7, [3, 5, 2]), (1, [1, 0, 4]), (12, [0, 0]), (5, [6, 6, 6])]


def tiny(family: str, tied: bool):
    torch.manual_seed(0)
    model, config = FAMILIES[family]
    sizes = dict(vocab_size=264, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    return model(config(**sizes, **heads, tie_word_embeddings=tied))


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


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_groups_with_one_prompt_equal_separate_sequences(family, tied, checkpointing):
    oracle = tiny(family, tied)
    packed = copy.deepcopy(oracle)
    packed.set_attn_implementation(shared_prompt.NAME)
    if checkpointing:
        packed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    packed.train()
    rng = np.random.default_rng(1)
    groups = [make_group(rng, p, r) for p, r in SHAPES]
    logp, _ = response_logprobs(packed, pack(groups, normalize_std=True), temperature=0.7)
    expected = separate_logprobs(oracle, groups, 0.7)
    weights = torch.randn(len(logp))
    (logp * weights).sum().backward()
    (expected * weights).sum().backward()
    assert (logp - expected).abs().max() < 5e-6  # float32
    for (name, a), b in zip(packed.named_parameters(), oracle.parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() <= 5e-6 * b.grad.abs().max(), name


def test_responses_do_not_see_each_other():
    model = tiny("qwen2", True)
    model.set_attn_implementation(shared_prompt.NAME)
    group = make_group(np.random.default_rng(0), 5, [4, 4])
    other = make_group(np.random.default_rng(7), 5, [4, 4])
    changed = type(group)(0, 0, group.prompt_ids, [group.responses[0], other.responses[1]], 0.0, 0.0)
    first, second = (response_logprobs(model, pack([g], normalize_std=True), temperature=1.0)[0] for g in (group, changed))
    assert torch.equal(first[:4], second[:4]) and not torch.equal(first[4:], second[4:])


@pytest.mark.parametrize("tokens", [1, CHUNK_TOKENS, CHUNK_TOKENS + 3])
def test_chunked_logprobs_entropy_and_gradients_equal_log_softmax(tokens):
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (tokens, 31))
    targets = torch.randint(0, 31, (tokens,))
    logp, entropy = token_logprobs(hidden, weight, targets, temperature=0.8)
    table = (hidden @ weight.T / 0.8).log_softmax(-1)
    grad = torch.randn(tokens, dtype=torch.float64)
    ours = torch.autograd.grad(logp, (hidden, weight), grad)
    oracle = torch.autograd.grad(table.gather(-1, targets[:, None])[:, 0], (hidden, weight), grad, retain_graph=True)
    assert torch.allclose(entropy, -(table.exp() * table).sum(-1), atol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, oracle, strict=True))


def test_models_that_would_be_computed_wrongly_are_refused():
    with pytest.raises(ConfigError, match="mistral is not supported"):
        shared_prompt.check_supported(MistralConfig())
    with pytest.raises(ConfigError, match="sliding"):
        shared_prompt.check_supported(Qwen2Config(use_sliding_window=True, max_window_layers=0, sliding_window=8))
    with pytest.raises(ConfigError, match="dropout"):
        shared_prompt.check_supported(LlamaConfig(attention_dropout=0.1))
