"""Policy, old policy and reference: three models of one architecture, cut alike over the mesh, in one pass per micro-batch.

    micro-batch --> stage 0 of [policy, old, reference] --one message--> stage 1 of the three --> .. --> three sets of log-probs --> loss

What is not needed is not held: the old policy's log-probs are the policy's own before the first step on a batch, and kept for further ones;
without a KL term there is no reference. `algorithm.tri_model=always` holds all three.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig

from pasync.config import Config
from pasync.data.packing import MicroBatch, Part, empty_row, pack
from pasync.model.causal_lm import empty_model
from pasync.model.files import WeightFiles
from pasync.model.lora import AdaptersOff, add_adapters, merged
from pasync.model.stage import Stage
from pasync.parallel.fsdp import gathered, local, shard
from pasync.parallel.optimizer import Copies
from pasync.parallel.pipeline import Pipeline
from pasync.parallel.ranks import Ranks
from pasync.parallel.tensor import cut, whole

CHUNK_BYTES = 64 << 20
"""Weights are gathered in chunks of about this size (larger tensors alone)."""


@dataclass(frozen=True)
class LogProbs:
    """Of one micro-batch, each [N] float32."""

    policy: Tensor
    """With gradient."""
    old: Tensor | None
    reference: Tensor | None
    entropy: Tensor


@dataclass(frozen=True)
class Weight:
    """Where a weight of the checkpoint lies."""

    name: str
    shape: tuple[int, ...]
    stage: int
    dim: int | None
    """Along which it is cut over the tensor axis."""


class TriModel:
    """This process's stage and shard of the models. Making one is a collective; every method says whether it is.

    Args:
        folder: of the starting weights.
    """

    def __init__(self, config: Config, folder: Path, ranks: Ranks) -> None:
        self.ranks, self.mesh, self.shared_prompt = ranks, ranks.mesh, config.model.shared_prompt
        model = empty_model(config.model, folder)
        self.model_config: PretrainedConfig = model.config
        self.generation_config: GenerationConfig | None = model.generation_config
        shards = cut(model, self.mesh.tensor)
        self.policy = Stage(model, self.mesh.pipeline.index, self.mesh.pipeline.size)
        tied = self.policy.tied_weight
        embedding = next(name for name, p in model.named_parameters() if p is model.get_input_embeddings().weight)
        names = {name: embedding if p is tied else name for name, p in self.policy.named_parameters()}
        self.dims = {name: shards.dims[name] for name in names.values()}
        always = config.algorithm.tri_model == "always"
        self.old = _frozen(self.policy) if always else None
        needs_reference = bool(always or config.algorithm.kl_coef)
        self.reference: Stage | AdaptersOff | None = _frozen(self.policy) if needs_reference and not config.lora.rank else None
        self.lock_step = config.parallel.data == "fsdp"
        stages = [stage for stage in (self.policy, self.old, self.reference) if isinstance(stage, Stage)]
        with WeightFiles(folder) as files:
            for stage in stages:  # one after the other: neither the host nor a device ever holds a model whole
                files.fill(stage, {name: (of, self.dims[of]) for name, of in names.items()}, self.mesh.tensor.index, self.mesh.tensor.size)
                shard(stage, self.mesh.data, ranks.device) if self.lock_step else stage.to(ranks.device)
        self._held: dict[str, nn.Parameter] = {names[name]: p for name, p in self.policy.named_parameters()}
        """Of the policy, under the names of the checkpoint; a tied head on a stage of its own bears the embedding's."""
        self.parameters, self.lora = self._held, config.lora
        """What is trained: these, or the adapters beside them."""
        if self.lora.rank:
            self._adapt(config.seed, needs_reference)
        cut_over = self.mesh.tensor.size > 1
        self.copies = Copies(
            replicated=frozenset(name for name, dim in self.dims.items() if cut_over and dim is None),
            partial=frozenset(shards.partial) & self.parameters.keys(),
            tied=embedding if tied is not None else None,
        )
        self.offload = config.model.offload_reference
        models: list[Any] = [model for model in (self.policy, self.old, self.reference) if model is not None]
        self._pipeline = Pipeline(models, self.mesh.pipeline, ranks.device, self._decode, deadline_s=config.parallel.deadline_s)
        self._chunks = self._plan_chunks()

    def run(self, bodies: Iterator[bytes] | None, loss: Callable[[MicroBatch, LogProbs], Tensor], *, temperature: float) -> None:
        """One pass over micro-batches; under `torch.no_grad()` only forward. A collective of each pipeline.

        Args:
            bodies: from `encode`, on the first stage; None elsewhere.
            loss: called on the last stage, gives a scalar to differentiate.
            temperature: of the sampling distribution.
        """
        if self.offload and isinstance(self.reference, Stage):
            self.reference.to(self.ranks.device)

        def with_names(batch: MicroBatch, logps: list[Tensor], entropy: Tensor) -> Tensor:
            others = iter(logps[1:])
            old, reference = (next(others) if held is not None else None for held in (self.old, self.reference))
            return loss(batch, LogProbs(logps[0], old, reference, entropy))

        self._pipeline.run(bodies, with_names, temperature=temperature)

    def in_step(self, bodies: list[bytes]) -> list[bytes]:
        """As many micro-batches on every replica as they must do together. On the first stage; a collective of the data axis if so."""
        if not self.lock_step:
            return bodies
        most = torch.tensor(len(bodies))
        dist.all_reduce(most, dist.ReduceOp.MAX, self.mesh.data.group)
        return bodies + [EMPTY] * (int(most) - len(bodies))

    def rest(self) -> None:
        """Between batches: the reference leaves the device if `model.offload_reference` says so."""
        if self.offload and isinstance(self.reference, Stage):
            self.reference.to("cpu")

    @torch.no_grad()
    def refresh_old(self) -> None:
        """The policy becomes the old policy."""
        if self.old is not None:
            for mine, new in zip(self.old.parameters(), self.policy.parameters(), strict=True):
                local(mine).copy_(local(new))

    @property
    def shapes(self) -> list[tuple[str, list[int]]]:
        """Names and shapes of all weights of the checkpoint, in the order of `weights`."""
        return [(weight.name, list(weight.shape)) for chunk in self._chunks for weight in chunk]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name in the Hugging Face checkpoint, whole tensor) of every weight of the policy; a tied head is not listed twice.

        Runs on rank 0, inside `Ranks.on_first` with `calls`: where the policy is cut, each chunk is a collective. A tensor is the parameter
        itself or one of its own, so it stays as it is until the next step.
        """
        alone = self.mesh.pipeline.size == self.mesh.tensor.size == 1 and not self.lock_step
        for i in range(len(self._chunks)):
            if not alone:
                self.ranks.call("weights", str(i).encode())
            yield from self.gather(i)

    def gather(self, chunk: int) -> list[tuple[str, Tensor]]:
        """The whole tensors of a chunk on rank 0, nothing elsewhere. A collective: of the first replica, in lock-step of all."""
        if not self.mesh.data.is_first and not self.lock_step:
            return []
        gathered = ((weight.name, self._whole(weight)) for weight in self._chunks[chunk])
        return [(name, tensor) for name, tensor in gathered if tensor is not None]

    def _adapt(self, seed: int, needs_reference: bool) -> None:
        """Train adapters; without them the policy is the reference."""
        self.parameters = add_adapters(self.policy, self.lora, seed)
        self.dims |= dict.fromkeys(self.parameters)
        if self.old is not None:
            add_adapters(self.old, self.lora, seed)
        if needs_reference:
            self.reference = AdaptersOff(self.policy)

    def _whole(self, weight: Weight) -> Tensor | None:
        mesh, tensor = self.mesh, None
        if weight.stage == mesh.pipeline.index:
            tensor = whole(gathered(self._held[weight.name], self.policy.dtype), weight.dim, mesh.tensor)
            tensor = merged(weight.name, tensor, self.parameters, self.lora)
        if weight.stage and mesh.tensor.is_first and mesh.data.is_first:  # from the stage's first shard to rank 0
            if tensor is not None:
                dist.send(tensor.contiguous(), 0)
            elif self.ranks.is_first:
                tensor = torch.empty(weight.shape, dtype=self.policy.dtype, device=self.ranks.device)
                dist.recv(tensor, mesh.pipeline.ranks[weight.stage])
        return tensor if self.ranks.is_first else None

    def _plan_chunks(self) -> list[list[Weight]]:
        """All weights, stage by stage: the same on every process. A collective."""
        mine = []
        for name, p in self._held.items():
            shape = list(p.shape)
            if (dim := self.dims[name]) is not None:
                shape[dim] *= self.mesh.tensor.size
            mine.append(Weight(name, tuple(shape), self.mesh.pipeline.index, dim))
        every: list[list[Weight]] = [[] for _ in range(self.ranks.size)]
        dist.all_gather_object(every, mine)
        found: dict[str, Weight] = {}
        for weights in every:  # of the first stage that holds it
            for weight in weights:
                found.setdefault(weight.name, weight)
        chunks: list[list[Weight]] = []
        size = 0
        for weight in found.values():
            nbytes = torch.Size(weight.shape).numel() * self.policy.dtype.itemsize
            if not chunks or size + nbytes > CHUNK_BYTES:
                chunks.append([])
                size = 0
            chunks[-1].append(weight)
            size += nbytes
        return chunks

    def _decode(self, body: bytes) -> MicroBatch:
        return pack(_decoder.decode(body), shared_prompt=self.shared_prompt)


def encode(parts: list[Part]) -> bytes:
    """A micro-batch for `TriModel.run`."""
    return msgspec.msgpack.encode(parts)


def group_ids(bodies: list[bytes]) -> list[int]:
    """Groups that micro-batches hold, whole or in part."""
    return sorted({part.group_id for body in bodies for part in _decoder.decode(body) if part.group_id >= 0})


def _frozen(stage: Stage) -> Stage:
    return copy.deepcopy(stage).requires_grad_(False)


EMPTY = encode(empty_row())
"""A micro-batch without any token to train on."""
_decoder = msgspec.msgpack.Decoder(list[Part])
