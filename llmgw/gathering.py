"""Several parts are built one after the other, and the faults of all are told at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

from llmgw.errors import ConfigError, ConfigFault, PluginError

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")


class Faults:
    """What was found wrong so far.

    :param source: the configuration's file.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._errors: list[ConfigError | PluginError] = []

    def __bool__(self) -> bool:
        return bool(self._errors)

    def of(self, build: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What ``build`` makes, or a stand-in after a fault: :meth:`tell` before anything is done with it."""
        try:
            return build(*args, **kwargs)
        except (ConfigError, PluginError) as error:
            self._errors.append(error)
            return cast("T", None)

    def tell(self) -> None:
        """:raise ConfigError: every fault, in the order in which they were found.

        :raise PluginError: the only one.
        """
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            raise ConfigError(self.told(), self._source)

    def told(self) -> list[ConfigFault]:
        """Every fault, in the order in which they were found."""
        faults: list[ConfigFault] = []
        for error in self._errors:
            faults += error.faults if isinstance(error, ConfigError) else [ConfigFault("", str(error))]
        return faults
