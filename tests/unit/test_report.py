"""The report of made-up runs, in a real browser."""

import json
import math
import warnings
from pathlib import Path

import msgspec
import numpy as np
import pytest
import yaml
from browser import NoBrowser, Page, browser
from groups import make_group

from pasync.data.prompts import Prompt
from pasync.messages import Group
from pasync.observe.metrics import METRICS
from pasync.observe.trace import Trace
from pasync.report import banded, main, over_seeds, read_run
from pasync.rollout.samples import HELD_OUT, KEPT_CHARACTERS, Samples, most_changed, read_samples

ITERATIONS = 200
HOSTILE = [
    "</pre><script>console.error('ran')</script><img src=http://127.0.0.1:9/x.png onerror=console.error(1)>",
    "line\u2028and paragraph\u2029separator \u202eright to left, 🧮 emoji, a lone \ud800 surrogate, NUL \x00 and bell \x07",
    "9" * 3000,
    "1 + 1 =\n  2 & <3",
]


def run_folder(folder: Path, *, seed: int = 0, schedule: str = "periodic", iterations: int = ITERATIONS, groups: int = 16) -> Path:
    """A run that nobody ran: every metric, a trace, and samples that try to break the page."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    config = {"name": "made-up", "seed": seed, "schedule": schedule, "optimizer": {"lr": 1e-6}, "run": {"dir": str(folder)}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with (folder / "metrics.jsonl").open("w") as file:
        for t in range(iterations):
            values = {key: float(rng.random()) if t % 10 == 0 or not key.startswith("eval/") else None for key in METRICS}
            values |= {"iteration": t, "reward/mean": 1 - math.exp(-t / 50), "time/step_s": 7.0, "policy/kl": 0.0}
            file.write(json.dumps(values) + "\n")
    samples, trace = Samples(folder, 0), Trace(folder, "rank-0", 0)
    prompts = [Prompt(i, (i, 1, 2), HOSTILE[i % 4], {}) for i in range(groups)]
    for t in range(iterations):
        batch = [answered(prompts[i], i, [HOSTILE[(t // 10 + i) % 4], HOSTILE[i % 4]], [float(t > i), 0.0]) for i in range(groups)]
        samples.batch(t, batch, prompts)
        samples.held_out(t, "sums", batch if t % 10 == 0 else [], prompts)
        for i, group in enumerate(batch):
            trace.group(t, msgspec.structs.replace(group, started=10.0 * t + i, finished=10 * t + i + 2.5), 10 * t + i + 2.6)
            trace.add("micro-batch", t, 10 * t + i + 2.6, 10 * t + i + 3.5, groups=1, tokens=9)
        trace.add("optimizer", t, 10 * t + groups + 3.0, 10 * t + groups + 3.5)
    return folder


def answered(prompt: Prompt, number: int, texts: list[str], rewards: list[float]) -> Group:
    group = make_group(np.random.default_rng(number), 3, [2] * len(texts), rewards=rewards, group_id=number)
    said = [msgspec.structs.replace(response, text=text) for response, text in zip(group.responses, texts, strict=True)]
    return msgspec.structs.replace(group, prompt_ids=np.array(prompt.ids, "<i4").tobytes(), responses=said)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two schedules, three seeds each."""
    place = tmp_path_factory.mktemp("runs")
    each = [(schedule, seed) for schedule in ("sync", "periodic") for seed in range(3)]
    return [run_folder(place / f"{schedule}-{seed}", seed=seed, schedule=schedule) for schedule, seed in each]


@pytest.fixture(scope="module")
def report(runs: list[Path]) -> Path:
    assert main([*map(str, runs), "--out", str(runs[0] / "page.html")]) == 0
    return runs[0] / "page.html"


@pytest.fixture(scope="module")
def page():
    try:
        with browser() as page:
            yield page
    except NoBrowser as error:
        warnings.warn(f"THE REPORT WAS NOT LOOKED AT: {error}", stacklevel=1)
        pytest.skip(f"THE REPORT WAS NOT LOOKED AT: {error}")


def overflow(page: Page) -> float:
    return page.value("document.documentElement.scrollWidth - document.documentElement.clientWidth")


@pytest.mark.timeout(400)  # the first time a browser is fetched
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_has_nothing_to_complain_of_asks_for_nothing_and_need_not_scroll_sideways(page: Page, report: Path, width: int) -> None:
    page.open(report, width)
    assert page.complaints == [] and page.requests in ([report.as_uri()], [report.as_uri(), "data:,"])
    assert overflow(page) == 0
    assert page.value("document.querySelectorAll('figure').length") >= 15
    assert page.value("document.querySelectorAll('script, img, pre *, article *:not(header, b, pre)').length") == 0


