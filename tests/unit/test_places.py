"""Where a loader puts weights: what is learned from it, and what is not taken for a place."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pasync.transport.places import Places

GIVEN = torch.arange(12.0).view(3, 4)


def known(load: Callable[[Tensor], object], *held: Tensor) -> Tensor | None:
    """What is known after a loader got one weight and did this with it."""
    places = Places()
    with places:
        for _, tensor in places.watched([("w", GIVEN.clone())], held):
            load(tensor)
    return places.known.get("w")


def fused(place: Tensor, at: int, size: int) -> Callable[[Tensor], object]:
    """Copy into so many rows, as vLLM's loaders of fused layers do without tensor parallelism."""
    return lambda given: nn.Parameter(place).data.narrow(0, at, size).copy_(given.narrow(0, 0, size))


def test_the_rows_of_a_fused_parameter_are_a_place():
    parameter = torch.zeros(8, 4)
    place = known(fused(parameter, 2, 3), parameter)
    assert place is not None
    place.fill_(7)
    assert torch.equal(parameter.sum(1), torch.tensor([0.0, 0, 28, 28, 28, 0, 0, 0]))


def test_rows_that_a_padded_parameter_has_more_are_not_part_of_it():
    parameter = torch.ones(5, 4)

    def load(given: Tensor) -> None:
        parameter[:3].copy_(given)
        parameter[3:].fill_(0)

    assert torch.equal(known(load, parameter), GIVEN) and parameter[3:].eq(0).all()


PARAMETER, OTHER = torch.zeros(8, 4), torch.zeros(8, 4)


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(lambda given: None, id="nothing"),
        pytest.param(lambda given: PARAMETER[:2].copy_(given[:2]), id="a part of it"),
        pytest.param(lambda given: PARAMETER[:2].copy_(given[1:]), id="another part of it"),
        pytest.param(lambda given: PARAMETER[:3].copy_(given * 1), id="what was computed from it"),
        pytest.param(lambda given: PARAMETER[:3].copy_(given.to(torch.float64)), id="another type of it"),
        pytest.param(lambda given: PARAMETER[:4, :3].copy_(given.T), id="it the other way round"),
        pytest.param(lambda given: PARAMETER[:6:2].copy_(given), id="into every second row"),
        pytest.param(lambda given: PARAMETER[:3].fill_(given.flatten()[0].item()), id="a number of it"),
        pytest.param(lambda given: (PARAMETER[:3].copy_(given), OTHER[:3].copy_(given)), id="twice"),
        pytest.param(lambda given: PARAMETER[:3].copy_(torch.empty(3, 4).copy_(given)), id="by way of other memory"),
        pytest.param(lambda given: torch.zeros(3, 4, dtype=torch.float16).copy_(given), id="into another type"),
    ],
)
def test_no_place_is_where_something_else_was_done(load):
    assert known(load, PARAMETER, OTHER) is None


def test_a_copy_of_an_earlier_weight_is_not_one_of_the_next():
    parameter, places, first = torch.zeros(6, 4), Places(), []
    with places:
        for name, tensor in places.watched([("a", GIVEN.clone()), ("b", GIVEN.clone())], [parameter]):
            if name == "a":
                first.append(tensor)
            else:
                parameter[:3].copy_(first[0])
    assert not places.known
