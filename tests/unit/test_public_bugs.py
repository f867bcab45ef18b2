"""Bugs that users of other trainers have reported in public, each kind with the tests that would fail if we had it.

Here are the tests that are not at home in another file.
"""

import asyncio
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
from groups import GRPO
from test_producer import SAMPLING, ScriptedServer, config, mustered, prompts, wait_until
from workers import free_port

from pasync.data.packing import pack as pack_row
from pasync.data.packing import rows
from pasync.errors import ConfigError
from pasync.frames import FrameReader, pack
from pasync.messages import Generate, Group, Hello, Probe, Response, ToServer, float_bytes, int_bytes
from pasync.observe.console import Progress, Said, Tail, parse
from pasync.rewards.pool import RewardPool
from pasync.sections import RewardConfig
from pasync.transport.channel import server_name

TESTS = Path(__file__).parents[1]
KINDS = {
    "token mean weighted by samples under accumulation": (
        "unit/test_order_free.py::test_fifty_orders_with_every_normalizer_and_packing_equal_the_one_big_batch",
        "unit/test_trainer.py::test_streamed_gradients_equal_the_textbook_in_any_order_and_packing",
    ),
    "token counts of each rank bias the mean": (
        "unit/test_order_free.py::test_exact_sums_have_the_same_bits_in_every_order_on_1_2_and_4_ranks",
        "unit/test_order_free.py::test_exact_sums_are_the_textbook_gradient_too",
    ),
    "groups found by position": (
        "unit/test_producer.py::test_longest_first_hands_out_what_took_long_before_and_keeps_group_numbers",
        "unit/test_packing.py::test_rows_keep_to_the_budget_and_hold_every_response_once_with_its_own_advantage",
    ),
    "log-probs off by one, or by the prompt's length": (
        "unit/test_packing.py::test_every_response_token_is_predicted_by_the_row_before_it_in_its_own_sequence",
        "unit/test_model.py::test_packed_groups_equal_separate_sequences",
    ),
    "temperature missing in the trainer's log-probs": (
        "unit/test_model.py::test_packed_groups_equal_separate_sequences",  # at 0.7
        "unit/test_trainer.py::test_streamed_gradients_equal_the_textbook_in_any_order_and_packing",
    ),
    "top-p or top-k: sampled and trained log-probs differ": (
        "unit/test_public_bugs.py::test_a_part_of_the_distribution_cannot_be_asked_for",
        "system/test_replay.py::test_a_run_leaves_what_is_promised_and_nothing_alive",
    ),
    "generation_config.json fills in sampling values": (
        "system/test_weight_sync.py::test_synced_weights_sample_like_the_trainer_and_unsynced_ones_are_noticed",
    ),
    "stale prefix cache after a sync": (
        "system/test_weight_sync.py::test_synced_weights_sample_like_the_trainer_and_unsynced_ones_are_noticed",
    ),
    "tied head not refreshed": (
        "system/test_weight_sync.py::test_synced_weights_sample_like_the_trainer_and_unsynced_ones_are_noticed",
    ),
    "math-verify inside a thread gives all zeros": ("unit/test_public_bugs.py::test_mathematics_scores_in_a_thread_as_in_the_main_one",),
    "several EOS ids": ("system/test_weight_sync.py::test_synced_weights_sample_like_the_trainer_and_unsynced_ones_are_noticed",),
    "EOS dropped because it is the padding token": ("unit/test_public_bugs.py::test_the_end_token_is_trained_even_if_it_is_the_padding",),
    "double BOS": ("unit/test_prompts.py::test_a_chat_prompt_has_one_beginning_and_ends_where_the_answer_starts",),
    "None or NaN rewards poison a group": (
        "unit/test_reward_pool.py::test_anything_else_is_not_a_number",
        "unit/test_batch.py::test_a_group_whose_reward_failed_scores_zero_or_is_left_out_but_has_arrived",
    ),
    "k3 KL overflows to NaN gradients": ("unit/test_algorithm.py::test_k3_of_a_forgotten_token_has_a_finite_gradient",),
    "a re-queued prompt is answered twice": (
        "unit/test_producer.py::test_groups_of_a_lost_server_go_to_the_others_and_come_back_once",
        "unit/test_producer.py::test_late_duplicates_and_garbage_are_dropped_and_counted",
    ),
    "prompt longer than the model": (
        "unit/test_prompts.py::test_a_prompt_that_cannot_be_built_is_an_error",
        "unit/test_launch.py::test_what_the_machine_and_the_files_lack_is_reported_together",
    ),
    "max_tokens of 0": (
        "unit/test_public_bugs.py::test_no_response_may_be_limited_to_nothing",
        "unit/test_prompts.py::test_rows_may_carry_their_own_longest_response",
    ),
    "empty completion": (
        "unit/test_trainer.py::test_streamed_gradients_equal_the_textbook_in_any_order_and_packing",
        "unit/test_packing.py::test_only_groups_with_unequal_rewards_or_a_regularizer_have_a_gradient",
    ),
    "last, incomplete batch": ("unit/test_prompts.py::test_no_prompt_is_lost_or_repeated_inside_an_epoch",),
    "evaluation changes the training's random numbers or weights": (
        "unit/test_evaluation.py::test_scores_counts_and_the_delay_and_no_random_number_is_drawn",
        "unit/test_prompts.py::test_a_batch_depends_on_seed_and_iteration_only",
    ),
    "place in the data lost on resume": (
        "system/test_replay.py::test_an_interrupted_run_continues_to_the_same_weights",
        "unit/test_prompts.py::test_a_batch_depends_on_seed_and_iteration_only",
    ),
    "half-written checkpoint chosen": ("unit/test_checkpoint.py::test_only_complete_checkpoints_are_chosen_and_the_oldest_deleted",),
    "sockets used from two threads": ("unit/test_public_bugs.py::test_what_two_threads_send_arrives_whole_and_in_order",),
    "messages lost to slow joiners or high-water marks": (
        "unit/test_public_bugs.py::test_more_messages_than_any_high_water_mark_reach_a_server_that_does_not_read_yet",
    ),
    "YAML 1e-6 read as text": ("unit/test_config.py::test_scientific_notation_without_a_dot_is_a_number",),
    "U+2028, emoji and lone surrogates in logs and JSONL": (
        "unit/test_public_bugs.py::test_any_text_passes_the_console",
        "unit/test_sources.py::test_only_the_newline_byte_ends_a_line",
        "unit/test_sources.py::test_any_value_of_a_column_survives_the_wire",
    ),
    "9.27 GiB copies of logits at a vocabulary of 152k": (
        "unit/test_logprob.py::test_no_tensor_of_all_tokens_times_the_vocabulary_is_ever_made",
        "unit/test_estimate.py::test_a_micro_batch_allocates_what_the_estimate_says",
    ),
}


