"""Discovery ``static``: backends in a file of their own, which is watched.

For whoever writes such a file: a script, a configuration system, a mounted
ConfigMap. The file is looked at once a second by its time, size and identity. A
file that is gone, cut in the middle or wrong as a whole changes nothing; an
empty *list* is a set like any other.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Struct
from zope.interface import implementer

from llmgw.config.reader import Rule
from llmgw.discovery.standing import Standing, Update, read_options
from llmgw.interfaces import CONTRACT, IDiscovery, IDiscoveryFactory
from llmgw.plain_files import open_plain

if TYPE_CHECKING:
    from twisted.internet.interfaces import IDelayedCall, IReactorTime

MOST_BYTES = 16 << 20


class StaticOptions(Struct, frozen=True):
    """:param file: ``.json`` is JSON, all else TOML.

    :param interval_s: between two looks at the file.
    """

    file: Annotated[str, Rule(filled=True)]
    interval_s: Annotated[float, Rule(least=0.1, most=3600)] = 1.0


@implementer(IDiscovery)
class StaticDiscovery(Standing):
    """Watches one file."""

    def __init__(self, options: StaticOptions, reactor: IReactorTime) -> None:
        super().__init__(reactor, options.file)
        self._options = options
        self._seen: tuple[int, ...] | None = None
        self._next: IDelayedCall | None = None

    def start(self, update: Update) -> None:
        """See :meth:`llmgw.interfaces.IDiscovery.start`."""
        self._update = update
        self._look()

    def stop(self) -> None:
        """See :meth:`llmgw.interfaces.IDiscovery.stop`."""
        self._update = None
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _look(self) -> None:
        self._next = self._reactor.callLater(self._options.interval_s, self._look)
        try:
            with open_plain(self._options.file) as file:
                status = os.fstat(file.fileno())
                seen = (status.st_mtime_ns, status.st_size, status.st_ino)
                if seen == self._seen:
                    self.contact_s = self._reactor.seconds()
                    return
                raw = file.read(MOST_BYTES + 1)
            entries = read_entries(raw, json=self._options.file.endswith(".json"))
        except OSError as error:
            self._seen = None
            self.failed(error.strerror or str(error))
            return
        except ValueError as error:
            # Perhaps half of it is written: looked at again even if nothing changes.
            self._seen = None
            self.failed(str(error))
            return
        self._seen = seen
        self.heard()
        self.tell(entries)


def read_entries(raw: bytes, json: bool) -> list[Mapping[str, Any]]:
    """The backends of a file: ``[[backends]]`` tables, or in JSON ``{"backends": […]}``.

    :raise ValueError: it is no such file.
    """
    if len(raw) > MOST_BYTES:
        raise ValueError(f"longer than {MOST_BYTES} bytes")
    try:
        table = msgspec.json.decode(raw) if json else tomllib.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (at byte {error.start})") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not {'JSON' if json else 'TOML'}: {error}") from None
    if not isinstance(table, dict) or set(table) != {"backends"}:
        raise ValueError("must hold backends and nothing else")
    entries = table["backends"]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("backends must be a list of tables")
    return entries


@implementer(IDiscoveryFactory)
class StaticDiscoveryFactory:
    """Options: ``file``, ``interval_s`` (1)."""

    name = "static"
    description = "backends in a TOML or JSON file that is watched"
    contract = CONTRACT

    def build(self, options: Mapping[str, Any], reactor: IReactorTime) -> StaticDiscovery:
        """:raise ConfigError: options are wrong."""
        return StaticDiscovery(read_options(StaticOptions, options), reactor)
