"""Started by torchrun with 8 processes: train one step on each of several layouts and give the result to one real server.

Arguments: run folder, address, model folder. Rank 0 leaves in the run folder, of layout i, `layout-i/model` (exported) and
`layout-i.json`: greedy tokens, and sampled tokens with the server's log-probs, of every prompt.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from pasync.checkpoint import export
from pasync.config import Config
from pasync.configfile import load
from pasync.data.prompts import Prompt
from pasync.messages import Group, Response, Sampling, float_bytes, int_bytes
from pasync.parallel.mesh import make_mesh
from pasync.parallel.ranks import Ranks, join_ranks
from pasync.rollout.producer import RolloutProducer
from pasync.trainer import Trainer
from pasync.transport.weights import WeightSender

LAYOUTS = [(1, 1, "zero1"), (2, 2, "zero1"), (2, 2, "fsdp"), (1, 2, "fsdp"), (2, 1, "zero1"), (1, 1, "fsdp")]
"""(stages, shards, data): with 8 processes 8, 2, 2, 4, 4 and 8 replicas."""
TEXTS = ["5312>", "90417>", "31>", "777>"]


def batch(vocabulary: int) -> list[Group]:
    """Eight groups of four responses, made up."""
    rng, groups = np.random.default_rng(0), []
    for i in range(8):
        responses = [
            Response(int_bytes(rng.integers(0, vocabulary, n)), float_bytes(-rng.random(n)), "", True, float(k % 2))
            for k, n in enumerate(rng.integers(1, 9, 4))
        ]
        groups.append(Group(0, i, int_bytes(rng.integers(0, vocabulary, 5)), responses, 0.0, 1.0))
    return groups


def generated(producer: RolloutProducer, prompts: list[Prompt], version: int, sampling: Sampling) -> list[Group]:
    """One group of every prompt, in their order."""
    producer.submit(prompts, version, sampling)
    groups = [group for _ in prompts if (group := producer.next_group(version)) is not None]
    return sorted(groups, key=lambda group: group.group_id)


def try_layout(i: int, ranks: Ranks, config: Config, run: Path, model: Path, producer: RolloutProducer | None) -> None:
    """Train a step, sync, generate, export."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer, mesh = Trainer(config, model, ranks), ranks.mesh
    mine = batch(len(tokenizer))[mesh.data.index :: mesh.data.size]
    trainer.forward_backward([mine] if mesh.pipeline.is_first else None)
    trainer.optimizer_step(0)

    def give_and_ask() -> None:
        assert producer is not None
        producer.muster()
        sender = WeightSender(config, producer, trainer.models.shapes, "cpu")
        sender.publish(trainer.models.weights(), i)
        sender.close()
        producer.admit(i)
        prompts = [Prompt(n, tuple(tokenizer(text).input_ids), text, {"answer": ""}) for n, text in enumerate(TEXTS)]
        greedy = [g.responses[0].token_ids.tolist() for g in generated(producer, prompts, i, Sampling(1, 0.0, 12))]
        sampled = [(g.responses[0].token_ids.tolist(), g.responses[0].token_logprobs.tolist())
                   for g in generated(producer, prompts, i, Sampling(2, 1.0, 12))]  # fmt: skip
        (run / f"layout-{i}.json").write_text(json.dumps({"greedy": greedy, "sampled": sampled}))
        export(trainer, tokenizer, run / f"layout-{i}" / "model")

    ranks.on_first(give_and_ask, trainer.calls)


def main() -> None:
    """Entry of one rank."""
    run, address, model = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    with join_ranks("cpu", deadline_s=300) as ranks:
        producer = RolloutProducer(load(run / "config.yaml"), address).__enter__() if ranks.is_first else None
        for i, (pipeline, tensor, data) in enumerate(LAYOUTS):
            steady = ["optimizer.eps=1e-3", "optimizer.lr=0.01"]  # with a small eps the first step of AdamW is the sign of a rounding
            cut = replace(ranks, mesh=make_mesh(pipeline=pipeline, tensor=tensor, deadline_s=300))
            layout = [f"parallel.{key}={value}" for key, value in (("pipeline", pipeline), ("tensor", tensor), ("data", data))]
            try_layout(i, cut, load(run / "config.yaml", [f"parallel.ranks={ranks.size}", *layout, *steady]), run, model, producer)
        if producer:
            producer.__exit__(None, None, None)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
