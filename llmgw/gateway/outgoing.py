"""The request body as it is sent to a backend: the client's bytes, except for a few values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmgw.core.caps import check_caps, clamp_options
from llmgw.core.multipart import splice_multipart
from llmgw.core.prompt import is_batch, prefix_of
from llmgw.core.splicing import asking_usage, clamp_output, splice
from llmgw.gateway.routes import OLLAMA
from llmgw.values import Submission

if TYPE_CHECKING:
    from llmgw.core.body import Ask
    from llmgw.gateway.routes import Route
    from llmgw.values import Caps

_PROMPTED = frozenset({"chat", "completion", "native", "messages", "responses"})
"""Dialects of the routes that answer a prompt."""
_SLOTTED = frozenset(
    {"/chat/completions", "/v1/chat/completions", "/v1/completions", "/completion", "/completions"}
)
"""Paths on which llama-server was seen to obey ``id_slot``."""
_LIMIT_KEYS = {
    "native": ("n_predict",),
    "responses": ("max_output_tokens",),
    "chat": ("max_tokens", "max_completion_tokens"),
}
"""The keys that limit the output, by dialect; first the one that is set if there is none."""


class Outgoing:
    """One request's body and what changes in it.

    :ivar target: the name by which backends know the model.
    :ivar response_bytes: the largest body that the answer may have; ``None`` for no limit.
    """

    __slots__ = (
        "_body",
        "_changes",
        "ask",
        "content_type",
        "response_bytes",
        "route",
        "target",
    )

    def __init__(self, route: Route, body: bytes, content_type: bytes, ask: Ask) -> None:
        self.route = route
        self.content_type = content_type
        self.ask = ask
        self.target = ask.model
        self.response_bytes: int | None = None
        self._body = body
        self._changes: dict[str, object] = {}

    def cap(self, caps: Caps, prompt_tokens: int) -> int | None:
        """Apply ``caps``: the output is limited even if the client set no limit.

        :return: the limit of output tokens.
        :raise InvalidRequest: it asks for something that is not allowed.
        """
        route = self.route
        is_json = route.body == "json"
        check_caps(caps, self.ask, prompt_tokens, self._body if is_json else b"")
        self.response_bytes = caps.max_response_bytes
        most = caps.max_tokens
        if most is None or not is_json or (route.dialect not in _PROMPTED and route.errors != OLLAMA):
            return self.ask.max_tokens
        if route.errors == OLLAMA:
            self._changes.update(clamp_options(self._body, most))
            return most
        if self.ask.max_tokens is not None:
            most = min(most, max(1, self.ask.max_tokens))
        keys = _LIMIT_KEYS.get(route.dialect, ("max_tokens",))
        self._changes.update(clamp_output(self.ask, most, keys[0]))
        if not any(name in keys for name, _ in self.ask.output_limits):
            # A limit under a key that this route ignores does not count.
            self._changes[keys[0]] = most
        return most

    def submission(self, id: str, prompt_tokens: int, max_tokens: int | None) -> Submission:
        """The request as filters see it."""
        return Submission(
            id=id,
            route=self.route.path,
            model=self.ask.model,
            target=self.target,
            body=self._body,
            content_type=self.content_type.decode("latin-1"),
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            streaming=self.ask.stream,
        )

    def prefix(self) -> tuple[int, ...]:
        """For ``Request.prefix``; empty on routes that do not answer a prompt."""
        route = self.route
        if route.dialect in _PROMPTED or route.errors == OLLAMA:
            return prefix_of(self._body, self.target)
        return ()

    def takes_slot(self) -> bool:
        """Whether a slot of llama-server may be asked for: the route obeys, and there is one prompt
        and one answer. Several would use the one slot one after the other."""
        route = self.route
        return (
            route.upstream in _SLOTTED
            and self.ask.n == 1
            and (route.dialect == "chat" or not is_batch(self._body))
        )

    def forget(self) -> None:
        """Release the body: no further attempt will be made."""
        self._body = b""

    def body_for(self, *, assembled: bool, usage: bool, slot: int | None) -> bytes:
        """The body for one attempt.

        :param assembled: ask for a stream, which the gateway assembles; ``return_progress`` makes
            llama-server notice within one prompt batch that the client has left.
        :param usage: ask for the usage event, which the client has not asked for.
        :param slot: the slot to use (llama-server's ``id_slot``).
        """
        if self.route.body == "multipart":
            if self.target == self.ask.model:
                return self._body
            return splice_multipart(self._body, self.content_type.decode("latin-1"), self.target)
        changes = dict(self._changes)
        if self.ask.model and self.target != self.ask.model:
            changes["model"] = self.target
        if assembled:
            changes["stream"] = True
            changes["return_progress"] = True
            if self.route.dialect != "native":
                changes["stream_options"] = {"include_usage": True}
        if usage:
            changes.update(asking_usage(self._body))
        if slot is not None:
            changes["id_slot"] = slot
        return splice(self._body, changes) if changes else self._body
