import json

import numpy as np
import pytest
from groups import make_group

from pasync.messages import Group, Response
from pasync.observe.metrics import METRICS, RunLog, Times, batch_metrics, busy_s, described, idle_share, read_metrics, step_times


def test_batch_metrics_count_prompts_once_per_response_and_failed_rewards_as_zero():
    rng = np.random.default_rng(0)
    group = make_group(rng, 3, [2, 4], rewards=[1.0, 0.0])
    timeout, filled = (
        Response(group.responses[0].ids, group.responses[0].logprobs, "", False, 0.0, why) for why in ("timeout", "out of memory")
    )
    values = batch_metrics([group, Group(0, 1, group.prompt_ids, [timeout, filled], 0.0, 0.0)])
    assert values["tokens/prompt"] == 3 * 4 and values["tokens/response"] == 2 + 4 + 2 + 2
    assert values["reward/mean"] == 0.25 and values["reward/equal_frac"] == 0.5
    assert values["reward/errors"] == 2 and values["reward/crashes"] == 0
    assert values["reward/timeouts"] == values["reward/out_of_memory"] == 1
    assert values["response/truncated_frac"] == 0.5 and values["response/mean_tokens"] == 2.5


def test_step_times_follow_their_definitions():
    clock = Times(began=98.5, submitted=100.0, arrivals=[102.0, 108.0, 105.0], finished=111.0, ended=111.5)
    times = step_times(clock, sync_s=1.0, train_s=6.0, mean_train_s=4.5, waits_s=[2.0, 0.3, 0.5])
    assert times["time/generate_s"] == 8.0 and times["time/step_s"] == 13.0 and times["time/ideal_s"] == 9.0
    assert times["time/first_group_wait_s"] == 2.0 and times["time/tail_s"] == 3.0 and times["time/of_ideal_frac"] == 9 / 13
    assert times["time/between_waits_s"] == 0.8 and times["time/rank_idle_frac"] == 1 - 4.5 / 13


def test_a_server_is_idle_when_it_has_no_group():
    spans = [(0, 1.0, 3.0), (0, 2.0, 4.0), (0, 6.0, 7.0), (1, 0.0, 8.0), (1, 2.0, 3.0)]
    groups = [Group(0, i, b"", [], began, ended, server) for i, (server, began, ended) in enumerate(spans)]
    assert idle_share(groups, 2, 10.0) == pytest.approx(1 - (4 + 8) / 20)
    assert busy_s(groups, 2, end=2.5) == 1.5 + 2.5


def test_lines_hold_described_keys_and_nan_becomes_null(tmp_path):
    log = RunLog(tmp_path, iterations=2, devices=2, first=0)
    log.add({"policy/engine_logprob_gap": float("nan"), "time/step_s": 2.0, "tokens/prompt": 10, "tokens/response": 30})
    log.write(0)
    (line,) = read_metrics(tmp_path)
    assert line["policy/engine_logprob_gap"] is None and line["throughput/tpspd"] == 10.0 and line["throughput/response_tpspd"] == 7.5
    assert line.keys() <= METRICS.keys()
    with pytest.raises(AssertionError, match="without a description"):
        log.add({"reward/unheard_of": 1})


def test_the_console_says_what_was_learned_and_where_the_time_went(tmp_path, capsys):
    log = RunLog(tmp_path, iterations=3, devices=2, first=0)
    log.add({"reward/errors": 3, "reward/dropped_groups": 0, "policy/lag": 1})
    log.add({"reward/mean": 0.5, "tokens/prompt": 10, "tokens/response": 30})
    log.add({"time/step_s": 2.0, "time/tail_s": 0.25, "time/server_idle_frac": 0.125, "time/rank_idle_frac": 0.5})
    log.write(1)
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert " ".join(first.split()) == "iteration 1/3 reward 0.500 step 2.00 s tokens/s/device 10 REWARDS FAILED 3 OFF-POLICY by 1"
    assert " ".join(second.split()) == "tail 0.25 servers idle 12% ranks idle 50%"


def test_scores_of_held_out_sets_are_described_by_kind_and_shown_by_set(tmp_path, capsys):
    assert [described(f"eval/a.b/{score}") for score in ("avg@4", "pass@2", "maj@4")] == [key for key in METRICS if "<set>" in key]
    log = RunLog(tmp_path, iterations=3, devices=2, first=0)
    log.add({"time/eval_delay_s": 0.5, "eval/problems": 7, "eval/unfinished": 3, "eval/sums/pass@2": 0.75, "eval/sums/avg@2": 0.5})
    log.write(3)
    assert list(read_metrics(tmp_path)[0])[2:4] == ["eval/sums/avg@2", "eval/sums/pass@2"]
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert " ".join(first.split()) == "iteration 3/3 EVALUATION CUT, 3 PROBLEMS LEFT"
    assert " ".join(second.split()) == "sums: avg@2 0.500 pass@2 0.750 7 problems delay 0.50"
    with pytest.raises(AssertionError, match="without a description"):
        log.add({"eval/sums/best@2": 1})


def test_a_continued_run_drops_the_lines_it_does_again(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"iteration": i}) + "\n" for i in range(4)))
    RunLog(tmp_path, iterations=9, devices=1, first=2)
    assert [line["iteration"] for line in read_metrics(tmp_path)] == [0, 1]
