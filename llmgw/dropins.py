"""What stands in ``twisted/plugins`` directories: finding, and telling whose it is.

``twisted.plugin`` does the finding. Kept here besides is what it throws away:
which dropin an object came from, and why a dropin could not be imported.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from msgspec import Struct
from twisted.cred.strcred import ICheckerFactory
from twisted.logger import ILogObserver, LogEvent, globalLogPublisher
from twisted.plugin import getPlugins
from twisted.python.failure import Failure
from zope.interface import Interface, implementer
from zope.interface.exceptions import Invalid
from zope.interface.verify import verifyObject

import twisted.plugins
from llmgw.errors import WHAT_CHARACTERS
from llmgw.interfaces import CONTRACT, FACTORIES, IFactory
from llmgw.plain_text import plain

CREDENTIALS = "credentials"
"""The kind made by Twisted's own ``strcred.ICheckerFactory``, built from a string."""

KINDS: Mapping[str, Any] = {**FACTORIES, CREDENTIALS: ICheckerFactory}
"""Every kind by its word, with the interface of its factories."""

NO_KIND = "?"
"""The kind told of a factory that provides ``IFactory`` and none of :data:`KINDS`."""

NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*\Z")
"""The form of a plugin's name."""


class BrokenDropin(Struct, frozen=True):
    """A dropin that Twisted could not import.

    :param file: the dropin, or as near as the traceback tells.
    :param cause: type and text of the exception, and where it was raised.
    """

    file: str
    cause: str


class Found(Struct, frozen=True):
    """A factory, its dropin, and why it is unfit (``""`` if it is not)."""

    kind: str
    name: str
    description: str
    factory: Any
    module: str
    file: str
    fault: str


class Survey(Struct, frozen=True):
    """One look at the plugin directories."""

    found: tuple[Found, ...]
    broken: tuple[BrokenDropin, ...]


@cache
def survey() -> Survey:
    """Everything there is, by kind and name; kept until ``survey.cache_clear()``."""
    with _logged_failures() as failures:
        # IFactory covers all kinds of ours in one pass, and loads nothing else.
        objects = [*getPlugins(IFactory), *getPlugins(ICheckerFactory)]
    # One object may come several times: a dropin that imports another's factory
    # (to wrap it, say) offers it again. That is no clash.
    unique = {id(each): each for each in objects}.values()
    found = [plugin for each in unique for plugin in _inspect(each)]
    kinds = [*KINDS, NO_KIND]
    found.sort(key=lambda plugin: (kinds.index(plugin.kind), plugin.name, plugin.module))
    causes = {_explain(failure) for failure in failures}
    return Survey(tuple(found), tuple(sorted(causes, key=lambda dropin: (dropin.file, dropin.cause))))


@contextmanager
def _logged_failures() -> Iterator[list[Failure]]:
    """Collect failures logged meanwhile.

    ``twisted.logger.capturedLogs`` would leave its observer behind if something
    inside raised. ``twisted.plugin`` logs through the legacy ``log.err``, whose
    failure stands under ``failure``, not ``log_failure``.
    """
    failures: list[Failure] = []

    @implementer(ILogObserver)
    def collect(event: LogEvent) -> None:
        failure = event.get("log_failure") or event.get("failure")
        if failure is not None:
            failures.append(failure)

    globalLogPublisher.addObserver(collect)
    try:
        yield failures
    finally:
        globalLogPublisher.removeObserver(collect)


def _inspect(factory: Any) -> Iterator[Found]:
    module, attribute, file = _dropin_of(factory)
    kinds = [kind for kind, interface in KINDS.items() if interface.providedBy(factory)]
    for kind in kinds or [NO_KIND]:
        try:
            if kind == NO_KIND:
                name, description, fault = attribute, "", "it provides IFactory but no kind of factory"
            elif kind == CREDENTIALS:
                name = str(factory.authType)
                # authHelp is for `twistd --help-auth-type`: the first paragraph is enough here.
                description = " ".join(str(factory.authHelp).strip().partition("\n\n")[0].split())
                fault = unverified(ICheckerFactory, factory)
            else:
                fault = unverified(KINDS[kind], factory) or _unfit(factory)
                name = str(getattr(factory, "name", attribute))
                description = str(getattr(factory, "description", ""))
        except Exception as error:  # a property of theirs may raise anything
            name, description, fault = attribute, "", one_line(error)
        yield Found(kind, name, description, factory, module, file, fault)


