"""What loaders have in common: their options, and how a server is asked and understood."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from llmgw.errors import ConfigError, ConfigFault, ForeignServer, ModelLoading

if TYPE_CHECKING:
    from llmgw.interfaces import IHealthTarget

REASON_BYTES = 300
"""So much of a server's own words is told."""
NO_SUCH_PATH = (404, 405, 501)


class Options:
    """A plugin's table, read key by key; :meth:`end` tells all that was wrong.

    :ivar faults: what was found so far.
    """

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._left = dict(table)
        self.faults: list[ConfigFault] = []

    def seconds(self, name: str, default: float) -> float:
        """A time above 0, of at most a day."""
        value = self._left.pop(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 86_400:
            self.faults.append(
                ConfigFault(name, f"must be seconds, above 0 and at most 86400; got {value!r}")
            )
            return default
        return float(value)

    def take(self, name: str, default: Any = None) -> Any:
        """The value as it stands."""
        return self._left.pop(name, default)

    def fault(self, name: str, what: str) -> None:
        """One more thing that is wrong."""
        self.faults.append(ConfigFault(name, what))

    def end(self) -> None:
        """:raise ConfigError: something was wrong, or is not known."""
        for name in self._left:
            self.faults.append(ConfigFault(name, "unknown key"))
        if self.faults:
            raise ConfigError(self.faults)


async def get_json(target: IHealthTarget, path: str, timeout_s: float) -> tuple[int, Any]:
    """Status and what the body says, ``None`` when it is no JSON."""
    status, raw = await target.get(path, timeout_s)
    return status, read_json(raw)


async def post_json(
    target: IHealthTarget, path: str, body: Mapping[str, Any], timeout_s: float
) -> tuple[int, Any, bytes]:
    """Status, what the body says, and the body itself."""
    status, raw = await target.post(path, msgspec.json.encode(body), timeout_s)
    return status, read_json(raw), raw


def read_json(raw: bytes) -> Any:
    """What ``raw`` says, ``None`` when it is no JSON."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None


def words_of(status: int, said: Any, raw: bytes = b"") -> str:
    """A server's error in one line: llama-server's and OpenAI's form, Ollama's, or the status."""
    error = said.get("error") if isinstance(said, Mapping) else None
    text = error.get("message") if isinstance(error, Mapping) else error
    if not isinstance(text, str) or not text.strip():
        text = raw.decode("utf-8", "replace") if said is None else ""
    text = " ".join(text.split())[:REASON_BYTES]
    return text or f"status {status}"


def entries(said: Any, key: str) -> list[Mapping[str, Any]]:
    """The objects of the list ``said[key]``; what is no object is left out."""
    listed = said.get(key) if isinstance(said, Mapping) else None
    return [each for each in listed if isinstance(each, Mapping)] if isinstance(listed, list) else []


def strange(path: str, status: int, said: Any, wanted: str) -> ModelLoading:
    """The states of the models cannot be told: not now, or not by a server of this kind.

    :param wanted: what it would have to be.
    """
    if status in NO_SUCH_PATH or status == 200:
        told = "no list of models" if status == 200 else f"{status}"
        return ForeignServer(f"it is no {wanted} ({told} from {path})")
    return ModelLoading(f"{path} says: {words_of(status, said)}")


def cannot(model: str, why: str) -> ModelLoading:
    """The load of ``model`` failed."""
    return ModelLoading(f"loading {model!r} failed: {why}")
