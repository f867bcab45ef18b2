"""vLLM, in process: tokens in, sampled tokens and their log-probs out, new weights in between.

The only file that imports vllm; what differs between vLLM versions and platforms is here. Facts that shaped it:
  - CPU workers compute with packed linear weights, up to 1.5 times as fast, and drop the plain ones: later weights could not be
    loaded. Here they keep both (`_pack_a_copy`) and pack again after every sync, or layers and a tied head would stay stale.
  - `logprobs_mode="processed_logprobs"`: log-probs of the distribution sampled from, temperature included.
  - `generation_config="vllm"`: the model's generation_config.json does not fill in sampling values that we leave out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from pasync import device as devices
from pasync.config import Config
from pasync.errors import WeightSyncError
from pasync.transport.weights import WeightReceiver, checksum

CPU_BLOCK_TOKENS = 32  # prompts shorter than a block are never shared; vLLM's default on CPU is 128


if current_platform.is_cpu():
    import vllm.model_executor.layers.utils

    _pack = vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm

    def _pack_a_copy(layer: torch.nn.Module, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:  # others would be packed in place
            _pack(layer, remove_weight=False)

    vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm = _pack_a_copy


class WorkerExtension:
    """Methods added to every vLLM worker; called by name through `collective_rpc`."""

    _pasync: WeightReceiver | None = None

    def pasync_join(self, join: str) -> None:
        """Enter the weight-transfer group; `join` is the Join message's fields as JSON."""
        worker: Any = self
        kind = devices.detect()
        devices.require_loadable_weights(kind)
        dtype = next(worker.model_runner.get_model().parameters()).dtype
        self.pasync_leave()
        self._pasync = WeightReceiver(kind, json.loads(join), worker.rank, worker.device, dtype)

    def pasync_leave(self) -> None:
        """Leave the group of the last join, if there was one."""
        if self._pasync:
            self._pasync.group.close()
        self._pasync = None

    def pasync_receive(self, with_sum: bool) -> int | None:
        """Load one version; with `with_sum`, answer the checksum of all weights now held."""
        model, receiver = self.model_runner.get_model(), self._pasync  # type: ignore[attr-defined]
        assert receiver is not None
        try:
            with torch.no_grad():
                receiver.receive(model.load_weights, model.parameters())
                for layer in model.modules():
                    if hasattr(layer, "cpu_linear"):
                        _pack_a_copy(layer, remove_weight=False)
                return checksum(p.to(receiver.dtype) for p in model.parameters()) if with_sum else None
        except Exception:
            self.pasync_leave()  # or others might wait for this worker
            raise


