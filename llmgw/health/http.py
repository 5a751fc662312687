"""Health source ``http``: one path of any server, and its model list if it has one."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zope.interface import implementer

from llmgw.errors import ConfigError, ConfigFault
from llmgw.health.model_list import UNREADABLE, is_compressed, read_model_list
from llmgw.health.polling import PollingSource, timing
from llmgw.interfaces import CONTRACT, IHealthSource, IHealthSourceFactory
from llmgw.values import HealthReport

if TYPE_CHECKING:
    from twisted.internet.interfaces import IReactorTime


@implementer(IHealthSource)
class HttpHealth(PollingSource):
    """Alive while ``path`` answers below 500.

    :param models_path: an OpenAI model list, ``""`` for none.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        interval_s: float,
        timeout_s: float,
        path: str,
        models_path: str,
        dice: random.Random | None = None,
    ) -> None:
        super().__init__(reactor, interval_s, timeout_s, dice)
        self._path = path
        self._models_path = models_path

    async def look(self) -> HealthReport:
        """One check. Only ``path`` decides; a missing model list does not make the backend dead."""
        status, _ = await self.ask(self._path)
        if status >= 500:
            return HealthReport(alive=False, detail=f"{status} from {self._path}")
        if not self._models_path:
            return HealthReport(alive=True, detail="ok")
        try:
            status, body = await self.ask(self._models_path)
        except Exception:
            return HealthReport(alive=True, detail=f"no answer from {self._models_path}")
        listed = read_model_list(body) if status == 200 else None
        if is_compressed(body):
            return HealthReport(alive=True, detail=f"ok, but {UNREADABLE}")
        if listed is None:
            return HealthReport(alive=True, detail=f"{status} and no model list from {self._models_path}")
        return HealthReport(
            alive=True, models=listed.names, context_length=listed.context_length, detail="ok"
        )


@implementer(IHealthSourceFactory)
class HttpHealthFactory:
    """Options: ``path`` (``/health``), ``models_path`` (``/v1/models``; ``""`` for none),
    ``interval_s`` (5, at least 2), ``timeout_s`` (2)."""

    name = "http"
    description = "GET one path; below 500 is alive"
    contract = CONTRACT

    def build(self, options: Mapping[str, Any], reactor: IReactorTime) -> HttpHealth:
        """:raise ConfigError: options are wrong."""
        paths = {"path": "/health", "models_path": "/v1/models"}
        faults = []
        for key in paths:
            value = options.get(key, paths[key])
            if _is_path(value) or (value == "" and key == "models_path"):
                paths[key] = value
            else:
                faults.append(ConfigFault(key, f"must be a path beginning with /, not {value!r}"))
        try:
            interval_s, timeout_s = timing(options, tuple(paths))
        except ConfigError as error:
            raise ConfigError([*faults, *error.faults]) from None
        if faults:
            raise ConfigError(faults)
        return HttpHealth(reactor, interval_s, timeout_s, paths["path"], paths["models_path"])


def _is_path(value: Any) -> bool:
    """Whether it begins with a slash and can be put into a request line."""
    return isinstance(value, str) and value.startswith("/") and all("!" <= sign <= "~" for sign in value)
