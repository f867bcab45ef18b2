"""Responses that come near the longest length."""

from __future__ import annotations

import msgspec

from pasync.messages import Group


def overlong_penalty(tokens: int, max_tokens: int, margin: int) -> float:
    """What the reward of a response loses by its length, from 0 to -1 over the last `margin` tokens.

    -max(0, tokens - (max_tokens - margin)) / margin: soft overlong punishment, DAPO, arXiv 2503.14476 eq. 13
    """
    return -max(0, tokens - (max_tokens - margin)) / margin


def shaped(group: Group, max_tokens: int, margin: int) -> Group:
    """The group with such penalties added to its rewards; a margin of 0 adds none."""
    if not margin:
        return group
    responses = [
        msgspec.structs.replace(r, reward=r.reward + overlong_penalty(len(r.ids) // 4, max_tokens, margin)) for r in group.responses
    ]
    return msgspec.structs.replace(group, responses=responses)
