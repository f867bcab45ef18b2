"""The planner: rates by hand, factors that a run was made with, splits, and what the command says."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from groups import make_group

from benchmarks.scale import CASES, row, rows
from pasync import plan
from pasync.calibration import Calibration, calibrate
from pasync.config import Config
from pasync.configfile import load, save
from pasync.errors import ConfigError
from pasync.estimate import Machine
from pasync.geometry import PUBLISHED, read_geometry
from pasync.placement import Placement
from pasync.rates import DEVICES, estimate, sources
from pasync.rollout.recording import Recording, record
from pasync.simulate import GroupWork, generate, simulate, training_time

ROOT = Path(__file__).parents[2]
QWEN3 = load(ROOT / "configs/qwen3_8b.yaml")
NPUS = Machine("npu", 8, 6090 * 2**30 // 100)
TRUE = Calibration(serve=3.0, train=0.5, optimizer=2.0, sync=4.0, micro_batch_s=0.05, iterations=3, exact_lengths=False)


def planner(count: int, config: Config = QWEN3) -> plan.Planner:
    machine = replace(NPUS, count=count)
    return plan.Planner(PUBLISHED["Qwen3-8B"], machine, plan.assumed_groups(config, 4000, 150))


def test_rates_of_qwen3_8b_are_those_computed_by_hand():
    rates, device = estimate(QWEN3, PUBLISHED["Qwen3-8B"], NPUS), DEVICES["npu"]
    active = 8_190_735_360 - 151_936 * 4096  # without the embedding
    reduced_s = 2 * 36 * 4096 * 2 / device.reduce_bytes[0]  # two tensors of a row in each of 36 layers
    assert rates.step_s == pytest.approx(2 * active / device.read_bytes[0])
    assert rates.token_s == pytest.approx(8 * active / device.train_flops[0] / 4 + 3 * reduced_s)  # four shards, layers computed again
    assert rates.pair_s == pytest.approx(4 * 4 * 36 * 4096 / device.train_flops[0] / 4)
    assert rates.context_s == pytest.approx(2 * 36 * 8 * 128 * 2 / device.read_bytes[0])
    assert rates.sync_s == pytest.approx(2 * 8_190_735_360 / device.send_bytes[0])
    assert rates.step_s == pytest.approx(27.6e-3, rel=0.1)  # what the source of read_bytes measured


def test_every_rate_names_its_source():
    for kind, device in DEVICES.items():
        assert len(sources(kind)) == len(vars(device)) and all(len(text) > 3 for _, text in vars(device).values())


def test_lengths_that_are_assumed_have_the_mean_asked_for_and_keep_to_the_limit():
    lengths = [n for group in plan.assumed_groups(QWEN3, 1000, 150) for n in group.lengths]
    assert len(lengths) == 32 * 8 and max(lengths) <= 8192 and sum(lengths) / len(lengths) == pytest.approx(1000, rel=0.15)


def test_splits_use_no_device_twice_and_replicas_share_the_batch():
    plans = planner(16).plans(QWEN3)
    assert [p.config.rollout.servers for p in plans] == list(range(1, 13))
    for p in plans:
        assert p.config.rollout.servers + p.config.parallel.ranks <= 16 and QWEN3.algorithm.batch_groups % p.config.replicas == 0
    chosen = plan.best(plans)
    assert chosen and chosen.times["periodic"].step_s == min(p.times["periodic"].step_s for p in plans if not p.problems)


def test_a_split_that_does_not_fit_the_memory_is_never_the_best():
    whole = QWEN3.model_copy(update={"parallel": QWEN3.parallel.model_copy(update={"tensor": 1, "ranks": 4})})
    plans = planner(8, whole).plans(whole)
    assert plan.best(plans) is None and all("does not fit" in p.problems[0] for p in plans)


def test_throughput_grows_with_devices_if_the_batch_does():
    rate = {}
    for count in (8, 32):
        grown = QWEN3.model_copy(update={"algorithm": QWEN3.algorithm.model_copy(update={"batch_groups": 2 * count})})
        chosen = plan.best(planner(count, grown).plans(grown))
        assert chosen
        rate[count] = count * chosen.times["periodic"].tpspd(count)
    assert 3.5 < rate[32] / rate[8] < 4.5


def made_run(run: Path, config: Config, groups: list[GroupWork]) -> None:
    """What a run would leave that is as fast as TRUE says."""
    (run / "model").mkdir(parents=True)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    settings = dict(zip(names, (64, 128, 2, 4, 264), strict=True))
    (run / "model/config.json").write_text(json.dumps(settings | {"model_type": "qwen2"}))
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(run / "model")})})
    save(config, run / "config.yaml")
    Placement("cpu", "tcp://127.0.0.1:1", [[0]], [[1]]).save(run / "placement.json")
    rates = TRUE.scaled(estimate(config, read_geometry(run / "model"), Machine("cpu", 2, 1 << 34)))
    metrics, spans = [], []
    for t in range(4):
        slow = 7.0 if t == 0 else 1.0  # the first iteration is not looked at
        metrics.append({
            "iteration": t, "time/step_s": 1.0, "time/generate_s": slow * generate(config, groups, rates).arrivals[-1][0],
            "time/sync_s": rates.sync_s, "tokens/prompt": sum(g.prompt * len(g.lengths) for g in groups),
        })  # fmt: skip
        for i, group in enumerate(groups):
            spans.append({"name": "group", "begin": 0, "end": 1, "server": 0, "group": i, "tokens": sum(group.lengths), "arrived": 1})
            spans.append({"name": "micro-batch", "begin": 0, "end": training_time(config, [group], rates)[0], "tokens": group.num_tokens})
        spans.append({"name": "optimizer", "begin": 0, "end": rates.optimizer_s})
        spans = [{"iteration": t} | span for span in spans]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (run / "trace").mkdir()
    (run / "trace/rank-0.jsonl").write_text("".join(json.dumps(span) + "\n" for span in spans))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = load(ROOT / "configs/tiny_cpu.yaml", ["parallel.micro_batch_tokens=100000"])
    made_run(tmp_path / "run", config, [GroupWork(6, (n,) * 8, n) for n in (4, 8, 16, 32, 64)])
    return tmp_path / "run"


def test_a_run_gives_back_the_factors_that_it_was_made_with(run):
    calibration, works = calibrate(run)
    assert (calibration.serve, calibration.optimizer, calibration.sync) == pytest.approx((TRUE.serve, TRUE.optimizer, TRUE.sync))
    assert (calibration.train, calibration.micro_batch_s) == pytest.approx((TRUE.train, TRUE.micro_batch_s), rel=0.05)
    assert calibration.iterations == 3 and [g.lengths[0] for g in works[0]] == [4, 8, 16, 32, 64] and works[0][0].prompt == 6
    config = load(run / "config.yaml")
    rates = estimate(config, read_geometry(run / "model"), Machine("cpu", 2, 1 << 34))
    predicted, true = (simulate(config, works[0], c.scaled(rates)).step_s for c in (calibration, TRUE))
    assert predicted == pytest.approx(true, rel=0.02)


def test_recorded_groups_tell_the_length_of_every_response(run):
    made = [make_group(np.random.default_rng(0), 3 + i, [i + 1] * 7 + [20], group_id=i) for i in reversed(range(5))]
    for t in range(1, 4):
        record(run, t, Recording(made, [0.0] * 5))
    calibration, works = calibrate(run)
    assert calibration.exact_lengths
    assert works[2] == [GroupWork(3 + i, (*[i + 1] * 7, 20), 20) for i in range(5)]


def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["plan", *arguments])
    code = plan.main()
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_the_command_compares_splits_and_says_what_it_rests_on(run, capsys, monkeypatch, tmp_path):
    code, text = said(capsys, monkeypatch, str(run / "config.yaml"), "--measure", str(run), "--png", str(tmp_path / "curve.png"),
                      "device.count=3", "algorithm.batch_groups=4")  # fmt: skip
    assert code == 0 and "1+2" in text and "2+1" in text and text.count("best") == 1 and "colocated" in text
    assert "of the run" in text and "decoding x0.333" in text and (tmp_path / "curve.png").stat().st_size > 5000


def test_numbers_of_nodes_are_compared(capsys, monkeypatch):
    code, text = said(capsys, monkeypatch, str(ROOT / "configs/qwen3_8b.yaml"), "device.kind=npu", "--nodes", "1", "2")
    assert code == 0 and text.count("colocated: all") == 2 and "(1.00x), 16 devices" in text and "limulidae" in text


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["configs/qwen3_8b.yaml", "device.kind=npu", "device.count=4"], "have no room for a server"),
        (["configs/qwen3_8b.yaml", "device.kind=npu", "--measure", "docs"], "--measure docs: is no folder of a run"),
        (["configs/qwen3_8b.yaml", "rollout.serverz=4"], "Did you mean servers?"),
    ],
)
def test_mistakes_are_named(arguments, why, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    code, text = said(capsys, monkeypatch, *arguments)
    assert code == 2 and text.startswith("ConfigError") and why in text


def test_a_run_of_one_iteration_cannot_be_measured(run):
    with pytest.raises(ConfigError, match="no iteration after the first"):
        calibrate(run, chosen=range(9, 10))


def test_the_page_on_scale_is_in_step_with_the_planner():
    count, (of_case, chosen) = next(rows(CASES[0]))
    assert row(count, of_case, chosen) in (ROOT / "docs/scale.md").read_text().splitlines()
