"""Keys of a body that pass for one the gateway reads, though they are spelled in other letters.

JSON tells ``Model`` from ``model``. Go's ``encoding/json`` does not, and Ollama is
written in Go: of ``{"model": "mine", "MODEL": "another's"}`` it takes the last. A
key's scope, a cap and a limit would be decided by one value and the answer made
by another, so such a body is refused.

:source: https://pkg.go.dev/encoding/json#Unmarshal ("preferring an exact match but
    also accepting a case-insensitive match"; letters are equal under Unicode's simple folding).
"""

from __future__ import annotations

from collections.abc import Iterable

from llmgw.errors import InvalidRequest

READ = frozenset(
    (
        "best_of",
        "ebnf",
        "format",
        "functions",
        "grammar",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "id_slot",
        "include",
        "input",
        "json_schema",
        "logprobs",
        "max_completion_tokens",
        "max_output_tokens",
        "max_tokens",
        "messages",
        "model",
        "n",
        "n_cmpl",
        "n_predict",
        "n_probs",
        "options",
        "output_config",
        "output_format",
        "prompt",
        "prompt_cache_key",
        "prompt_logprobs",
        "regex",
        "response_format",
        "return_progress",
        "return_tokens",
        "session_id",
        "stop",
        "stop_sequences",
        "stream",
        "stream_options",
        "structured_outputs",
        "text",
        "tools",
        "top_logprobs",
    )
)
"""Top-level keys that something is decided by, or that are set in a request."""


def check_spelling(keys: Iterable[str]) -> None:
    """Refuse keys that are one of :data:`READ` but for the case of their letters.

    :raise InvalidRequest: with the key it passes for as ``param``.
    """
    together = "".join(keys)
    if together.islower() and together.isascii():
        return  # as nearly all are: nothing could be folded
    for key in keys:
        folded = key.casefold()
        if folded != key and folded in READ:
            raise InvalidRequest(
                f"the key {key!a} passes for {folded!r} at some backends; spell it so", param=folded
            )
