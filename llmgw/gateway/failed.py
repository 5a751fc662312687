"""What an attempt comes to that gave the client nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmgw.core.http import ResponseHead
    from llmgw.errors import GatewayError


class Failed:
    """An attempt that gave the client nothing yet.

    :ivar error: what the client gets if nothing better comes.
    :ivar answer: the backend's own answer, passed on in place of ``error``.
    :ivar exact_tokens: the prompt's length by the backend's word, which was too much for it.
    :ivar unsent: no backend has seen the request, so the next attempt adds nothing to what they get.
    """

    def __init__(
        self,
        error: GatewayError,
        answer: tuple[ResponseHead, bytes] | None = None,
        exact_tokens: int | None = None,
        *,
        unsent: bool = False,
    ) -> None:
        self.error = error
        self.answer = answer
        self.exact_tokens = exact_tokens
        self.unsent = unsent
