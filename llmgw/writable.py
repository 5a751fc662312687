"""What the daemon writes, looked at before it starts: can it be made where it is to be?

A daemon finds out when it opens each of them; ``--check`` and ``llmgw check`` want to
know before. Nothing is written here, and what is so now may be otherwise later.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from llmgw.config import Config
from llmgw.config.places import unix_path
from llmgw.errors import ConfigFault

TWISTDS_OWN = "twistd.pid"
"""Where ``twistd`` writes its process id when nobody names a file: wherever it is started then."""


User = tuple[int | None, int | None]
"""User and group that the daemon gives its rights up for, once it listens; ``None`` stays as it is."""
OURSELVES: User = (None, None)


def cannot_start(config: Config, user: User = OURSELVES) -> list[ConfigFault]:
    """What of this keeps a daemon from starting."""
    faults = []
    if config.log.access not in ("", "-"):
        with acting_as(user):
            why = file_fault(config.log.access)
        if why:
            faults.append(ConfigFault("log.access", why))
    for key, endpoints in (("listen", config.listen), ("admin", config.admin)):
        for index, endpoint in enumerate(endpoints):
            path = unix_path(endpoint)
            why = socket_fault(path) if path else ""
            if why:
                faults.append(ConfigFault(f"{key}[{index}]", why))
    return faults


def cannot_keep(config: Config, user: User = OURSELVES) -> list[str]:
    """What of this it would do without, as warnings."""
    with acting_as(user):
        return [
            f"discovery[{index}].state_file: {why}: what is found is not kept for the next start"
            for index, table in enumerate(config.discovery)
            if table.state_file is not None and (why := file_fault(table.state_file, replaced=True))
        ]


def twistd_faults(twistd: Mapping[str, Any], working_dir: str) -> list[ConfigFault]:
    """Those of ``twistd``'s own options."""
    folder = os.path.normpath(os.path.join(working_dir, twistd.get("rundir") or ""))
    if not os.path.isdir(folder):
        return [ConfigFault("--rundir", f"there is no folder {folder}")]
    faults = []
    for name in ("pidfile", "logfile"):
        path = twistd.get(name)
        if path and path not in ("-", TWISTDS_OWN):
            why = file_fault(os.path.join(folder, path))
            if why:
                faults.append(ConfigFault(f"--{name}", why))
    return faults


def file_fault(path: str, *, replaced: bool = False) -> str:
    """Why the file at ``path`` cannot be written to, in words; empty: it can.

    :param replaced: a new one takes its place each time.
    """
    if os.path.isdir(path):
        return f"{path} is a folder"
    if os.path.exists(path) and not replaced:
        return "" if _may(path, os.W_OK) else f"{path} cannot be written to by {_me()}"
    return _folder_fault(path)


def socket_fault(path: str) -> str:
    """Why no UNIX socket can be bound at ``path``; one that is there makes way."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return f"{path} is there, and is no socket"
    except OSError:
        pass
    return _folder_fault(path)


@contextmanager
def acting_as(user: User) -> Iterator[None]:
    """For a while root has the rights of whom it will become; anybody else stays what they are."""
    uid, gid = user
    if os.geteuid() != 0 or not (uid or gid):
        yield
        return
    groups, own_gid = os.getgroups(), os.getegid()
    try:
        if uid:
            entry = pwd.getpwuid(uid)
            gid = entry.pw_gid if gid is None else gid
            os.setgroups(os.getgrouplist(entry.pw_name, gid))
        os.setegid(own_gid if gid is None else gid)
        os.seteuid(uid or 0)
        yield
    finally:
        os.seteuid(0)
        os.setegid(own_gid)
        os.setgroups(groups)


def _folder_fault(path: str) -> str:
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        return f"there is no folder {folder}"
    return "" if _may(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written to by {_me()}"


def _may(path: str, how: int) -> bool:
    return os.access(path, how, effective_ids=True)


def _me() -> str:
    """Who we are now, by name where there is one."""
    try:
        return f"the user {pwd.getpwuid(os.geteuid()).pw_name}"
    except KeyError:
        return f"the user {os.geteuid()}"
