"""Names for a gateway process that the test can change while it runs.

A ``sitecustomize`` in its path answers ``getaddrinfo`` from a file of JSON: name to
addresses; an empty list is a name that cannot be looked up.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

_CUSTOMIZE = """
import json, os, socket
_real = socket.getaddrinfo
def getaddrinfo(host, port, family=0, type=0, proto=0, flags=0):
    with open(os.environ["FAKE_NAMES"]) as file:
        names = json.load(file)
    host = host.decode() if isinstance(host, bytes) else host
    if host not in names:
        return _real(host, port, family, type, proto, flags)
    if not names[host]:
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")
    return [answer for address in names[host] for answer in _real(address, port, family, type, proto, flags)]
socket.getaddrinfo = getaddrinfo
"""


class Names:
    """:ivar environment: for the gateway."""

    def __init__(self, folder: Path, **names: list[str]) -> None:
        self._path = folder / "names.json"
        place = folder / "customize"
        place.mkdir()
        (place / "sitecustomize.py").write_text(_CUSTOMIZE)
        self.set(**names)
        self.environment = {"PYTHONPATH": str(place), "FAKE_NAMES": str(self._path)}

    def set(self, **names: list[str]) -> None:
        """Addresses by name, ``_`` for a dot."""
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({name.replace("_", "."): value for name, value in names.items()}))
        os.replace(new, self._path)
