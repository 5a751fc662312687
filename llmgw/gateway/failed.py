"""The outcome of an attempt that gave the client nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmgw.core.http import ResponseHead
    from llmgw.errors import GatewayError


class Failed:
    """An attempt that gave the client nothing yet.

    :ivar error: what the client gets if no other attempt succeeds.
    :ivar answer: head and body of the backend's own answer, which is then sent instead of ``error``.
    :ivar exact_tokens: length of the prompt as counted by a backend whose window it exceeds.
    :ivar unsent: no backend has seen the request, so the next attempt is not an additional load.
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
