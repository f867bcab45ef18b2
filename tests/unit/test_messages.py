import numpy as np
import pytest
from groups import make_group
from hypothesis import given
from hypothesis import strategies as st

from pasync.messages import (
    WIRE_VERSION,
    BadMessage,
    Failed,
    Generate,
    GroupDone,
    Hello,
    Sampling,
    Stop,
    int_bytes,
    ints,
    pack,
    unpack_for_server,
    unpack_for_trainer,
)

TEXT = st.text(st.characters(codec="utf-8"), max_size=30)


SCALAR = st.one_of(st.none(), st.booleans(), st.floats(allow_nan=False), TEXT)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50), TEXT, st.dictionaries(TEXT, SCALAR))
def test_a_request_survives_the_wire(ids, prompt, sample):
    message = Generate(3, 7, int_bytes(ids), prompt, sample, Sampling(8, 1.0, 16))
    assert unpack_for_server(pack(message)) == message
    assert ints(message.prompt_ids).tolist() == ids


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 9))
def test_a_group_survives_the_wire_and_a_recording(lengths, prompt):
    group = make_group(np.random.default_rng(0), prompt, lengths)
    assert unpack_for_trainer(pack(GroupDone(group, 2))) == GroupDone(group, 2)
    assert group.num_tokens == prompt + sum(lengths) and group.num_response_tokens == sum(lengths)


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_else_is_raised(data):
    for frame in (data, WIRE_VERSION + data):
        with pytest.raises(BadMessage):
            unpack_for_trainer(frame)


def test_messages_of_the_other_side_other_versions_and_extra_fields_are_refused():
    for frame in (pack(Stop()), b"pasync9\n" + pack(Failed(error="a", message="b"))[8:], pack(Hello(server=0, pid=1, credits=2))[:-1]):
        with pytest.raises(BadMessage):
            unpack_for_trainer(frame)