def _unfit(factory: Any) -> str:
    if factory.contract != CONTRACT:
        return f"written for contract {factory.contract!r}, this llmgw speaks contract {CONTRACT}"
    if not isinstance(factory.name, str) or not NAME.match(factory.name):
        return f"its name {factory.name!r} is not lower case with hyphens"
    return ""


def _dropin_of(factory: Any) -> tuple[str, str, str]:
    """Module, attribute and file; ``getPlugins`` has just imported them."""
    for name in sorted(sys.modules):
        if name.startswith("twisted.plugins."):
            module = sys.modules[name]
            for attribute, value in vars(module).items():
                if value is factory:
                    return name, attribute, getattr(module, "__file__", None) or ""
    return type(factory).__module__, type(factory).__name__, ""


def _explain(failure: Failure) -> BrokenDropin:
    files = [(frame[1], frame[2]) for frame in failure.frames]
    if isinstance(failure.value, SyntaxError) and failure.value.filename:
        files.append((failure.value.filename, failure.value.lineno or 0))
    directories = set(twisted.plugins.__path__)
    dropins = [file for file, _ in files if str(Path(file).parent) in directories]
    file, line = files[-1] if files else ("", 0)
    raised = f" ({file}:{line})" if file else ""
    assert failure.value is not None
    return BrokenDropin(dropins[0] if dropins else file, f"{one_line(failure.value)}{raised}")


def owners_of(files: set[str]) -> dict[str, list[tuple[str, str]]]:
    """Name and version of the distributions that own each file.

    An editable install records no files; there the project's directory decides.
    """
    owned: dict[str, dict[str, str]] = {file: {} for file in files}
    editable: list[tuple[Path, str, str]] = []
    for distribution in metadata.distributions():
        # RECORD of a wheel, SOURCES.txt of an egg-info; text search, since
        # parsing every RECORD of an environment takes half a second.
        text = distribution.read_text("RECORD") or distribution.read_text("SOURCES.txt") or ""
        name = distribution.metadata["Name"] or "?"
        for file in files:
            entry = f"twisted/plugins/{Path(file).name}"
            if entry in text and Path(str(distribution.locate_file(entry))).resolve() == Path(file).resolve():
                owned[file].setdefault(name, distribution.version)
        origin = distribution.read_text("direct_url.json")
        if origin and json.loads(origin).get("dir_info", {}).get("editable"):
            path = unquote(urlsplit(json.loads(origin)["url"]).path)
            editable.append((Path(path).resolve(), name, distribution.version))
    # The innermost project wins: an example package may lie inside another's checkout.
    editable.sort(key=lambda project: len(project[0].parts), reverse=True)
    for file, known in owned.items():
        for directory, name, version in editable:
            if not known and Path(file).resolve().is_relative_to(directory):
                known[name] = version
    return {file: list(known.items()) for file, known in owned.items()}


def unverified(interface: type[Interface], candidate: Any) -> str:
    """Why ``candidate`` does not keep ``interface``; ``""`` if it does."""
    try:
        verifyObject(interface, candidate)
    except Invalid as error:
        return " ".join(str(error).split())
    return ""


def not_plain(candidate: Any, methods: Iterable[str]) -> str:
    """Which of ``methods``, where they are there, does nothing yet when it is called; ``""`` if none."""
    for name in methods:
        method = getattr(candidate, name, None)
        if inspect.iscoroutinefunction(method):
            return f"`{name}` is written with `async def`, and is called as a plain function"
        if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
            return f"`{name}` is a generator, and is called as a plain function"
    return ""


def one_line(error: BaseException) -> str:
    """Type and text of ``error`` without line ends."""
    text = plain(" ".join(str(error).split()), WHAT_CHARACTERS)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