@pytest.mark.timeout(400)
@pytest.mark.parametrize("width", [1280, 390])
def test_values_appear_under_the_pointer_and_within_the_window(page: Page, report: Path, width: int) -> None:
    page.open(report, width)
    for place in (3, ITERATIONS // 2, ITERATIONS - 1):
        page.point_at(f"figure:nth-of-type(2) .at:nth-of-type({place})")
        shown = page.value("(p => p && [p.innerText, p.getBoundingClientRect().left, p.getBoundingClientRect().right])"
                           "([...document.querySelectorAll('.at p')].find(p => getComputedStyle(p).display == 'block'))")  # fmt: skip
        assert shown and abs(int(shown[0].split()[1]) - (place - 1)) <= 1  # a column is two pixels wide
        assert shown[0].startswith("iteration") and shown[1] >= 0 and shown[2] <= width
        assert overflow(page) == 0


@pytest.mark.timeout(400)
def test_dark_and_light_follow_the_system(page: Page, report: Path) -> None:
    page.open(report, 390)
    seen = []
    for scheme in ("light", "dark"):
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        seen.append(page.value("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color].join()"))
    page.call("Emulation.setEmulatedMedia", features=[])
    assert seen[0] != seen[1]


@pytest.mark.timeout(400)
def test_the_browser_would_have_noticed(page: Page, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text("<script>console.error('x')</script><img src=http://127.0.0.1:9/x.png><div style='width:2000px'>wide</div>")
    page.open(bad, 390)
    assert any('"x"' in text for text in page.complaints) and "http://127.0.0.1:9/x.png" in page.requests and overflow(page) > 0


def test_two_hundred_iterations_of_six_runs_are_less_than_five_megabytes(report: Path) -> None:
    assert report.stat().st_size < 5_000_000


def test_what_a_model_wrote_is_shown_as_it_is(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    assert "&lt;/pre&gt;&lt;script&gt;" in text and "<script" not in text and "🧮" in text and "a lone \\ud800 surrogate, NUL ␀" in text


def test_seeds_of_one_configuration_are_one_band_and_others_are_told_apart(runs: list[Path]) -> None:
    bands = banded([read_run(run) for run in runs])
    assert [(band.label, len(band.runs)) for band in bands] == [("schedule=sync", 3), ("schedule=periodic", 3)]
    values = [run.values("policy/entropy")[7] for run in bands[0].runs]
    point = over_seeds(bands[0].runs, "policy/entropy")[7]
    assert point == pytest.approx((7, sum(values) / 3, min(values), max(values)))


def test_many_iterations_are_averaged_and_gaps_are_left_out(tmp_path: Path) -> None:
    run = read_run(run_folder(tmp_path / "long", iterations=1000, groups=1))
    points, values = over_seeds([run], "policy/entropy"), run.values("policy/entropy")
    mean = np.mean([values[i] for i in range(4, 8)])
    assert len(points) == 250 and points[1] == pytest.approx((7, mean, mean, mean))
    assert [p.x for p in over_seeds([run], "eval/accuracy_frac")][:2] == [0, 10] and over_seeds([run], "no/such") == []


def test_samples_survive_whatever_they_say_and_are_bounded(tmp_path: Path) -> None:
    samples = read_samples(run_folder(tmp_path / "run", iterations=21, groups=20))
    assert len((tmp_path / "run" / "samples.jsonl").read_bytes().splitlines()) == len(samples) == 21 * 2 + 3 * HELD_OUT
    said = {sample["response"] for sample in samples}
    assert {HOSTILE[0], HOSTILE[1], HOSTILE[3]} <= said and all(len(text) < KEPT_CHARACTERS + 50 for text in said)
    last = [sample for sample in samples if sample["iteration"] == 20]
    assert [(s["kind"], s["reward"]) for s in last[:2]] == [("best", 1.0), ("worst", 0.0)]
    pairs = most_changed(samples, 3)
    assert len(pairs) == 3 and all(a["index"] == b["index"] and (a["iteration"], b["iteration"]) == (0, 20) for a, b in pairs)
    Samples(tmp_path / "run", first=10)
    assert {s["iteration"] for s in read_samples(tmp_path / "run")} == set(range(10))


def test_a_folder_that_is_no_run_and_an_iteration_that_is_not_there_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none")]) == 1 and "none: no run" in capsys.readouterr().err
    run = run_folder(tmp_path / "run", iterations=2, groups=2)
    assert main([str(run), "--iteration", "7"]) == 1 and "--iteration=7" in capsys.readouterr().err
    assert main([str(run)]) == 0 and capsys.readouterr().out.strip() == str(run / "report.html")


def test_a_run_that_was_killed_in_the_middle_of_a_line_has_a_report(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", iterations=3, groups=2)
    for name in ("metrics.jsonl", "samples.jsonl", "trace/rank-0.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"iteration": 3, "name')
    assert main([str(run)]) == 0 and len(read_run(run).lines) == 3
