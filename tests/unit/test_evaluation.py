"""Held-out groups beside a batch: the real producer against scripted servers."""

import queue
import random
import time

import msgspec
import numpy as np
import pytest
import torch
from test_producer import (
    SAMPLING,
    ScriptedServer,
    address,  # noqa: F401  a fixture
    beat,
    config,
    finished,
    mustered,
    prompts,
    sync,
    take,
    wait_until,
)

from pasync.config import Config
from pasync.data.prompts import Prompt
from pasync.errors import RewardError, RolloutError
from pasync.evaluation import Evaluation
from pasync.frames import pack
from pasync.messages import Cancel, Cancelled, Failed, Freed, Generate, GroupDone
from pasync.rollout.producer import RolloutProducer

ONE = {"sums": SAMPLING}
SETS = ("eval.every=1", "eval.temperature=1", "data.eval.sums={source: x, responses: 2}")


def held_out(count: int) -> dict[str, list[Prompt]]:
    return {"sums": prompts(count)}


def answer(server: ScriptedServer, task: Generate, *rewards: float) -> None:
    """Finish a held-out group."""
    group = msgspec.structs.replace(finished(task), held_out=task.held_out)
    given = [msgspec.structs.replace(r, reward=value, text=str(value)) for r, value in zip(group.responses, rewards or (1, 0), strict=True)]
    server.send(pack(GroupDone(msgspec.structs.replace(group, responses=given), task.sampling.num_responses)))


def told_nothing(server: ScriptedServer) -> bool:
    try:
        server.told.get(timeout=0.3)
    except queue.Empty:
        return True
    return False


def evaluated(producer: RolloutProducer) -> list[int]:
    """Held-out groups to the end, in their order."""
    ids = []
    while producer.evaluating:
        if group := producer.next_evaluated(5.0):
            ids.append(group.group_id)
    return ids


def test_held_out_prompts_wait_for_a_server_that_has_no_group_of_the_batch(tmp_path, address):  # noqa: F811
    busy, idle = (ScriptedServer(address, i, credits=4) for i in range(2))
    with mustered(config(tmp_path, servers=2), address) as producer:
        producer.submit(prompts(4), 0, SAMPLING)
        producer.evaluate(held_out(3), 0, ONE)
        theirs, batch = [busy.next(Generate) for _ in range(2)], [idle.next(Generate) for _ in range(2)]
        assert not any(task.held_out for task in (*theirs, *batch))
        busy.finish(theirs[0])
        busy.send(pack(Freed(2)))  # room, but a group of the batch is still sampled there
        assert told_nothing(busy) and told_nothing(idle)
        for task in batch:
            idle.finish(task)
        tasks = [idle.next(Generate) for _ in range(2)]  # the tail rule: none waits at a busy server
        assert [(task.held_out, task.group_id) for task in tasks] == [("sums", 0), ("sums", 1)] and told_nothing(busy)
        for task in tasks:
            answer(idle, task)
        answer(idle, idle.next(Generate))
        busy.finish(theirs[1])
        assert evaluated(producer) == [0, 1, 2] and len([take(producer) for _ in range(4)]) == 4
        producer.require_idle()
    for server in (busy, idle):
        server.close()


def test_a_group_of_the_batch_pushes_evaluation_aside_and_it_is_done_later(tmp_path, address):  # noqa: F811
    server = ScriptedServer(address, 0, credits=4)
    with mustered(config(tmp_path), address) as producer:
        producer.submit(prompts(1), 0, SAMPLING)
        server.finish(server.next(Generate))
        producer.evaluate(held_out(3), 0, ONE)
        first, *cut = [server.next(Generate) for _ in range(3)]
        producer.extend(prompts(1))  # as refill does
        server.next(Cancel)
        answer(server, first)  # it was quicker
        assert told_nothing(server)  # slots are not known to be free yet
        server.send(pack(Cancelled()))
        extra = server.next(Generate)
        assert not extra.held_out
        assert told_nothing(server)
        server.finish(extra)
        again = [server.next(Generate) for _ in range(2)]
        assert again == cut
        for task in again:
            answer(server, task)
        assert evaluated(producer) == [0, 1, 2] and [take(producer).group_id for _ in range(2)] == [0, 1]
        server.send(pack(Cancelled()))  # nobody asked
        wait_until(lambda: producer.dropped_frames == 1)
    server.close()


def test_weights_cannot_change_before_every_server_has_cancelled(tmp_path, address):  # noqa: F811
    servers = [ScriptedServer(address, i, credits=2) for i in range(2)]
    with mustered(config(tmp_path, servers=2), address) as producer:
        producer.evaluate(held_out(9), 0, ONE)
        for server in servers:
            server.next(Generate)
        producer.end_evaluation()
        for server in servers:
            server.next(Cancel)
            with pytest.raises(RolloutError, match="and held-out ones, weights cannot change now"):
                producer.require_idle()
            assert producer.next_evaluated(0.1) is None and producer.evaluating
            server.send(pack(Cancelled()))
        assert evaluated(producer) == []
        producer.require_idle()
        sync(producer, 1)
        producer.submit(prompts(2), 1, SAMPLING)
        assert {server.next(Generate).held_out for server in servers} == {""}  # all slots are free again, nothing is left over
    for server in servers:
        server.close()