@pytest.fixture
def address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_test_that_exists(kind: str) -> None:
    for name in KINDS[kind]:
        file, _, function = name.partition("::")
        assert re.search(rf"^(async )?def {function}\(", (TESTS / file).read_text(), re.M), name


@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"])
def test_a_part_of_the_distribution_cannot_be_asked_for(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.{key}"):
        config(tmp_path, f"rollout.{key}=0.5")


def test_mathematics_scores_in_a_thread_as_in_the_main_one() -> None:
    rewards: list[Any] = []

    def work() -> None:
        with RewardPool(RewardConfig()) as pool:
            for answer in ("\\frac{3}{6}", "\\frac{3}{7}"):
                rewards.append(asyncio.run(pool.score("", f"\\boxed{{{answer}}}", [], {"answer": "\\frac{\\sqrt{1}}{2}"})))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(50)
    assert rewards == [(1.0, ""), (0.0, "")]


def test_the_end_token_is_trained_even_if_it_is_the_padding() -> None:
    end = 7  # in many tokenizers also what a batch is padded with
    responses = [Response(int_bytes(ids), float_bytes([-0.5] * len(ids)), "", True, float(k)) for k, ids in enumerate(([3, end], [end]))]
    [row] = rows([Group(0, 0, int_bytes([end, 1]), responses, 0.0, 1.0)], GRPO, budget=100, shared_prompt=True)
    batch = pack_row(row, shared_prompt=True)
    assert batch.targets.tolist() == [3, end, end] and batch.lengths.tolist() == [2, 1]
    assert batch.credit.tolist()[1] > 0 > batch.credit.tolist()[0]


def test_no_response_may_be_limited_to_nothing(tmp_path: Path) -> None:
    for key in ("rollout.max_tokens", "eval.max_tokens"):
        with pytest.raises(ConfigError, match=f"{key}.*greater than or equal to 1"):
            config(tmp_path, f"{key}=0")


def test_what_two_threads_send_arrives_whole_and_in_order(tmp_path: Path, address: str) -> None:
    server, count = ScriptedServer(address, 0, credits=10_000), 500
    with mustered(config(tmp_path, "rollout.admission=fifo"), address) as producer:

        def finish_all() -> None:
            for _ in range(count):
                server.finish(server.next(Generate))

        answering = threading.Thread(target=finish_all)
        answering.start()
        producer.submit(prompts(count), 0, SAMPLING)  # sent by the producer's thread, while this one
        for version in range(count):
            producer.tell(server.name, Probe(version, int_bytes([1])))
        assert sorted(producer.next_group(0).group_id for _ in range(count)) == list(range(count))  # type: ignore[union-attr]
        answering.join(10)
        assert producer.dropped_frames == 0
    server.close()


def test_more_messages_than_any_high_water_mark_reach_a_server_that_does_not_read_yet(tmp_path: Path, address: str) -> None:
    count, name, socket = 5000, server_name(0, 1), zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, name.encode())
    threading.Timer(0.5, lambda: (socket.connect(address), socket.send(pack(Hello(0, 1, 10 * count))))).start()  # after the trainer
    with mustered(config(tmp_path, "rollout.admission=fifo"), address) as producer:
        producer.submit([replace(prompt, text="x" * 4096) for prompt in prompts(count)], 0, SAMPLING)  # more than the kernel keeps
        wait_until(lambda: not producer._fleet._pending)
        assert producer._fleet.present == (name,)
        reader, told = FrameReader(ToServer), list[int]()
        while len(told) < count:
            assert socket.poll(5000), f"only {len(told)} have arrived"
            message = reader.read(socket.recv())
            told += [message.group_id] if isinstance(message, Generate) else []
        assert told == list(range(count))
    socket.close(linger=0)


ODD = "a\u2028b\x85\U0001f600\ud800c"


def test_any_text_passes_the_console(tmp_path: Path) -> None:
    script = f"from pasync.observe.console import progress, say\nsay({ODD!r})\nprogress({ODD!r}, 1, 2)\nsay('end')"
    log = tmp_path / "log"
    tail = Tail(log)
    env = os.environ | {"PASYNC_RUN_ID": "x", "PYTHONPATH": str(TESTS.parent), "PYTHONIOENCODING": "utf-8"}
    with log.open("wb") as file:
        subprocess.run([sys.executable, "-c", script], stdout=file, env=env, check=True, timeout=30)
    events = [parse(line) for line in tail.lines()]
    assert events[-1] == Said("end") and Progress(ODD, 1, 2) in events
    assert "".join(e.text for e in events if isinstance(e, Said)) == "ab\U0001f600\\ud800cend"  # its own line breaks make lines
