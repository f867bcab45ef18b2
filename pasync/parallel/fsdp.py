"""Data parallelism by torch's FSDP2: each rank holds its rows of every parameter and gradient, a layer is whole only while it computes.

    every forward and backward:  all-gather a layer's weights -> compute -> drop them;  backward: reduce-scatter its gradients to my rows

Less memory than ZeRO-1 (`zero.py`) for more messages: each micro-batch gathers the weights twice and scatters the gradients once. All
replicas must do the same number of micro-batches (`TriModel.in_step`). FSDP2: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from pasync.model.stage import Stage
from pasync.parallel.mesh import Axis
from pasync.parallel.optimizer import Copies, ShardedAdamW
from pasync.parallel.ranks import Ranks
from pasync.parallel.slices import plan
from pasync.sections import OptimizerConfig


def shard(stage: Stage, axis: Axis, device: torch.device) -> None:
    """Keep this rank's rows of all parameters, as distributed tensors on `device`. A collective of the axis.

    Those with gradient become float32 and are the master weights; the model computes in the type it had, `stage.dtype`. Gradients are
    summed in float32; FSDP2 divides each sum by the number of ranks.
    """
    mesh = DeviceMesh.from_group(axis.group, device.type)
    policy = MixedPrecisionPolicy(param_dtype=stage.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*stage.model.layers.values(), stage):
        for p in module.parameters():
            if p.requires_grad and not isinstance(p, DTensor):
                p.data = p.data.float()
        # by default the outermost would stay whole after a forward, and go on computing with old weights after a step
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    register_fsdp_forward_method(stage, "logprobs")


def local(tensor: Tensor) -> Tensor:
    """This process's rows of a distributed tensor, a view; any other tensor is its own."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def gathered(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A distributed tensor's rows of all processes, in `dtype`, a collective; any other tensor is whole."""
    return tensor.to(dtype).full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()  # type: ignore[attr-defined]


class FullyShardedAdamW(ShardedAdamW):
    """`ShardedAdamW` whose master tensors are the rows that `shard` left of the parameters: one each, and nothing is to be written back.

    Args:
        parameters: of a sharded stage, by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, ranks: Ranks, copies: Copies) -> None:
        self.parameters, self.axis = parameters, ranks.mesh.data
        slots = plan([(name, tuple(p.shape)) for name, p in parameters.items()], self.axis.size)
        super().__init__(slots, [local(p) for p in parameters.values()], config, ranks, copies)

    def rows(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        """By parameter, this rank's rows."""
        return dict(zip(self.parameters, tensors, strict=True))

    def reduced(self, divisor: float) -> list[Tensor]:
        """This rank's rows of the sum over all replicas, divided. Every backward pass has already added them up."""
        scale = self.axis.size / divisor
        return [torch.zeros_like(local(p)) if p.grad is None else local(p.grad) * scale for p in self.parameters.values()]

    def is_finite(self) -> bool:
        """Whether this rank's rows of what all replicas have summed up so far are."""
        return all(bool(local(p.grad).isfinite().all()) for p in self.parameters.values() if p.grad is not None)

    def clear(self) -> None:
        """Start a new sum."""
        for p in self.parameters.values():
            p.grad = None

    def write_parameters(self) -> None:
        """Masters are the parameters."""
