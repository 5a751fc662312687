"""One choice of a streamed chat or text completion, assembled from its pieces.

Strings and lists are concatenated, pieces of tool calls are added to their call; names (role,
id, type, the name of a function) are taken once and never concatenated.

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


# These three take slices of JSON that is known to be valid.


def value_of(raw: Raw | None) -> Any:
    """The value; ``None`` if there is none."""
    return None if raw is None else _any.decode(raw)


def fields_of(raw: Raw) -> dict[str, Raw]:
    """The fields of an object, each as it was written; empty for any other value."""
    try:
        return _fields.decode(raw)
    except msgspec.ValidationError:
        return {}


def items_of(raw: Raw | None) -> list[Raw]:
    """The items of a list, each as it was written; empty for any other value."""
    try:
        return [] if raw is None else _list.decode(raw)
    except msgspec.ValidationError:
        return []


class Choice:
    """What the pieces of one choice add up to.

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
        """Add a chunk's part for this choice, without its ``index``."""
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
        """The choice as it is in the answer's object."""
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
        """The call that a piece belongs to, or a new one if it starts one.

        Identified by index, unless id or name contradict; without an index by id; without both,
        a piece with a name starts a call, and any other continues the last one.
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
        # Not null even with tool calls: that is llama-server, unlike OpenAI.
        message = {"role": "assistant", **self._message.result()}
        message["content"] = message.get("content") or ""
        calls = [call.result() for call in sorted(self._calls, key=lambda call: call.index)]
        if calls:
            message["tool_calls"] = calls
        return message


class Growing:
    """An object that arrives in pieces, as do nested objects."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._values: dict[str, Any] = {}

    def add(self, piece: dict[str, Any]) -> None:
        """Add the next piece. ``null`` adds nothing."""
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
        """Set a value that is taken once, such as an id."""
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
