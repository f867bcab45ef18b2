"""Resumable checkpoints and the exported model.

    <run>/checkpoints/iteration-00010/    torch.distributed.checkpoint: master weights and AdamW moments, float32, under the names of
                                          the Hugging Face checkpoint, and the next iteration; history: `Leader.history`
    <run>/model/                          Hugging Face format, for transformers and vLLM

A folder appears under its name only when complete. Every parameter is described as a whole that processes hold pieces of, so a run
may continue on another number of ranks, stages or shards. Data order and schedule are functions of (seed, iteration) and need no state.
"""

from __future__ import annotations

import logging
import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedTokenizerBase

from pasync.config import Config
from pasync.errors import TrainingError
from pasync.parallel.optimizer import KEYS
from pasync.parallel.slices import Slot
from pasync.trainer import Trainer

log = logging.getLogger(__name__)


class Checkpoints:
    """Of one run. Methods run on the main thread of every rank and are collectives.

    Args:
        run: the run folder.
    """

    def __init__(self, config: Config, run: Path, trainer: Trainer) -> None:
        self.config, self.folder, self.trainer = config.checkpoint, run / "checkpoints", trainer
        self.last = config.iterations
        # its own group: the writing thread must not mix with the main thread's collectives
        self._group = dist.new_group(timeout=timedelta(seconds=config.parallel.deadline_s), backend="gloo")
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self.history = b""
        """Of the checkpoint that the run continues, on rank 0."""

    def due(self, iteration: int) -> bool:
        """Whether to save after this iteration: every n-th and the last, so that a finished run can be continued too."""
        done = iteration + 1
        return bool(self.config.every) and (done % self.config.every == 0 or done == self.last)

    def save(self, iteration: int, history: bytes = b"") -> None:
        """Copy what is needed to continue with `iteration` next, and return while a thread writes it.

        Waits for the checkpoint before. Once written, the folder gets its name and the oldest beyond `keep` are deleted.

        Args:
            history: on rank 0, for the next run's `self.history`.

        Raises:
            TrainingError: on all ranks, if the one before could not be written.
        """
        self.finish()
        unfinished = self.folder / f"iteration-{iteration:05d}.partial"
        self.trainer.ranks.on_first(lambda: _empty_folder(unfinished))
        state = self._described(self._copies()) | {"iteration": torch.tensor(iteration)}
        self._writing = self._thread.submit(self._write, state, history, unfinished)

    def finish(self) -> None:
        """Wait until what is being written is complete.

        Raises:
            TrainingError: on all ranks, if it could not be written; the one before is still there.
        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        self.trainer.ranks.on_first(lambda: _require_written(writing))  # only rank 0 gives the folder its name
        _require_written(writing)

    def resume(self) -> int:
        """Load the newest checkpoint of the run folder, if there is one.

        Returns:
            The iteration to do next; 0 without a checkpoint.

        Raises:
            TrainingError: on all ranks, if the checkpoint is of another model, or cannot be read.
        """
        ranks = self.trainer.ranks
        chosen = ranks.from_first(lambda: b"".join(str(p).encode() for p in self._complete()[-1:])).decode()
        if not chosen:
            return 0
        copies = self._copies()
        state = self._described(copies) | {"iteration": torch.tensor(0)}
        self._require_same_model(chosen, state)
        try:
            dcp.load(state, checkpoint_id=chosen, process_group=self._group)
        except dcp.api.CheckpointException as error:
            raise TrainingError(f"{chosen} could not be read: {_cause(error)}") from error
        self.trainer.optimizer.load(copies)
        self.trainer.models.refresh_old()
        self.history = (Path(chosen) / "history").read_bytes()
        return int(state["iteration"])

    def _copies(self) -> dict[str, Tensor]:
        """The optimizer's state, on the host."""
        return {key: rows.to("cpu", copy=True) for key, rows in self.trainer.optimizer.state().items()}

    def _described(self, state: dict[str, Tensor]) -> dict[str, Any]:
        """The same with every parameter's rows as what they are of the whole."""
        slots = self.trainer.optimizer.slots
        parts = {f"{key}.{slot.name}": self._part(slot, state[f"{key}.{slot.name}"]) for key in KEYS for slot in slots}
        return parts | {"step": state["step"]}

    def _part(self, slot: Slot, rows: Tensor) -> DTensor:
        """This rank's rows of a parameter as part of the whole."""
        mesh, dim, shape = self.trainer.ranks.mesh, self.trainer.models.dims[slot.name], list(slot.shape)
        if dim is not None:
            shape[dim] *= mesh.tensor.size
        return DTensor.from_local(
            rows,
            mesh.hosts["tensor", "data"],
            [Replicate() if dim is None else Shard(dim), Shard(0)],
            run_check=False,
            shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )

    def _require_same_model(self, chosen: str, state: dict[str, Any]) -> None:
        saved = dcp.FileSystemReader(chosen).read_metadata().state_dict_metadata
        for name, tensor in state.items():
            size = getattr(saved.get(name), "size", None)
            if size != tensor.shape:
                raise TrainingError(f"{chosen} is of another model: it holds {name} as {size}, the model has {tuple(tensor.shape)}")

    def _write(self, state: dict[str, Any], history: bytes, unfinished: Path) -> None:
        """Runs in the writing thread of every rank; returns when all have written."""
        dcp.save(state, checkpoint_id=unfinished, process_group=self._group)
        if not self.trainer.ranks.is_first:
            return
        (unfinished / "history").write_bytes(history)
        folder = unfinished.with_suffix("")
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
        for old in self._complete()[: -self.config.keep]:
            shutil.rmtree(old)
        log.info("checkpoint %s is complete", folder.name)

    def _complete(self) -> list[Path]:
        """Finished checkpoint folders, oldest first."""
        return sorted(
            p for p in self.folder.glob("iteration-*") if re.fullmatch(r"iteration-\d{5,}", p.name) and (p / ".metadata").exists()
        )


def export(trainer: Trainer, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the policy in Hugging Face format, complete or not at all. Runs on rank 0, inside `Ranks.on_first`."""
    unfinished, models = folder.with_suffix(".partial"), trainer.models
    _empty_folder(unfinished)
    save_torch_state_dict({name: weight.cpu() for name, weight in models.weights()}, unfinished)
    models.model_config.save_pretrained(unfinished)
    if models.generation_config is not None:
        models.generation_config.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def _require_written(writing: Future[None]) -> None:
    if error := writing.exception():
        raise TrainingError(f"a checkpoint could not be written: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    """Of torch's own error, which is no Exception and holds those of all ranks, the first one's."""
    if isinstance(error, dcp.api.CheckpointException) and error.failures:
        rank, (first, _) = next(iter(error.failures.items()))
        return f"rank-{rank}: {first}"
    return str(error)


def _empty_folder(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
