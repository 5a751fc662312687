"""Request ids: the client's own if it is well formed, else a unique one."""

from __future__ import annotations

import itertools
import os
import re

_well_formed = re.compile(rb"[A-Za-z0-9._:-]{1,128}").fullmatch
_prefix = os.urandom(6).hex()
_counter = itertools.count(1)


def new_request_id() -> str:
    """An id that is unique among all gateways."""
    return f"{_prefix}{next(_counter):010x}"


def request_id(given: bytes | None) -> str:
    """:param given: the client's ``x-request-id``."""
    if given is not None and _well_formed(given):
        return given.decode("ascii")
    return new_request_id()
