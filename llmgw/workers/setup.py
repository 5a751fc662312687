"""A configuration as something to send: what the command line said, and every file it read.

A worker reads no configuration file. It gets what its parent has read and
verified, so that one that starts anew does not trip over a file that somebody is
editing, and needs no right to read keys that only root may read.
"""

from __future__ import annotations

from msgspec.structs import replace

from llmgw.config import Config, FileSeam, PluginConfig, config_from_options
from llmgw.config.files import DISK
from llmgw.workers.messages import File, Setup


class Recorder:
    """The real files, and a note of each that was read or looked at."""

    def __init__(self) -> None:
        self.files: dict[str, File] = {}

    def read(self, path: str) -> bytes:
        """See :class:`~llmgw.config.files.FileSeam`."""
        content = DISK.read(path)
        known = self.files.get(path)
        self.files[path] = File(0 if known is None else known.mode, content)
        return content

    def mode(self, path: str) -> int:
        """See :class:`~llmgw.config.files.FileSeam`."""
        mode = DISK.mode(path)
        known = self.files.get(path)
        self.files[path] = File(mode, None if known is None else known.content)
        return mode


class _Kept:
    """The files of a setup. One that is not among them is looked for on the disk."""

    def __init__(self, files: dict[str, File]) -> None:
        self._files = files

    def read(self, path: str) -> bytes:
        """See :class:`~llmgw.config.files.FileSeam`."""
        known = self._files.get(path)
        return DISK.read(path) if known is None or known.content is None else known.content

    def mode(self, path: str) -> int:
        """See :class:`~llmgw.config.files.FileSeam`."""
        known = self._files.get(path)
        return DISK.mode(path) if known is None else known.mode


def config_of(setup: Setup, files: FileSeam | None = None) -> Config:
    """The configuration that ``setup`` spells.

    :param files: in place of those that the setup holds.
    :raise ConfigError: every fault.
    """
    return config_from_options(
        setup.path,
        listen=setup.listen,
        admin=setup.admin,
        backends=setup.backends,
        auth=setup.auth,
        workers=setup.workers,
        working_dir=setup.working_dir,
        files=_Kept(setup.files) if files is None else files,
    )


def as_worker(config: Config, store: str) -> Config:
    """What a worker makes of the whole gateway's configuration: the admin listener is the
    parent's, and limits are counted for all workers together.

    :param store: URL of the one that the parent runs, for a configuration that names none.
    """
    named = bool(config.store) or "url" in config.rate_limiter.options
    shared = config.store if named or not store else replace(config.store, url=store)
    limiter = PluginConfig("redis") if config.rate_limiter.plugin == "local" else config.rate_limiter
    return replace(config, admin=(), admin_token=None, workers=1, store=shared, rate_limiter=limiter)
