import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pasync import device
from pasync.model import logprob
from pasync.model.logprob import token_logprobs


def problem(tokens: int, vocabulary: int = 31, hidden: int = 8, dtype=torch.float64):
    torch.manual_seed(0)
    inputs = [torch.randn(n, hidden, dtype=dtype, requires_grad=True) for n in (tokens, vocabulary)]
    return *inputs, torch.randint(0, vocabulary, (tokens,)), torch.randn(tokens, dtype=dtype)


def textbook(hidden, weight, targets, temperature):
    table = (hidden @ weight.T / temperature).log_softmax(-1)
    return table.gather(-1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)


@pytest.mark.parametrize("kept_bytes", [0, 700, 1 << 30])
@pytest.mark.parametrize("tile", [1, 50, 1 << 20])
@pytest.mark.parametrize("tokens", [1, 7])
def test_log_probs_entropy_and_gradients_equal_log_softmax_with_any_block_size(monkeypatch, tokens, tile, kept_bytes):
    monkeypatch.setitem(device.LOGITS_BLOCK, "cpu", tile)
    monkeypatch.setattr(logprob, "SMALLEST_BLOCK", 4)
    monkeypatch.setattr(logprob, "KEPT_BYTES", kept_bytes)
    hidden, weight, targets, grad = problem(tokens)
    logp, entropy = token_logprobs(hidden, weight, targets, temperature=0.8)
    expected, expected_entropy = textbook(hidden, weight, targets, 0.8)
    both = [(logp, expected), (entropy, expected_entropy), (logp + 0.3 * entropy.square(), expected + 0.3 * expected_entropy.square())]
    assert torch.allclose(logp, expected, atol=1e-12) and torch.allclose(entropy, expected_entropy, atol=1e-12)
    for pair in both:
        ours, oracle = (torch.autograd.grad(x, (hidden, weight), grad, retain_graph=True) for x in pair)
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, oracle, strict=True))


def test_no_tokens_have_no_log_probs_and_a_zero_gradient():
    hidden, weight, targets, grad = problem(0)
    logp, _ = token_logprobs(hidden, weight, targets, temperature=1.0)
    assert logp.shape == (0,) and not torch.autograd.grad(logp, weight, grad)[0].any()


def test_logits_of_thousands_are_safe():
    hidden, weight, targets, _ = problem(5)
    logp, entropy = token_logprobs(hidden * 1000, weight, targets, temperature=1.0)
    expected, expected_entropy = textbook(hidden * 1000, weight, targets, 1.0)
    assert torch.allclose(logp, expected) and torch.allclose(entropy, expected_entropy)


def test_bfloat16_is_as_close_to_float64_as_log_softmax_of_float32_logits():
    hidden, weight, targets, grad = problem(300, 2000, 64)
    truth = textbook(hidden, weight, targets, 1.0)[0]
    truth = [truth, *torch.autograd.grad(truth, (hidden, weight), grad)]
    off = []
    for compute in (lambda h, w: token_logprobs(h, w, targets, temperature=1.0)[0], naive(targets)):
        h, w = (x.detach().bfloat16().requires_grad_() for x in (hidden, weight))
        logp = compute(h, w)
        assert logp.dtype == torch.float32
        results = [logp, *torch.autograd.grad(logp, (h, w), grad.float())]
        off.append([(a - b).norm() / b.norm() for a, b in zip(results, truth, strict=True)])
    assert all(a < 1.1 * b for a, b in zip(*off, strict=True))


def naive(targets):
    return lambda h, w: (h @ w.T).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]


class Largest(TorchDispatchMode):
    """The most elements of any tensor made inside."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_of_all_tokens_times_the_vocabulary_is_ever_made(monkeypatch, dtype, entropy_coef):
    monkeypatch.setitem(device.LOGITS_BLOCK, "cpu", 256 * 64)
    tokens, vocabulary, size = 256, 4096, 16
    hidden, weight, targets, grad = problem(tokens, vocabulary, size, dtype)
    with Largest() as largest:
        logp, entropy = token_logprobs(hidden, weight, targets, temperature=1.0)
        (logp + entropy_coef * entropy if entropy_coef else logp).backward(grad.to(logp.dtype))
    assert largest.elements == max(256 * tokens, vocabulary * size)  # a block of logits, or the weight's gradient
