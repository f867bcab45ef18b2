"""The sections of a configuration file, one class each. Units are part of a key's name (`_s`, `_tokens`, `_bytes`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Dtype = Literal["float32", "bfloat16"]
Kind = Literal["auto", "cpu", "cuda", "npu"]
Advantage = Literal["grpo", "dr_grpo", "rloo", "opo", "reinforce++"]
PolicyLoss = Literal["ppo", "gspo", "cispo", "reinforce"]
Normalizer = Literal["sequence", "token", "constant"]
KlEstimate = Literal["k1", "k2", "k3"]
PREPARED = ("aime24", "deepscaler", "gsm8k", "math500")
"""Data sets that `python -m pasync.data.prepare` makes."""


class Section(BaseModel):
    """A part of the tree: unknown keys are errors, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=False)


class ModelConfig(Section):
    path: str
    """Folder of a Hugging Face causal LM (Qwen2, Qwen3 or Llama family), or a model this repository can make:
    `smollm2-135m-instruct`, `tiny-sort`."""
    dtype: Dtype = "bfloat16"
    """Compute type of the training ranks. Accumulated gradients and master weights are float32 in any case."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    shared_prompt: bool = True
    """Compute each prompt once for all its responses; `off` repeats it for every response. Same gradient."""
    offload_reference: bool = False
    """Keep the reference model in host memory between batches."""
    attention: Literal["auto", "merged", "concat"] = "auto"
    """`merged`: flash kernels of the device, no key is copied. `concat`: plain scaled-dot-product attention over copied prompts.
    `auto`: `merged` where its kernels pass a test on this device, else `concat`; the rank's log says which."""


class LoraConfig(Section):
    rank: int = Field(0, ge=0)
    """r: train adapters of this rank beside the layers instead of the weights; 0 trains all weights."""
    alpha: int = Field(32, ge=1)
    """What an adapter adds is scaled by alpha / rank."""
    targets: list[str] = Field(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], min_length=1)
    """Names of the linear layers that get one, in every decoder layer."""


class DatasetConfig(Section):
    source: str
    """`reasoning-gym:<task>`, a .jsonl, .json or .parquet file, or a folder written by `datasets.save_to_disk`.
    A relative path is relative to the configuration file. `gsm8k`, `math500`, `aime24`, `deepscaler`: the training or the test part
    that `python -m pasync.data.prepare NAME` has put into `data/` beside the configuration file."""
    prompt_column: str = "question"
    """Column that holds the question."""
    answer_column: str = "answer"
    """Column that holds the reference answer; rewards see it as `sample["answer"]`."""
    max_tokens_column: str | None = None
    """Column with each row's own longest response, in tokens; `rollout.max_tokens` still bounds it."""
    size: int | None = Field(None, ge=1)
    """Use only the first `size` rows; for reasoning-gym, how many problems to generate (required there)."""
    seed: int = 0
    """Seed of a reasoning-gym generator."""
    options: dict[str, Any] = {}
    """Extra arguments of the reasoning-gym generator, for instance `max_terms: 3`."""


class HeldOutConfig(DatasetConfig):
    responses: int = Field(1, ge=1)
    """k: responses to each problem. More than one need `eval.temperature` above 0."""


class DataConfig(Section):
    train: DatasetConfig
    """Prompts to learn from; each epoch is a new shuffle."""
    eval: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")], HeldOutConfig] | None = None
    """Held-out sets by name: each is evaluated by itself."""
    template: str = "{question}"
    """Python format string over the row's columns; `{question}` is always the prompt column."""
    chat: bool = True
    """Send the filled template as a user message through the tokenizer's chat template; otherwise as raw text."""
    system: str | None = None
    """System message of the chat."""
    max_prompt_tokens: int = Field(512, ge=1)
    """A longer prompt is an error at start, never cut in silence."""

    @property
    def sets(self) -> dict[str, DatasetConfig]:
        """All data sets by their key in the configuration."""
        return {"data.train": self.train, **{f"data.eval.{name}": held_out for name, held_out in (self.eval or {}).items()}}


