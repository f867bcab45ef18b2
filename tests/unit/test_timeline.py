import msgspec
import numpy as np
import pytest
from groups import make_group

from pasync.observe.timeline import chrome_trace, lanes, queue_depth, read_spans
from pasync.observe.trace import Trace


def traced(run):
    trace = Trace(run, "rank-0", first=0)
    for t in range(2):
        trace.add("sync", t, 10 * t + 100.0, 10 * t + 101.0)
        for i in range(3):
            group = make_group(np.random.default_rng(i), 2, [2, 3], group_id=i)
            at = 10 * t + i
            trace.group(t, msgspec.structs.replace(group, started=at + 101.0, finished=at + 103.5), at + 103.6)
            trace.add("micro-batch", t, 10 * t + 104.0 + i, 10 * t + 104.9 + i, groups=1, tokens=7)
        trace.add("optimizer", t, 10 * t + 107.0, 10 * t + 107.5)
    return run


def test_overlapping_groups_lie_on_lanes_and_nothing_is_lost(tmp_path):
    spans = read_spans(traced(tmp_path))
    events = chrome_trace(spans)["traceEvents"]
    whole = [e for e in events if e["ph"] == "X"]
    assert len(whole) == len(spans) == 16 and min(e["ts"] for e in whole) == 0.0
    for a, lane_a in zip(spans, lanes(spans), strict=True):
        for b, lane_b in zip(spans, lanes(spans), strict=True):
            apart = a is b or a["row"] != b["row"] or lane_a != lane_b
            assert apart or a["end"] <= b["begin"] or b["end"] <= a["begin"]
    names = {e["args"]["name"]: e["pid"] for e in events if e["ph"] == "M"}
    assert names.keys() == {"server-0", "rank-0"} and {e["pid"] for e in whole if e["name"].startswith("group")} == {names["server-0"]}


def test_queue_depth_rises_with_arrivals_and_falls_when_training_begins(tmp_path):
    depths = [depth for _, depth in queue_depth(read_spans(traced(tmp_path)))]
    assert depths == [1, 0] * 6


def test_a_continued_run_has_no_iteration_twice_and_survives_a_torn_line(tmp_path):
    traced(tmp_path)
    with (tmp_path / "trace" / "rank-0.jsonl").open("a") as file:
        file.write('{"name": "opt')
    Trace(tmp_path, "rank-0", first=1).add("sync", 1, 200.0, 201.0)
    assert [s["iteration"] for s in read_spans(tmp_path)] == [0] * 8 + [1]


def test_a_run_without_a_trace_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no trace"):
        read_spans(tmp_path)
