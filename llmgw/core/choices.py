"""One choice of a streamed chat or text completion, put together from its pieces.

Strings grow, lists go on, tool calls find their call; what names a thing
(role, id, type, a function's name) is taken once and never glued together.

:source: OpenAI API reference, "The chat completion chunk object"; tool call
    pieces without ``index`` or ``id`` are seen in the wild (apache/maka#1995,
    AstrBotDevs/AstrBot#6692).
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

_fields = msgspec.json.Decoder(dict[str, Raw])
_list = msgspec.json.Decoder(list[Raw])
_any = msgspec.json.Decoder()

_NAMES = frozenset({"role", "id", "type", "name"})
_NULL = Raw(b"null")


# These three take slices of JSON that was found sound before.


def value_of(raw: Raw | None) -> Any:
    """The value itself; ``None`` for nothing."""
    return None if raw is None else _any.decode(raw)


def fields_of(raw: Raw) -> dict[str, Raw]:
    """An object's fields, each as it was written; none of anything else."""
    try:
        return _fields.decode(raw)
    except msgspec.ValidationError:
        return {}


def items_of(raw: Raw | None) -> list[Raw]:
    """A list's items, each as it was written; none of anything else."""
    try:
        return [] if raw is None else _list.decode(raw)
    except msgspec.ValidationError:
        return []


class Choice:
    """Everything that the pieces of one choice said.

    :param index: its place among the choices.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._rest: dict[str, Raw] = {}
        self._text = Growing()
        self._message = Growing()
        self._calls: list[_Call] = []
        self._logprobs: dict[str, list[Raw]] | None = None
        self._logprobs_known = False
        self._chat = False
        self.finished = False
        """It has a finish reason."""

    def add(self, fields: dict[str, Raw]) -> None:
        """Take one chunk's part for this choice, ``index`` taken off."""
        for name, raw in fields.items():
            if name == "delta":
                self._chat = True
                self._add_delta(value_of(raw))
            elif name == "text":
                self._text.add({"text": value_of(raw)})
            elif name == "logprobs":
                self._add_logprobs(raw)
            elif name not in self._rest or bytes(raw) != b"null":
                self._rest[name] = raw
        reason = self._rest.get("finish_reason", _NULL)
        self.finished = bytes(reason) not in (b"null", b'""')

    def result(self) -> dict[str, Any]:
        """The choice as the answer's object has it."""
        result: dict[str, Any] = {"index": self._index, "finish_reason": None, **self._rest}
        if self._chat:
            result["message"] = self._whole_message()
        else:
            result["text"] = ""
            result.update(self._text.result())
        if self._logprobs_known:
            result["logprobs"] = self._logprobs
        return result

    def _add_delta(self, delta: Any) -> None:
        if not isinstance(delta, dict):
            return
        calls = delta.pop("tool_calls", None)
        self._message.add(delta)
        for piece in calls if isinstance(calls, list) else ():
            if isinstance(piece, dict):
                self._call_of(piece).add(piece)

    def _call_of(self, piece: dict[str, Any]) -> _Call:
        """The call that a piece belongs to; a new one where it starts one.

        By index, unless its id or name contradicts; without an index by id;
        without both, a name starts a call and anything else goes on.
        """
        index, given_id, name = piece.get("index"), piece.get("id"), _name(piece)
        found: _Call | None = None
        if isinstance(index, int):
            found = next((call for call in reversed(self._calls) if call.index == index), None)
            if found is not None and found.contradicts(given_id, name):
                found = None
        elif given_id:
            found = next((call for call in self._calls if call.id == given_id), None)
        elif self._calls and not (name and self._calls[-1].name):
            found = self._calls[-1]
        if found is None:
            found = _Call(index if isinstance(index, int) else len(self._calls))
            self._calls.append(found)
        return found

    def _add_logprobs(self, raw: Raw) -> None:
        self._logprobs_known = True
        for name, tokens in fields_of(raw).items():
            if self._logprobs is None:
                self._logprobs = {}
            self._logprobs.setdefault(name, []).extend(items_of(tokens))

    def _whole_message(self) -> dict[str, Any]:
        # Not null even beside tool calls: so says llama-server, unlike OpenAI.
        message = {"role": "assistant", **self._message.result()}
        message["content"] = message.get("content") or ""
        calls = [call.result() for call in sorted(self._calls, key=lambda call: call.index)]
        if calls:
            message["tool_calls"] = calls
        return message


class Growing:
    """An object that arrives in pieces; nested objects grow the same way."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._values: dict[str, Any] = {}

    def add(self, piece: dict[str, Any]) -> None:
        """Take the next piece. ``null`` adds nothing to what is there."""
        for name, value in piece.items():
            known = self._values.get(name)
            if isinstance(value, str) and name not in _NAMES:
                self._texts.setdefault(name, []).append(value)
            elif isinstance(value, dict):
                if not isinstance(known, Growing):
                    known = self._values[name] = Growing()
                known.add(value)
            elif isinstance(value, list) and isinstance(known, list):
                known += value
            elif known is None or (value is not None and name not in _NAMES):
                self._values[name] = value

    def get(self, name: str) -> Any:
        """A value that is taken once, such as an id."""
        return self._values.get(name)

    def result(self) -> dict[str, Any]:
        """The whole object."""
        whole = {
            name: value.result() if isinstance(value, Growing) else value
            for name, value in self._values.items()
        }
        whole.update((name, "".join(parts)) for name, parts in self._texts.items())
        return whole


class _Call:
    """One tool call."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._whole = Growing()
        self.name: str | None = None

    @property
    def id(self) -> Any:
        return self._whole.get("id")

    def contradicts(self, given_id: Any, name: str | None) -> bool:
        if given_id and self.id:
            return bool(given_id != self.id)
        return name is not None and self.name is not None and name != self.name

    def add(self, piece: dict[str, Any]) -> None:
        piece.pop("index", None)
        self.name = self.name or _name(piece)
        self._whole.add(piece)

    def result(self) -> dict[str, Any]:
        whole = {"type": "function", **self._whole.result()}
        function = whole.get("function")
        if isinstance(function, dict):
            function.setdefault("arguments", "")
        return whole


def _name(piece: dict[str, Any]) -> str | None:
    for part in (piece.get("function"), piece.get("custom")):
        if isinstance(part, dict) and isinstance(part.get("name"), str) and part["name"]:
            return str(part["name"])
    return None