class Engine:
    """One vLLM engine over the devices of this process. Methods belong to the asyncio loop that created it."""

    def __init__(self, config: Config, model: Path, server: int, stop_ids: list[int]) -> None:
        self.config, self.stop_ids, self.sharded = config, stop_ids, config.rollout.tensor_parallel > 1
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**_engine_options(config, model, server)))

    async def sample(
        self, prompt_ids: list[int], *, temperature: float, max_tokens: int, request: str
    ) -> tuple[list[int], list[float], bool]:
        """One response to one prompt.

        Returns:
            (token ids with the stop token, their log-probs under the sampled distribution, False if cut at max_tokens).
        """
        params = SamplingParams(**_explicit(temperature, max_tokens), stop_token_ids=self.stop_ids, logprobs=0)
        output = await self._final(prompt_ids, params, request)
        choice = output.outputs[0]
        ids = list(choice.token_ids)
        logprobs = [float(position[token].logprob) for position, token in zip(choice.logprobs, ids, strict=True)]
        return ids, logprobs, choice.finish_reason == "stop"

    async def score(self, ids: list[int], request: str) -> list[float]:
        """Log-probs of tokens 1 .. P-1 of a sequence, at temperature 1."""
        params = SamplingParams(**_explicit(1.0, 1), prompt_logprobs=0)
        output = await self._final(ids, params, request)
        return [float(position[token].logprob) for position, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]

    async def join(self, fields: dict[str, Any]) -> None:
        """Put all workers into the weight-transfer group."""
        await self._on_workers("pasync_join", json.dumps(fields))

    async def receive_weights(self, *, with_sum: bool) -> int | None:
        """Take one version of the weights and forget all cached prefixes.

        Returns:
            `checksum` of the weights held afterwards, if asked for and the weights are not sharded.

        Raises:
            WeightSyncError: a worker did not get or could not load them, or requests were in flight.
        """
        await self._llm.pause_generation(mode="keep", clear_cache=True)
        answers = await self._on_workers("pasync_receive", with_sum and not self.sharded)
        if not await self._llm.reset_prefix_cache():
            raise WeightSyncError("the prefix cache could not be reset: requests were in flight during the sync")
        await self._llm.resume_generation()
        return answers[0]

    def require_alive(self) -> None:
        """Raise vLLM's error if its processes are gone."""
        if self._llm.errored:
            raise self._llm.dead_error

    def shutdown(self) -> None:
        """End the engine's processes."""
        self._llm.shutdown()
        del self._llm  # its destructor must run while vllm is still importable

    async def _on_workers(self, method: str, argument: Any) -> list[Any]:
        try:
            return await self._llm.collective_rpc(method, args=(argument,))  # type: ignore[return-value]
        except Exception as error:  # of a worker, as vLLM wraps it
            raise WeightSyncError(f"{method} failed on a worker: {error}") from error

    async def _final(self, ids: list[int], params: SamplingParams, request: str) -> Any:
        last = None
        async for output in self._llm.generate({"prompt_token_ids": ids}, params, request):
            last = output
        return last


def stop_token_ids(model: Path, tokenizer: Any, prefixes: list[str]) -> list[int]:
    """Every token that ends a response: all EOS ids that the model's files name, and tokens whose text starts with one of `prefixes`."""
    ends: set[int] = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    sources: list[Any] = [AutoConfig.from_pretrained(model).eos_token_id]
    if (model / "generation_config.json").exists():
        sources.append(GenerationConfig.from_pretrained(model).eos_token_id)
    for source in sources:
        ends.update(source if isinstance(source, list) else [source] if source is not None else [])
    if prefixes:
        texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
        ends.update(i for i, text in enumerate(texts) if text.startswith(tuple(prefixes)))
    return sorted(ends)


def _explicit(temperature: float, max_tokens: int) -> dict[str, Any]:
    return dict(
        n=1, temperature=temperature, top_p=1.0, top_k=0, min_p=0.0, max_tokens=max_tokens, min_tokens=0, seed=None,
        presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, ignore_eos=False, detokenize=False,
        skip_special_tokens=False, output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip


def _engine_options(config: Config, model: Path, server: int) -> dict[str, Any]:
    rollout = config.rollout
    options: dict[str, Any] = dict(
        model=str(model), dtype=config.server_dtype, seed=config.seed * 1000 + server, tensor_parallel_size=rollout.tensor_parallel,
        max_model_len=config.max_model_tokens + 1, max_num_seqs=rollout.max_num_seqs, kv_cache_memory_bytes=rollout.kv_cache_bytes,
        enable_prefix_caching=True, generation_config="vllm", logprobs_mode="processed_logprobs", disable_log_stats=True,
        enable_log_requests=False, worker_extension_cls="pasync.rollout.engine.WorkerExtension",
    )  # fmt: skip
    if not current_platform.is_cpu():
        return options | dict(gpu_memory_utilization=rollout.memory_frac)
    options |= dict(enforce_eager=True, block_size=CPU_BLOCK_TOKENS, enable_chunked_prefill=False)
    options["max_num_batched_tokens"] = max(2048, options["max_model_len"])  # without chunks a prompt must fit one step
    if not rollout.tensor_parallel > 1:  # one process less, and one pinned core does all the work
        options["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    return options