class RolloutConfig(Section):
    servers: int = Field(1, ge=1)
    """Number of vLLM server processes."""
    tensor_parallel: int = Field(1, ge=1)
    """Devices of each server."""
    dtype: Dtype | None = None
    """Type the servers compute in; unset means the type of the training ranks."""
    max_tokens: int = Field(ge=1)
    """Longest response, in tokens."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of training responses; the trainer's log-probs use the same one. The whole distribution is
    sampled (no top-p, top-k or penalties), because the gradient is that of the distribution sampled from."""
    stop_token_prefixes: list[str] = []
    """Any token whose text starts with one of these ends the response, as EOS does."""
    max_num_seqs: int = Field(64, ge=1)
    """Responses a server samples at once; so floor(max_num_seqs / K) whole groups at a time (as many again wait there)."""
    admission: Literal["longest_first", "group_first", "fifo"] = "longest_first"
    """Which group a server gets next. `group_first`: in the order of the batch, few at a time, so that groups
    finish one after the other. `longest_first`: the same, longest expected first. `fifo`: all at once."""
    kv_cache_bytes: int | None = Field(None, ge=1 << 20)
    """Size of a server's KV cache. Required on cpu; on devices unset means `memory_frac`."""
    memory_frac: float = Field(0.9, gt=0, le=1)
    """Share of a device's memory that a server may use (not on cpu)."""
    heartbeat_s: float = Field(1.0, gt=0)
    """A server says that it lives this often."""
    silence_s: float = Field(30.0, gt=0)
    """A server not heard of for so long is given up."""
    max_restarts: int = Field(3, ge=0)
    """How often each server is started again after it died or was given up. Its groups go to the others, and it takes part again from the
    next iteration on. 0: the first death ends the run; on several nodes (`device.nodes`) it must be 0."""
    start_s: float = Field(300.0, gt=0)
    """Longest wait for all servers to be ready, and of a ready one for the trainer."""
    deadline_s: float = Field(600.0, gt=0)
    """Longest wait for the next finished group."""
    source: str = "live"
    """`live`: sample from the servers. `record`: the same, and keep every group in the run folder. `only`: sample from the
    starting weights and keep every group, train nothing. `replay:<run folder>`: train on the groups kept there, without any server."""
    replay_order: Literal["recorded", "sorted", "random"] = "recorded"
    """Order in which replayed groups arrive: as they did, by number, or shuffled by (seed, iteration)."""
    replay_delay: Literal["none", "recorded"] = "none"
    """Replayed groups arrive at once, or as long after submission as they did."""


class RewardConfig(Section):
    function: str = "math"
    """`math` (math-verify), `exact` (same text after stripping), or `module:function` of your own."""
    workers: int = Field(1, ge=1)
    """Reward processes of each server."""
    timeout_s: float = Field(8.0, gt=0)
    """A call that takes longer is killed, scored 0 and counted."""
    memory_bytes: int = Field(4 << 30, ge=1 << 28)
    """Memory limit of a reward process; one that reaches it ends, scores 0 and is counted."""
    on_error: Literal["zero", "drop", "raise"] = "zero"
    """When the function raises, or gives no finite number: `zero` scores 0 and is counted, `drop` leaves the whole group out of gradient
    and denominator (with `refill` another prompt takes its place), `raise` ends the run. A killed call scores 0 in any case: the
    response may be to blame."""
    truncated_is_wrong: bool = True
    """A response cut at `max_tokens` scores 0 without being looked at."""


