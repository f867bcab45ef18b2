"""One generation server process: `python -m pasync.serve RUN INDEX`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

from pasync.config import Config
from pasync.configfile import load
from pasync.placement import Placement
from pasync.processes import die_with_parent, report_fatal


async def serve(config: Config, placement: Placement, index: int) -> None:
    """Load the model, connect to the trainer, answer it until it says Stop."""
    # Here and not above: reward workers are spawned, which imports this module again in each of them.
    from transformers import AutoTokenizer

    from pasync.rewards.pool import RewardPool
    from pasync.rollout.engine import Engine, stop_token_ids
    from pasync.rollout.server import RolloutServer
    from pasync.transport.channel import Keys, TrainerChannel, server_name

    model = Path(config.model.path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    stops = stop_token_ids(model, tokenizer, config.rollout.stop_token_prefixes)
    channel = TrainerChannel(placement.address, server_name(index, os.getpid()), Keys.load(placement.keys))
    with RewardPool(config.rewards) as rewards:
        engine = Engine(config, model, index, stops)
        try:
            await RolloutServer(config, index, engine, rewards, tokenizer, channel).run()
        finally:
            channel.close()
            engine.shutdown()


def main() -> None:
    """Entry of one server."""
    die_with_parent()
    run, index = Path(sys.argv[1]), int(sys.argv[2])
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s server-{index} %(name)s %(levelname)s %(message)s")
    with report_fatal(run, f"server-{index}"):
        asyncio.run(serve(load(run / "config.yaml"), Placement.load(run / "placement.json"), index))


if __name__ == "__main__":
    main()
