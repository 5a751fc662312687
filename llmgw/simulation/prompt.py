"""Prompts without text: what they share, and how long they are.

A prompt is a tuple of pieces ``(id, tokens)``. Equal ids at equal places are
equal text, so the common beginning of two prompts is found exactly, and as many
block hashes as wanted can be made, without a single token being stored.
"""

from __future__ import annotations

from collections.abc import Iterable

Pieces = tuple[tuple[int, int], ...]

BLOCK_TOKENS = 128
"""Tokens of a block whose hash stands in ``Request.prefix``."""

_MASK = (1 << 64) - 1


def length(pieces: Iterable[tuple[int, int]]) -> int:
    """Tokens of all pieces together."""
    return sum(tokens for _, tokens in pieces)


def common(one: Pieces, other: Pieces) -> int:
    """Tokens of the common beginning."""
    tokens = 0
    for (mine, size), (theirs, other_size) in zip(one, other, strict=False):
        if mine != theirs:
            break
        if size != other_size:
            return tokens + (size if size < other_size else other_size)
        tokens += size
    return tokens


def block_hashes(pieces: Pieces, block_tokens: int = BLOCK_TOKENS) -> tuple[int, ...]:
    """One hash for each whole block, each standing for all text up to its end.

    Two prompts have as many equal leading hashes as their common beginning has
    whole blocks.
    """
    hashes = []
    chain = 0
    begin = 0
    edge = block_tokens
    for piece, tokens in pieces:
        chain = _mix(chain, piece)
        begin += tokens
        while edge <= begin:
            hashes.append(_mix(chain, edge))
            edge += block_tokens
        chain = _mix(chain, tokens)  # where the piece ended is part of what comes after it
    return tuple(hashes)


def _mix(one: int, other: int) -> int:
    """A 64-bit hash of two numbers (the finish of splitmix64, S. Vigna)."""
    value = (one * 0x9E3779B97F4A7C15 + other + 0x632BE59BD9B4E019) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