class AlgorithmConfig(Section):
    batch_groups: int = Field(ge=1)
    """B: prompts of one iteration."""
    group_responses: int = Field(ge=1)
    """K: responses to each prompt."""
    updates_per_batch: int = Field(1, ge=1)
    """M: optimizer steps on each batch. The first overlaps with generation; the others go over the whole batch again, with the ratio
    to the weights that the iteration began with."""
    filter_zero_variance: Literal["skip", "refill"] = "skip"
    """Groups whose rewards are all equal teach nothing. `skip`: they are counted in the batch but not computed. `refill`: they are
    left out, and more prompts are sampled until B useful groups are there (dynamic sampling, DAPO)."""
    refill_limit: int | None = Field(None, ge=1)
    """Most extra prompts of one iteration with `refill`; then the batch stays smaller. Unset means 3 B."""
    advantage: Advantage = "grpo"
    """Credit of a response among those to the same prompt; formulas of this and the following keys are in docs/algorithms.md."""
    loss: PolicyLoss = "ppo"
    """`ppo` clips the ratio of each token to the old policy, `gspo` that of each response; `cispo` clips it, but leaves every token its
    gradient; `reinforce` uses no ratio. They only differ from the second update of a batch on, or off-policy."""
    normalizer: Normalizer = "token"
    """What the summed loss is divided by: `sequence` means of token means (GRPO), `token` all tokens (DAPO),
    `constant` responses x max_tokens (Dr. GRPO)."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """Ratio to the old policy is clipped below 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """Ratio to the old policy is clipped above 1 + clip_high."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL estimate to the starting model; 0 holds no reference model."""
    kl_estimate: KlEstimate = "k3"
    """`k2` in the loss and `k1` in the reward have the gradient of the KL itself, `k3` in the loss that of the KL the other way round."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add it to each token's loss, or subtract its sum over a response from the reward before advantages are taken."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy at each token, subtracted from its loss."""
    overlong_tokens: int = Field(0, ge=0)
    """Over the last so many tokens before `rollout.max_tokens` a response loses up to 1 of its reward (soft punishment, DAPO)."""
    mask_truncated: bool = False
    """Responses cut at `max_tokens` count in their group's baseline, but are not trained on and not counted in the denominator (DAPO)."""
    importance: Literal["none", "token", "response"] = "none"
    """Weigh each token's loss by the ratio of the trainer's to the server's probability, of the token or of its whole response (truncated
    importance sampling)."""
    importance_cap: float = Field(2.0, gt=0)
    """Largest such weight."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """When log-probs, loss or gradient are not finite, the micro-batches that cause it are found and their groups kept in the run folder.
    Then `raise` ends the run; `skip` computes the batch again without their gradient (their tokens stay in the denominator)."""
    max_logprob_gap: float | None = Field(None, gt=0)
    """An iteration whose mean |trainer - server| log-prob gap exceeds it ends the run; unset: no alarm."""
    max_kl: float | None = Field(None, gt=0)
    """An iteration whose mean KL to the starting model exceeds it ends the run; unset: no alarm."""
    tri_model: Literal["needed", "always"] = "needed"
    """`always` holds policy, old policy and reference and computes all three in one pass, even those whose log-probs are known."""

    @property
    def kl_in_loss(self) -> bool:
        """Whether each token's loss has a KL term."""
        return self.kl_coef > 0 and self.kl_in == "loss"

    @property
    def kl_in_reward(self) -> bool:
        """Whether advantages depend on log-probs, so that only the trainer can know them."""
        return self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def equal_rewards_teach(self) -> bool:
        """Whether a group of equal rewards has a gradient."""
        return self.kl_coef > 0 or self.entropy_coef > 0


class OptimizerConfig(Section):
    lr: float = Field(gt=0)
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course after the warm-up; `linear` and `cosine` end at 0 after the last iteration."""
    warmup_iterations: int = Field(0, ge=0)
    """Iterations over which the rate rises linearly to `lr`."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    clip_norm: float = Field(1.0, gt=0)
    """Largest norm of the whole gradient."""


