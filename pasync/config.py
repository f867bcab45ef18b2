"""Every key of a run: one frozen, strict tree, whose sections are in `sections.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from pasync.sections import (
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    DeviceConfig,
    Dtype,
    EvalConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    Section,
    SyncConfig,
)


class Config(Section):
    """The whole tree. See each field's text for its meaning and unit."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    """Names the run folder."""
    seed: int = Field(0, ge=0, lt=1 << 31)
    """Seed of data order and sampling."""
    iterations: int = Field(ge=1)
    """Optimizer steps."""
    schedule: Literal["periodic", "sync", "one_step_off"] = "periodic"
    """`periodic` trains on groups as they arrive; `sync` waits for the whole batch first: same gradient. `one_step_off`, for
    comparison only, trains on the batch that the weights before the last step sampled: off-policy, corrected by the ratio to them."""
    model: ModelConfig
    lora: LoraConfig = LoraConfig()
    data: DataConfig
    rollout: RolloutConfig
    rewards: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig = ParallelConfig()
    sync: SyncConfig = SyncConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    device: DeviceConfig = DeviceConfig()
    run: RunConfig = RunConfig()

    @property
    def server_dtype(self) -> Dtype:
        """Type the servers compute in."""
        return self.rollout.dtype or self.model.dtype

    @property
    def max_model_tokens(self) -> int:
        """Longest prompt plus longest response."""
        return self.data.max_prompt_tokens + max(self.rollout.max_tokens, self.eval.max_tokens or 0)

    @property
    def replicas(self) -> int:
        """Data-parallel copies of the model."""
        return self.parallel.ranks // (self.parallel.pipeline * self.parallel.tensor)

    @property
    def trains(self) -> bool:
        """False if the run only samples."""
        return self.rollout.source != "only"

    @property
    def keeps_groups(self) -> bool:
        """Whether groups are written to the run folder."""
        return self.rollout.source in ("record", "only")

    @property
    def refill_limit(self) -> int:
        """Most extra prompts of one iteration."""
        if self.algorithm.filter_zero_variance == "skip":
            return 0
        return self.algorithm.refill_limit or 3 * self.algorithm.batch_groups

    @property
    def replayed_run(self) -> Path | None:
        """Folder of the run whose groups are trained on, if this run samples nothing itself."""
        kind, _, folder = self.rollout.source.partition(":")
        return Path(folder) if kind == "replay" and folder else None

    @property
    def probe_tolerance(self) -> float:
        """Largest mean |trainer - server| log-prob difference of the probe."""
        exact = self.server_dtype == self.model.dtype == "float32"
        return self.sync.probe_tolerance or (1e-3 if exact else 0.15)
