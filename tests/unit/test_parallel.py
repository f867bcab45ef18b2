import copy
import ctypes
import math
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from workers import run_ranks

from pasync.errors import PasyncError, RolloutError, TrainingError
from pasync.parallel.optimizer import Copies, learning_rate
from pasync.parallel.ranks import Ranks, naming_lost_ranks
from pasync.parallel.zero import ZeroAdamW
from pasync.processes import named_error
from pasync.sections import OptimizerConfig

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_norm=0.5)


def model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def inputs(step: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(step))


def sharded_steps(ranks: Ranks, dtype: torch.dtype) -> list[list[float]]:
    """Two steps; rank r takes rows r, r + size, .. one by one, so ranks do unequal numbers of backward passes."""
    net = model(dtype)
    optimizer = ZeroAdamW(net.named_parameters(), CONFIG, ranks, Copies())
    norms = []
    for step in range(2):
        for row in inputs(step)[ranks.rank :: ranks.size]:
            net(row.to(dtype)).float().square().sum().backward()
        norms.append(optimizer.step(lr=1e-2, divisor=6.0))
    return [norms, *(p.flatten().tolist() for p in net.parameters())]


def plain_steps() -> list[list[float]]:
    """Oracle: one process, float64, torch's own AdamW and clipping on the mean of the whole batch."""
    net = model(torch.float32).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, betas=CONFIG.betas, eps=CONFIG.eps, weight_decay=0.1)
    norms = []
    for step in range(2):
        optimizer.zero_grad()
        (net(inputs(step).double()).square().sum() / 6).backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5).item())
        optimizer.step()
    return [norms, *(p.flatten().tolist() for p in net.parameters())]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_steps_equal_one_process_in_float64_for_any_number_of_ranks(size):
    for result in run_ranks(sharded_steps, size, torch.float32):
        for ours, oracle in zip(result, plain_steps(), strict=True):
            assert ours == pytest.approx(oracle, rel=2e-6, abs=2e-6)


def test_bfloat16_weights_are_the_rounded_float32_master_weights():
    ranks = sharded_steps
    exact, rounded = plain_steps(), run_ranks(ranks, 2, torch.bfloat16)[0]
    for a, b in zip(exact[1:], rounded[1:], strict=True):
        assert b == pytest.approx(a, rel=0.02, abs=0.01)


def broken_gradient(ranks: Ranks) -> tuple[str, bool]:
    net = model(torch.float32)
    before = copy.deepcopy(net.state_dict())
    optimizer = ZeroAdamW(net.named_parameters(), CONFIG, ranks, Copies())
    if ranks.rank == 1:
        (net(inputs(0)).sum() * math.nan).backward()
    try:
        optimizer.step(lr=1e-2, divisor=1.0)
    except TrainingError as error:
        return str(error), all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    return "no error", False


def test_a_gradient_that_is_not_finite_on_one_rank_stops_all_ranks_with_unchanged_weights():
    assert all("norm is nan" in text and unchanged for text, unchanged in run_ranks(broken_gradient, 2))


def leader_fails(ranks: Ranks) -> list[str]:
    seen = [ranks.from_first(lambda: b"hello").decode()]
    for error in (RolloutError("server-0 is gone"), KeyError("k")):

        def fail(error: Exception = error) -> bytes:
            raise error

        try:
            ranks.from_first(fail)
        except (PasyncError, KeyError) as caught:
            seen.append(f"{type(caught).__name__}: {caught}")
    return [*seen, str(ranks.sum({"b": ranks.rank, "a": 1.0})), str(ranks.max({"x": float(ranks.rank)}))]


def test_what_fails_on_rank_0_fails_on_all_ranks_under_the_same_name():
    first, second = run_ranks(leader_fails, 2)
    assert first[:2] == second[:2] == ["hello", "RolloutError: server-0 is gone"]
    assert second[2] == "PasyncError: KeyError: 'k'"
    assert first[3:] == second[3:] == ["{'a': 2.0, 'b': 1.0}", "{'x': 1.0}"]


def test_learning_rate_warms_up_and_ends_at_zero():
    config = OptimizerConfig(lr=1.0, warmup_iterations=2, schedule="linear")
    assert [learning_rate(config, t, 6) for t in range(6)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    cosine = config.model_copy(update={"schedule": "cosine"})
    assert learning_rate(cosine, 4, 6) == pytest.approx(0.5)
    assert learning_rate(config.model_copy(update={"schedule": "constant"}), 5, 6) == 1.0


def left_alone(ranks: Ranks, deadline_s: float, *, hidden: bool = False) -> str:
    """Rank 1 does not come to a collective of a group of its own."""
    group = dist.new_group(timeout=timedelta(seconds=deadline_s))
    if not ranks.is_first:
        return ""
    try:
        with naming_lost_ranks(deadline_s):
            try:
                if hidden:
                    raise RolloutError("server-0 is silent")
            finally:
                dist.all_reduce(torch.zeros(1), group=group)
    except RuntimeError as error:
        return f"{type(named_error(error)).__name__}: {named_error(error)}"
    return "nothing"


def test_a_rank_that_waits_in_vain_says_for_how_long_and_where_to_look():
    text = run_ranks(left_alone, 2, 2.0)[0]
    assert text.startswith("RankLost: rank-0 waited for another rank") and "parallel.deadline_s=2.0" in text and "ranks.log" in text


def hidden_cause(ranks: Ranks) -> str:
    return left_alone(ranks, 2.0, hidden=True)


def test_a_lost_rank_does_not_hide_the_error_that_it_followed_from():
    assert run_ranks(hidden_cause, 2)[0] == "RolloutError: server-0 is silent"


def hangs(ranks: Ranks) -> None:
    """Work of rank 1 alone that never ends and keeps the interpreter's lock."""
    ranks.from_first(lambda: b"")
    if not ranks.is_first:
        ctypes.PyDLL(None).sleep(60)


def test_a_rank_that_hangs_where_nobody_waits_for_it_ends_itself():
    began = time.monotonic()
    with pytest.raises(torch.multiprocessing.ProcessExitedException, match="process 1 terminated with exit code 1"):
        run_ranks(hangs, 2, deadline_s=2.0)
    assert time.monotonic() - began < 40


def takes_long(ranks: Ranks) -> int:
    heard: list[bytes] = []

    def act() -> None:
        for _ in range(4):
            time.sleep(1.5)  # the work
            ranks.call("wait", b"")

    ranks.on_first(act, {"wait": heard.append})
    return len(heard)


def test_ranks_wait_longer_than_the_deadline_for_a_first_one_that_is_heard_of():
    assert run_ranks(takes_long, 2, deadline_s=4.0) == [0, 4]