class ParallelConfig(Section):
    ranks: int = Field(1, ge=1)
    """Training processes: stages x shards x replicas (data-parallel, as many as remain)."""
    pipeline: int = Field(1, ge=1)
    """Stages that the model's layers are dealt out to. Micro-batches stream through them, one forward and one backward in turns."""
    tensor: int = Field(1, ge=1)
    """Shards that every layer is cut into; must divide heads, key/value heads, intermediate size and vocabulary."""
    data: Literal["zero1", "fsdp"] = "zero1"
    """How replicas share memory. `zero1`: each holds the whole weights and gradients and a slice of the optimizer; no messages inside
    a batch. `fsdp`: a slice of everything; less memory, but each micro-batch moves all weights twice and all gradients once."""
    micro_batch_tokens: int = Field(16384, ge=1)
    """Ready groups are packed up to so many tokens into one forward. A larger group is cut between responses, and its prompt
    computed once per piece."""
    accumulate: Literal["float32", "exact"] = "float32"
    """How gradients are added up. `exact`: as integers, one group at a time and deterministically, so that neither order nor number
    of replicas changes a single bit; slower, and twice the memory of the gradient."""
    deadline_s: float = Field(1800.0, gt=0)
    """Longest wait of a rank for another one; must exceed every other deadline."""


class SyncConfig(Section):
    bucket_bytes: int = Field(16 << 20, ge=1 << 10)
    """Weights are sent in buckets of at most this size; a larger weight travels alone."""
    deadline_s: float = Field(120.0, gt=0)
    """Longest wait for one bucket of a weight transfer, on both sides, and for the servers' acknowledgements."""
    probe_every: int = Field(1, ge=1)
    """Check the servers' weights (sum of what they hold, log-probs of a fixed sequence) after every n-th sync, and after the first two."""
    probe_tolerance: float | None = Field(None, gt=0)
    """Largest mean |trainer - server| log-prob difference of the probe; unset means 0.001 in float32, 0.15 in bfloat16."""


class EvalConfig(Section):
    every: int = Field(0, ge=0)
    """Evaluate every n iterations, and at the start and the end; 0: never."""
    max_delay_s: float | None = Field(None, ge=0)
    """Servers evaluate while they have nothing to sample for training. Training waits at most so long for what is left after the
    optimizer step; then it is cancelled, and a set that is not finished has no scores. Unset: as long as it takes."""
    temperature: float = Field(0.0, ge=0)
    """0 is greedy."""
    max_tokens: int | None = Field(None, ge=1)
    """Longest evaluation response; unset means `rollout.max_tokens`."""


class CheckpointConfig(Section):
    every: int = Field(0, ge=0)
    """Save a resumable checkpoint every n iterations and after the last; 0: only the final model."""
    keep: int = Field(2, ge=1)
    """Older checkpoints are deleted."""
    grace_s: float = Field(60.0, gt=0)
    """With `every`: after SIGTERM the ranks have so long to save where they are. Choose less than the scheduler waits before SIGKILL."""


class DeviceConfig(Section):
    kind: Kind = "auto"
    """`auto` takes npu before cuda before cpu."""
    count: int | None = Field(None, ge=1)
    """Devices (cpu: cores) to use, on each node; unset means all that are there."""
    nodes: int = Field(1, ge=1)
    """Hosts with `count` devices each: training ranks fill the first ones, servers follow. Every host runs launch.sh for its part."""


class RunConfig(Section):
    dir: str | None = None
    """The run folder; unset means `runs/<name>-<time>`. A folder with checkpoints is continued."""
    max_restarts: int = Field(0, ge=0)
    """How often the launcher starts all processes again, from the newest checkpoint, after a failure that is not a ConfigError."""
    silence_s: float = Field(60.0, gt=0)
    """A process of the run that is stopped (SIGSTOP; the launcher also by Ctrl-Z) for so long is killed: then it is one that died."""
    trackers: list[Literal["tensorboard", "wandb"]] = []
    """Where the numbers of metrics.jsonl go besides: TensorBoard files in `<run>/tensorboard`; Weights & Biases, to be installed first."""
