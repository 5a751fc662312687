"""Identifies prompt prefixes by hashes of blocks of bytes.

Nothing is rendered or tokenized. The raw JSON of the prompt stands for it: a conversation that
grows shares its first blocks with its earlier state, and two clients share blocks if they write
their JSON alike. A wrong guess only costs processing a prompt again.
"""

from __future__ import annotations

from msgspec import Raw, Struct, json

from llmgw.core.prefix import hash_blocks

BLOCK_BYTES = 448
"""128 tokens at 3.5 bytes each."""

MAX_BLOCKS = 520
"""As many as landmarks cover: 230 kB, or 66,000 tokens."""

READ_BYTES = 128 * 1024
"""Bodies up to this length are parsed; of longer ones only a window is looked at."""

SEARCHED_BYTES = 16 * 1024
"""In a long body the prompt must begin within so many bytes."""

_ABSENT = Raw(b"")
_KEYS = (b'"messages":', b'"prompt":', b'"input":')


class _Prompt(Struct):
    """The members that make up a prompt, in the order in which models see them."""

    system: Raw = _ABSENT
    instructions: Raw = _ABSENT
    messages: Raw = _ABSENT
    prompt: Raw = _ABSENT
    input: Raw = _ABSENT


_read = json.Decoder(_Prompt).decode


def prefix_of(body: bytes, model: str) -> tuple[int, ...]:
    """Hashes of the prompt's whole blocks, for ``Request.prefix``.

    The bytes are those of ``system``, ``instructions``, ``messages``, ``prompt``
    and ``input``, those that are there, in this order, with the model's name before
    them: a prompt of another model shares nothing.

    Work is bounded. Up to :data:`READ_BYTES` the body is read once more (0.6 µs per
    kB); beyond, the prompt is taken to be the bytes from ``messages``, ``prompt`` or
    ``input`` on, whatever follows. So a conversation with a ``system`` of its own is
    new once, when it grows over that length. At most :data:`MAX_BLOCKS` blocks are
    hashed (0.35 µs each).

    :param body: JSON that ``core.body`` has found to be good.
    """
    name = model.encode() + b"\0"
    if len(body) <= READ_BYTES:
        found = _read(body)
        text = b"".join((name, found.system, found.instructions, found.messages, found.prompt, found.input))
    else:
        start = _start(body)
        text = name + body[start : start + BLOCK_BYTES * MAX_BLOCKS]
    return hash_blocks(text, BLOCK_BYTES, MAX_BLOCKS)


def _start(body: bytes) -> int:
    """The offset of the prompt in a long body; 0 if it is not clear."""
    for key in _KEYS:
        at = body.find(key, 0, SEARCHED_BYTES)
        if at >= 0:
            at += len(key)
            return at + 1 if body.startswith(b" ", at) else at
    return 0


def is_batch(body: bytes) -> bool:
    """Whether the body has several prompts, or one given as tokens, which looks similar."""
    return bytes(memoryview(_read(body).prompt)[:1]) == b"["
