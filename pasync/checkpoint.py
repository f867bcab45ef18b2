"""Resumable checkpoints and the exported model.

    <run>/checkpoints/iteration-00010/    torch.distributed.checkpoint: master weights and AdamW moments, float32, under the names of
                                          the Hugging Face checkpoint, and the next iteration; history: `Leader.history`;
                                          sha256sums: of all these files
    <run>/model/                          Hugging Face format, for transformers and vLLM
    <run>/adapter/                        with `lora.rank`: peft's format

A folder appears under its name only when complete, and is only used if it is what was written. The name holds the number, so there is
no pointer to the newest that could be wrong. Every parameter is described as a whole that processes hold pieces of, so a run
may continue on another number of ranks, stages or shards. Data order and schedule are functions of (seed, iteration) and need no state.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from pasync import checksums, disk
from pasync.config import Config
from pasync.errors import CheckpointError
from pasync.model.lora import save_adapters
from pasync.observe.console import say
from pasync.parallel.optimizer import KEYS
from pasync.parallel.slices import Slot
from pasync.trainer import Trainer

OWN_FILES = (".metadata", "history")
"""Of a checkpoint, written by rank 0 beside the data of all ranks."""
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
        self.newest = 0
        """Iteration that the newest usable checkpoint continues with; 0 if there is none."""
        self._damaged: set[Path] = set()

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
            CheckpointError: on all ranks, if the one before could not be written, or this one will not fit on the disk.
        """
        self.finish()
        unfinished = self.folder / f"iteration-{iteration:05d}.partial"
        self.trainer.ranks.on_first(lambda: self._make_room(unfinished))
        self.newest = iteration
        state = self._described(self._copies()) | {"iteration": torch.tensor(iteration)}
        self._writing = self._thread.submit(self._write, state, history, unfinished)

    def finish(self) -> None:
        """Wait until what is being written is complete.

        Raises:
            CheckpointError: on all ranks, if it could not be written; the one before is still there.
        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        self.trainer.ranks.on_first(lambda: _require_written(writing))  # only rank 0 gives the folder its name
        _require_written(writing)

    def resume(self) -> int:
        """Load the newest checkpoint of the run folder that is not damaged, if there is one.

        Returns:
            The iteration to do next; 0 without a checkpoint.

        Raises:
            CheckpointError: on all ranks, if all are damaged, or the one chosen is of another model or cannot be read.
        """
        chosen = self._choose()
        if chosen is None:
            return 0
        copies = self._copies()
        state = self._described(copies) | {"iteration": torch.tensor(0)}
        self._require_same_model(chosen, state)
        try:
            dcp.load(state, checkpoint_id=chosen, process_group=self._group)
        except dcp.api.CheckpointException as error:
            raise CheckpointError(f"{chosen} could not be read: {_cause(error)}") from error
        self.trainer.optimizer.load(copies)
        self.trainer.models.refresh_old()
        self.history = (chosen / "history").read_bytes()
        self.newest = int(state["iteration"])
        return self.newest

    def _choose(self) -> Path | None:
        """The newest checkpoint that is what was written, the same on all ranks; None if there is none at all. Says which are damaged."""
        named = self.trainer.ranks.from_first(lambda: msgspec.json.encode([p.name for p in self._found()]))
        found = [self.folder / name for name in msgspec.json.decode(named, type=list[str])]
        for checkpoint in reversed(found):
            wrong = self._wrong_files(checkpoint)
            if not wrong:
                return checkpoint
            self._damaged.add(checkpoint)
            if self.trainer.ranks.is_first:
                say(f"WARNING: checkpoint {checkpoint.name} is damaged and not used: gone or not what was written: {', '.join(wrong)}")
        if found:
            raise CheckpointError(f"every checkpoint in {self.folder} is damaged; to start again from iteration 0, move the folder away")
        return None

    def _wrong_files(self, checkpoint: Path) -> list[str]:
        """Files of a checkpoint that are not what was written. A collective; each rank reads its part of them."""
        ranks = self.trainer.ranks
        listed = ranks.from_first(lambda: msgspec.json.encode(checksums.read(checkpoint, "*.distcp", *OWN_FILES)))
        expected = msgspec.json.decode(listed, type=dict[str, str])
        mine = sorted(expected)[ranks.rank :: ranks.size]
        wrong = ranks.max({name: float(name in mine and not checksums.is_intact(checkpoint / name, expected[name])) for name in expected})
        return [name for name, is_wrong in wrong.items() if is_wrong]

    def _make_room(self, unfinished: Path) -> None:
        """Runs on rank 0 before all ranks write; what an interrupted run left half written is of no use."""
        for left in self.folder.glob("*.partial"):
            shutil.rmtree(left)
        unfinished.mkdir(parents=True)
        disk.require_room(self.folder, sum(math.prod(shape) for _, shape in self.trainer.models.shapes))

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

    def _require_same_model(self, chosen: Path, state: dict[str, Any]) -> None:
        saved = dcp.FileSystemReader(chosen).read_metadata().state_dict_metadata
        for name, tensor in state.items():
            size = getattr(saved.get(name), "size", None)
            if size != tensor.shape:
                raise CheckpointError(f"{chosen} is of another model: it holds {name} as {size}, the model has {tuple(tensor.shape)}")

    def _write(self, state: dict[str, Any], history: bytes, unfinished: Path) -> None:
        """Runs in the writing thread of every rank; returns when all have written."""
        dcp.save(state, checkpoint_id=unfinished, process_group=self._group)
        digests = self._digests(unfinished)
        if not self.trainer.ranks.is_first:
            return
        (unfinished / "history").write_bytes(history)
        checksums.write(unfinished, digests | {name: checksums.digest(unfinished / name) for name in OWN_FILES})
        for path in (unfinished / "history", unfinished / checksums.NAME, unfinished):
            _to_disk(path)  # torch has done so with its own files
        folder = unfinished.with_suffix("")
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
        _to_disk(self.folder)  # the name, before older ones go
        self._damaged.discard(folder)
        self._delete_old()
        log.info("checkpoint %s is complete", folder.name)

    def _digests(self, unfinished: Path) -> dict[str, str]:
        """Of all data files. A collective of the writing threads; each rank reads what it wrote."""
        ranks = self.trainer.ranks
        mine: dict[str, str] | OSError
        try:
            mine = {path.name: checksums.digest(path) for path in unfinished.glob(f"__{ranks.rank}_*")}  # as torch names them
        except OSError as error:
            mine = error
        every: list[dict[str, str] | OSError] = [{} for _ in range(ranks.size)]
        dist.all_gather_object(every, mine, group=self._group)
        digests = dict[str, str]()
        for found in every:
            if isinstance(found, OSError):
                raise found
            digests |= found
        return digests

    def _delete_old(self) -> None:
        """All but the newest `keep` that can be used."""
        kept = [path for path in self._found() if path not in self._damaged][-self.config.keep :]
        for path in self._found():
            if path not in kept:
                shutil.rmtree(path)

    def _found(self) -> list[Path]:
        """Folders that have a checkpoint's name, oldest first."""
        found = [path for path in self.folder.glob("iteration-*") if re.fullmatch(r"iteration-\d{5,}", path.name)]
        return sorted(found, key=lambda path: int(path.name.removeprefix("iteration-")))