def test_a_server_that_does_not_cancel_is_given_up(tmp_path, address):  # noqa: F811
    server = ScriptedServer(address, 0)
    with mustered(config(tmp_path, "sync.deadline_s=0.3"), address) as producer:
        producer.evaluate(held_out(1), 0, ONE)
        server.next(Generate)
        producer.end_evaluation()
        assert evaluated(producer) == [] and producer.deserted
    server.close()


def test_held_out_prompts_of_a_lost_server_go_to_the_others(tmp_path, address):  # noqa: F811
    first, second = (ScriptedServer(address, i, credits=2) for i in range(2))
    with mustered(config(tmp_path, servers=2), address) as producer:
        producer.evaluate(held_out(2), 0, ONE)
        lost, kept = first.next(Generate), second.next(Generate)
        first.send(pack(Failed("EngineDeadError", "gone")))
        beat(second, until=lambda: producer.requeued)
        answer(second, kept)
        again = second.next(Generate)
        assert again == lost
        answer(second, again)
        assert sorted(evaluated(producer)) == [0, 1]
    for server in (first, second):
        server.close()


def evaluating(producer: RolloutProducer, settings: Config, count: int) -> Evaluation:
    evaluation = Evaluation(settings, producer, held_out(count))
    evaluation.start(0)
    return evaluation


def random_state() -> tuple:
    return random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()


def test_scores_counts_and_the_delay_and_no_random_number_is_drawn(tmp_path, address):  # noqa: F811
    before = random_state()
    server, settings = ScriptedServer(address, 0, credits=4), config(tmp_path, *SETS)
    with mustered(settings, address) as producer:
        evaluation = evaluating(producer, settings, 2)
        for rewards in ((1, 0), (0, 0)):
            answer(server, server.next(Generate), *rewards)
        heard: list[int] = []
        evaluation.wait(None, heard=lambda: heard.append(len(evaluation.groups["sums"])))
        assert heard == [1, 2]
        values = evaluation.finish(time.time())
    assert {key: values[key] for key in values if key.startswith("eval/")} == {
        "eval/accuracy_frac": 0.25, "eval/sums/avg@2": 0.25, "eval/sums/pass@2": 0.5, "eval/sums/maj@2": 0.25,
        "eval/problems": 2, "eval/unfinished": 0,
    }  # fmt: skip
    assert values["time/eval_delay_s"] < 1.0 and values["time/eval_bubble_s"] == 1.0  # groups say so
    assert random_state() == before
    server.close()


def test_what_is_not_finished_within_the_delay_is_counted_and_its_set_has_no_scores(tmp_path, address):  # noqa: F811
    server, settings = ScriptedServer(address, 0, credits=4), config(tmp_path, *SETS)
    with mustered(settings, address) as producer:
        evaluation, began = evaluating(producer, settings, 3), time.time()
        answer(server, server.next(Generate))
        evaluation.wait(0.3)
        producer.end_evaluation()
        server.next(Cancel)
        server.send(pack(Cancelled()))
        values = evaluation.finish(began)
    assert (values["eval/problems"], values["eval/unfinished"]) == (0, 2) and not any("@" in key for key in values)
    assert "eval/accuracy_frac" not in values and 0.3 <= values["time/eval_delay_s"] < 2.0
    server.close()


def test_without_any_server_an_evaluation_is_cut_short_unless_the_weights_can_be_given_again(tmp_path, address):  # noqa: F811
    server, settings = ScriptedServer(address, 0), config(tmp_path, *SETS)
    with mustered(settings, address) as producer:
        evaluation = evaluating(producer, settings, 1)
        server.next(Generate)
        server.send(pack(Failed("EngineDeadError", "gone")))
        evaluation.wait(None)  # returns: nobody revives
        assert evaluation.running and producer.deserted
        successor = ScriptedServer(address, 0, pid=2)

        def revive() -> None:
            sync(producer, 0)
            answer(successor, successor.next(Generate))

        evaluation.wait(None, revive)
        assert evaluation.finish(time.time())["eval/unfinished"] == 0
    for each in (server, successor):
        each.close()


def test_a_held_out_group_that_never_comes_or_has_no_reward_is_an_error(tmp_path, address):  # noqa: F811
    server = ScriptedServer(address, 0)
    settings = config(tmp_path, *SETS, "rollout.deadline_s=0.3", "rewards.on_error=raise")
    with mustered(settings, address) as producer:
        evaluation = evaluating(producer, settings, 2)
        task = server.next(Generate)
        with pytest.raises(RolloutError, match="no held-out group finished within rollout.deadline_s=0.3, 2 missing"):
            evaluation.wait(None)
        group = msgspec.structs.replace(finished(task), held_out="sums")
        failed = [msgspec.structs.replace(r, reward=0.0, reward_error="KeyError: 'a'") for r in group.responses]
        server.send(pack(GroupDone(msgspec.structs.replace(group, responses=failed), 2)))
        with pytest.raises(RewardError, match="KeyError"):
            evaluation.wait(None)
    server.close()
