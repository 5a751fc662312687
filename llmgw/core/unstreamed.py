"""What llama-server tells only in an answer in one piece.

A call that is not streamed goes to it as a stream and is put together again
(:mod:`llmgw.core.assemble`), unless the stream would lack something that was asked for.
Each of these was seen with build b11549, stream against non-stream:

* probabilities: a stream has none for the last token, has those of a stop string
  that the text does not have, and is refused beside tools;
* ``return_tokens``: a stream lacks tokens that are the first part of a letter;
* ``response_fields``: thins out only the last event, which may then not look like one;
* ``n_indent``: the line that broke the rule was sent already;
* an answer that the client began: the object has the beginning, a stream has not;
* ``verbose`` tells the whole text once more; ``deepseek-legacy`` is for streams alone;
* a ``stream``, ``return_progress`` or ``include_usage`` that is neither true nor false is
  refused, but not once the gateway has written its own in that place.

Known weakness: text that may be the beginning of a stop string is held back by the server,
and a stream that ends at its token limit just then never has it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Raw

from llmgw.core.json_members import members_of

TAIL_BYTES = 1 << 20
"""The role of the last message is looked for in so many bytes at the end of the messages."""

UNSTREAMED = frozenset(
    (
        "continue_final_message",
        "logprobs",
        "n_indent",
        "n_probs",
        "reasoning_format",
        "response_fields",
        "return_tokens",
        "verbose",
    )
)
"""Top-level keys that may request such a thing."""
WRITTEN_OVER = ("stream", "stream_options", "return_progress")
"""Keys whose values the gateway replaces to have a stream."""
_FORMAT = "reasoning_format"
_LEGACY = Raw(b'"deepseek-legacy"')
_NOTHING = frozenset((b"null", b"false", b"0", b"[]", b'""'))
_LOGICAL = frozenset((b"true", b"false", b"null"))
_ROLE = b'"role"'
_OWN = re.compile(rb'\s*:\s*"assistant"').match


def asks_unstreamed(found: Mapping[str, Raw]) -> bool:
    """Whether a request asks for something that a stream lacks, apart from its messages.

    :param found: the members of its body.
    """
    return found.get(_FORMAT) == _LEGACY or any(
        bytes(found[name]) not in _NOTHING for name in UNSTREAMED & found.keys() if name != _FORMAT
    )


def is_miswritten(found: Mapping[str, Raw]) -> bool:
    """Whether the backend has something to refuse in what the gateway would write over.

    :param found: the members of its body.
    """
    usage = members_of(found.get("stream_options")).get("include_usage")
    told = (found.get("stream"), found.get("return_progress"), usage)
    return any(value is not None and bytes(value) not in _LOGICAL for value in told)


def is_begun(messages: bytes | Raw) -> bool:
    """Whether the last message is the model's own, which it shall continue.

    Only the last ``"role"`` is looked at, however long the list is: these bytes cannot be inside
    a string, where quotes are escaped.

    :param messages: a JSON array, or anything else.
    """
    tail = bytes(memoryview(messages)[-TAIL_BYTES:])
    at = tail.rfind(_ROLE)
    return at >= 0 and _OWN(tail, at + len(_ROLE)) is not None