def export(trainer: Trainer, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the policy in Hugging Face format, complete or not at all. Runs on rank 0, inside `Ranks.on_first`.

    With `lora.rank` its weights are merged, and the folder "adapter" beside it holds the adapters alone.
    """
    models = trainer.models
    weights = {name: weight.cpu() for name, weight in models.weights()}
    write_model(folder, weights, models.model_config, models.generation_config, tokenizer)
    if models.lora.rank:
        save_adapters(folder.with_name("adapter"), models.parameters, models.lora, Path(trainer.config.model.path))


def write_model(
    folder: Path,
    weights: dict[str, Tensor],
    config: PretrainedConfig,
    generation: GenerationConfig | None,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Write a checkpoint in Hugging Face format, complete or not at all."""
    unfinished = folder.with_suffix(".partial")
    _empty_folder(unfinished)
    save_torch_state_dict(weights, unfinished)
    config.save_pretrained(unfinished)
    if generation is not None:
        generation.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def _require_written(writing: Future[None]) -> None:
    if error := writing.exception():
        raise CheckpointError(f"a checkpoint could not be written: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    """Of torch's own error, which is no Exception and holds those of all ranks, the first one's."""
    if isinstance(error, dcp.api.CheckpointException) and error.failures:
        rank, (first, _) = next(iter(error.failures.items()))
        return f"rank-{rank}: {first}"
    return str(error)


def _to_disk(path: Path) -> None:
    """Return when what was written to a file or folder survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _empty_folder(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
