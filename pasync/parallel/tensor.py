"""Tensor parallelism: one Hugging Face model over the processes of an axis, each with a slice of every large weight.

transformers says itself which linear layers are cut by outputs ("colwise") and which by inputs ("rowwise"). Between the two, a block
(attention, or MLP) works alone on its own heads or columns; only at its ends do the processes talk:

    x, the same on all --copied--> [ q, k, v: outputs cut -> own heads -> o: inputs cut ] --summed--> the same on all
                       --copied--> [ gate, up: outputs cut -> own columns -> down: inputs cut ] --summed-->
    forward:              as is                                                             sum
    backward:             sum                                                               as is

So a layer costs two all-reduces of [T, E] in each direction. The vocabulary is cut too: each process looks up and predicts its own
tokens, and log-probs are merged (see `pasync.model.logprob`). Names of modules and parameters stay those of the checkpoint.

Letters: T packed tokens, E hidden size, n processes of the axis.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from pasync.errors import ConfigError
from pasync.model.prepare import tensor_problems
from pasync.parallel.mesh import Axis

CUT = {"colwise": {"weight": 0, "bias": 0}, "rowwise": {"weight": 1}}
"""Dimension along which a parameter of a linear layer [out, in] is cut, by the style in the model's plan."""
PARTIAL = "replicated_with_grad_allreduce"
"""The plan's style of modules that are whole on every process but see only its heads."""


@dataclass(frozen=True)
class Shards:
    """What each process of the tensor axis holds of a model, by the names of `model.named_parameters()`."""

    dims: Mapping[str, int | None]
    """The dimension along which a parameter is cut into n equal parts, in the axis's order; None: all hold it whole.
    Gradients lie like their parameters."""
    partial: tuple[str, ...]
    """Whole parameters whose gradient is the sum over the axis of what the processes have; it has to be added up once per batch.
    Sorted, so that all processes go through them in the same order. Every other gradient is complete."""


def cut(model: PreTrainedModel, axis: Axis) -> Shards:
    """Keep this process's slice of a model that all processes of the axis loaded alike; its log-probs and gradients stay the same.

    Afterwards every forward and backward pass is a collective of the axis, and all processes must compute the same micro-batches.
    Parameters are replaced, so optimizers come later. An axis of one changes nothing.

    Args:
        model: Qwen2, Qwen3 or Llama-like, with or without its weights.

    Raises:
        ConfigError: a size is not a multiple of the axis's, or the model's plan says something unknown, or nothing of some weight.
    """
    sizes = {name: p.shape for name, p in model.named_parameters()}
    partial: list[str] = []
    if axis.size > 1:
        if wrong := tensor_problems(model.config.to_dict(), axis.size):
            raise ConfigError("\n".join(wrong))
        partial = _cut_blocks(model, axis)
        _cut_vocabulary(model, axis)
    dims = {name: _cut_dim(sizes[name], p.shape) for name, p in model.named_parameters()}
    return Shards(dims, tuple(sorted(partial)))


def whole(tensor: Tensor, dim: int | None, axis: Axis) -> Tensor:
    """The full tensor on every process, from all parts. A collective unless `dim` is None or the axis has one process.

    Args:
        tensor: this process's part of a parameter or of its gradient.
        dim: as `Shards.dims` says.
    """
    tensor = tensor.detach()
    if dim is None or axis.size == 1:
        return tensor
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in axis.ranks]
    dist.all_gather(parts, tensor.contiguous(), group=axis.group)
    return torch.cat(parts, dim)


class AxisPeers:
    """All-reduces over the tensor axis, for the layers below.

    A connection, not data: copies of a model share it (a process group itself refuses to be copied).
    """

    def __init__(self, axis: Axis) -> None:
        self.index, self._group = axis.index, axis.group

    def sum(self, x: Tensor) -> Tensor:
        """Over all processes, in place."""
        dist.all_reduce(x, dist.ReduceOp.SUM, self._group)
        return x

    def max(self, x: Tensor) -> Tensor:
        """Over all processes, in place."""
        dist.all_reduce(x, dist.ReduceOp.MAX, self._group)
        return x

    def __deepcopy__(self, memo: dict[int, Any]) -> AxisPeers:
        return self


class RowLinear(nn.Module):
    """A linear layer of which each process holds some input columns; the output is whole on all of them."""

    def __init__(self, linear: nn.Linear, peers: AxisPeers) -> None:
        super().__init__()
        self.weight, self.bias, self.peers = linear.weight, linear.bias, peers

    def forward(self, x: Tensor) -> Tensor:
        """[.., out] from this process's [.., in / n]."""
        out = _Summed.apply(F.linear(x, self.weight), self.peers)
        return out if self.bias is None else out + self.bias  # after the sum, or it would be added n times


