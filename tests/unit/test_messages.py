import msgspec
import numpy as np
import pytest
from groups import make_group
from hypothesis import given, settings
from hypothesis import strategies as st

from pasync import frames
from pasync.frames import WIRE_VERSION, BadMessage, FrameReader, pack
from pasync.messages import Failed, Generate, Group, GroupDone, Hello, Response, Sampling, Stop, ToServer, ToTrainer, int_bytes, ints

TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
SCALAR = st.one_of(st.none(), st.booleans(), st.floats(allow_nan=False), TEXT)
HEAD = len(WIRE_VERSION) + 16


def for_trainer(frame: bytes) -> object:
    """What a new reader makes of it."""
    return FrameReader(ToTrainer).read(frame)


def framed(body: bytes) -> bytes:
    """Any bytes with a valid head."""
    stamp = next(frames._stamps)
    return WIRE_VERSION + frames._HEADER.pack(frames._checksum(body, stamp), stamp) + body


def group_done(**changes: object) -> GroupDone:
    group = make_group(np.random.default_rng(0), 3, [2, 4])
    first = msgspec.structs.replace(group.responses[0], **changes)
    return GroupDone(msgspec.structs.replace(group, responses=[first, group.responses[1]]), 2)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50), TEXT, st.dictionaries(TEXT, SCALAR))
def test_a_request_survives_the_wire(ids, prompt, sample):
    message = Generate(3, 7, int_bytes(ids), prompt, sample, Sampling(8, 1.0, 16))
    assert FrameReader(ToServer).read(pack(message)) == message
    assert ints(message.prompt_ids).tolist() == ids


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 9))
def test_a_group_survives_the_wire_and_a_recording(lengths, prompt):
    group = make_group(np.random.default_rng(0), prompt, lengths)
    assert for_trainer(pack(GroupDone(group, 2))) == GroupDone(group, 2)
    assert group.num_tokens == prompt + sum(lengths) and group.num_response_tokens == sum(lengths)


@given(st.binary(max_size=200))
def test_garbage_is_dropped_with_and_without_a_valid_head(data):
    reader = FrameReader(ToTrainer)
    for frame in (data, WIRE_VERSION + data, framed(data)):
        assert reader.read(frame) is None
    assert reader.dropped == 3


@settings(max_examples=300)
@given(st.data())
def test_a_changed_body_under_a_valid_checksum_is_read_or_dropped_and_raises_nothing_else(data):
    body = bytearray(pack(group_done())[HEAD:])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    reader = FrameReader(ToTrainer)
    message = reader.read(framed(bytes(body)))
    assert reader.dropped == (message is None)
    if isinstance(message, GroupDone):  # then nobody stumbles over it later
        assert all(len(r.token_ids) == len(r.token_logprobs) and np.isfinite(r.reward) for r in message.group.responses)


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_one_flipped_bit_anywhere_is_noticed(at, bit):
    frame = bytearray(pack(group_done()))
    frame[at % len(frame)] ^= 1 << bit
    assert for_trainer(bytes(frame)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": b"12345"}, {"logprobs": b""}, {"reward": float("nan")}, {"reward": float("inf")},
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit_together_and_rewards_that_are_no_numbers_are_dropped(changes):
    assert for_trainer(pack(group_done(**changes))) is None


def test_messages_of_the_other_side_other_versions_negative_numbers_and_cut_frames_are_dropped():
    good = pack(Failed(error="a", message="b"))
    assert for_trainer(good) is not None
    for frame in (pack(Stop()), b"pasync1\n" + good[8:], pack(Hello(server=0, pid=1, credits=2))[:-1], pack(Hello(-1, 1, 2)), good[:20]):
        assert for_trainer(frame) is None


def test_the_weights_that_a_server_has_loaded_itself_can_be_asked_for_and_sampled_from():
    ask = Generate(-1, 0, b"", "", {}, Sampling(1, 1.0, 1))
    assert FrameReader(ToServer).read(pack(ask)) == ask
    assert for_trainer(pack(GroupDone(Group(-1, 0, b"", [], 0.0, 0.0), 0))) is not None


def test_nesting_that_exhausts_the_decoder_is_dropped():
    assert for_trainer(framed(b"\x82\xa1x" + b"\x91" * 100_000 + b"\x01\xa4type\xa4stop")) is None


def test_a_frame_passes_once_and_in_order_for_each_sender():
    reader, frames = FrameReader(ToTrainer), [pack(Failed(error="e", message=str(i))) for i in range(3)]
    seen = [reader.read(frames[i], sender) for sender in (b"a", b"b") for i in (0, 2, 0, 2, 1)]
    assert [m and m.message for m in seen] == ["0", "2", None, None, None] * 2 and reader.dropped == 6
    assert reader.read(pack(Failed(error="e", message="3")), b"a") is not None


def test_too_large_a_message_is_neither_sent_nor_read(monkeypatch):
    frame = pack(Failed(error="e", message="x" * 2000))
    monkeypatch.setattr(frames, "MAX_MESSAGE_BYTES", 1000)
    assert for_trainer(frame) is None
    with pytest.raises(BadMessage, match="a Failed of 20.. bytes cannot be sent"):
        pack(Failed(error="e", message="x" * 2000))


def test_a_killed_worker_is_no_failure_of_the_reward():
    killed, failed = (Response(b"", b"", "", True, 0.0, why) for why in ("timeout", "not a number"))
    assert Group(0, 0, b"", [killed], 0.0, 0.0).reward_failure == ""
    assert Group(0, 0, b"", [killed, failed], 0.0, 0.0).reward_failure == "response 1: not a number"