class VocabularyEmbedding(nn.Module):
    """An embedding of which each process holds the rows of some tokens; the output is whole on all of them."""

    def __init__(self, embedding: nn.Embedding, peers: AxisPeers) -> None:
        super().__init__()
        self.weight, self.peers = embedding.weight, peers
        tokens = len(self.weight)
        self.mine = range(peers.index * tokens, (peers.index + 1) * tokens)
        padding = embedding.padding_idx  # its row learns nothing from being looked up
        self.padding_row = self.mine.index(padding) if padding is not None and padding in self.mine else None

    def forward(self, ids: Tensor) -> Tensor:
        """[.., E] of tokens of the whole vocabulary."""
        inside = (ids >= self.mine.start) & (ids < self.mine.stop)
        found = F.embedding((ids - self.mine.start).where(inside, 0), self.weight, self.padding_row)
        return _Summed.apply(found * inside[..., None], self.peers)


class VocabularyHead(nn.Module):
    """The LM head's rows of some tokens, for `token_logprobs`: the logits of all tokens are nowhere."""

    def __init__(self, head: nn.Linear, peers: AxisPeers) -> None:
        super().__init__()
        self.weight, self.peers = head.weight, peers

    def forward(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError("a head that is cut over processes has no logits of all tokens, use Stage.logprobs")


def _cut_blocks(model: PreTrainedModel, axis: Axis) -> list[str]:
    """Cut the linear layers of all blocks. Returns the names of whole parameters with partial gradients."""
    peers, blocks, partial = AxisPeers(axis), set(), []
    plan = list(_planned(model))
    for name, module, style in plan:
        block, _, leaf = name.rpartition(".")
        if style == PARTIAL:
            partial += [f"{name}.{parameter}" for parameter, _ in module.named_parameters()]
            continue
        assert isinstance(module, nn.Linear)
        _keep_part(module, CUT[style], axis)
        if style == "colwise":
            module.out_features = len(module.weight)
            blocks.add(block)
        else:
            setattr(model.get_submodule(block), leaf, RowLinear(module, peers))
    planned = {name for name, _, _ in plan}
    for block in sorted(blocks):
        inside = model.get_submodule(block)
        for name, module in inside.named_modules(prefix=block):
            # its gradient would silently be this process's part of it
            if name not in planned and any(True for _ in module.parameters(recurse=False)):
                raise ConfigError(f"model.path: {name} has weights, but the model's tensor-parallel plan does not name it")
        inside.register_forward_pre_hook(_copy_input(peers), with_kwargs=True)
    return partial


def _planned(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, str]]:
    """(name, module, style) of every module of a block that the model's plan names; embedding and head are not in blocks."""
    vocabulary = (model.get_input_embeddings(), model.get_output_embeddings())
    for name, module in model.named_modules():
        style = model.tp_plan.get(re.sub(r"\.\d+\.", ".*.", name))
        if style is None or module in vocabulary:
            continue
        if style != PARTIAL and style not in CUT:
            raise ConfigError(f"model.path: {name} is to be cut as {style!r}, which is not supported, must be one of {[*CUT, PARTIAL]}")
        yield name, module, style


def _cut_vocabulary(model: PreTrainedModel, axis: Axis) -> None:
    """Cut embedding and LM head; a tied head keeps sharing the embedding's parameter."""
    embedding, head, peers = model.get_input_embeddings(), model.get_output_embeddings(), AxisPeers(axis)
    assert isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear)
    tied = head.weight is embedding.weight
    for module in (embedding, head):
        _keep_part(module, {"weight": 0}, axis)
    if tied:
        head.weight = embedding.weight
    model.disable_input_require_grads()  # hooks that checkpointing has put on the embedding; a model without their owner cannot be copied
    model.set_input_embeddings(VocabularyEmbedding(embedding, peers))
    model.set_output_embeddings(VocabularyHead(head, peers))
    if model.is_gradient_checkpointing:
        model.enable_input_require_grads()


def _cut_dim(before: torch.Size, after: torch.Size) -> int | None:
    return next((dim for dim, (full, part) in enumerate(zip(before, after, strict=True)) if full != part), None)


def _keep_part(module: nn.Module, dims: Mapping[str, int], axis: Axis) -> None:
    """Replace a module's parameters by this process's parts of them."""
    for leaf, dim in dims.items():
        full = getattr(module, leaf)
        if full is not None:  # a linear layer without bias
            part = full.detach().chunk(axis.size, dim)[axis.index].clone(memory_format=torch.contiguous_format)
            setattr(module, leaf, nn.Parameter(part, full.requires_grad))


def _copy_input(peers: AxisPeers) -> Callable[..., tuple[Any, ...]]:
    """A forward pre-hook that passes a block's input through `_Copied`, once for all layers that read it."""

    def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (_Copied.apply(args[0], peers), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": _Copied.apply(kwargs["hidden_states"], peers)}

    return hook


class _Copied(torch.autograd.Function):
    """Into a block: every process goes on with the same values, so the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: AxisPeers) -> Tensor:
        ctx.peers = peers
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.sum(grads[0].clone(memory_format=torch.contiguous_format)), None  # others may hold the incoming gradient


class _Summed(torch.autograd.Function):
    """Out of a block, in place: the sum of what the processes have; its gradient is each one's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: AxisPeers) -> Tensor:
        ctx.mark_dirty(x)
        return peers.sum(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
