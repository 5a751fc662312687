"""Discovery ``kubernetes``: the ready endpoints of a service.

EndpointSlices are listed once and watched from there. A watch ends by itself
each minute or so and resumes; a version that the API has forgotten wants a new
list. Inside a cluster address, token and authority are found by themselves; the
token is read at each request, since it is renewed where it lies.

While the API does not answer, the last set stays.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote, urlencode

import msgspec
from msgspec import Struct
from twisted.internet.defer import CancelledError
from twisted.internet.task import deferLater
from zope.interface import implementer

from llmgw.config.files import existing_file
from llmgw.config.places import base_url
from llmgw.config.reader import Reader, Rule
from llmgw.core.json_lines import JsonLines, NotJsonLinesError
from llmgw.discovery.kubernetes_protocol import GONE, ApiError, Heard, Slices, error_of
from llmgw.discovery.standing import Backoff, Carried, read_options
from llmgw.interfaces import CONTRACT, IDiscovery, IDiscoveryFactory
from llmgw.plain_files import open_plain

if TYPE_CHECKING:
    from twisted.internet.interfaces import IReactorTime

IN_CLUSTER = "/var/run/secrets/kubernetes.io/serviceaccount"
WATCH_S = 60
"""How long a watch is asked to last."""
GRACE_S = 15.0
LEAST_WATCH_S = 1.0


class KubernetesOptions(Struct, frozen=True):
    """:param service: its slices; or ``selector``, any label selector.

    :param namespace: absent: the one this pod is in.
    :param port: number or name of the endpoints' port; absent: the first.
    :param api: URL of the API server; absent: the cluster this pod is in.
    :param token_file: absent: the pod's own. ``ca_file`` likewise.
    """

    service: Annotated[str | None, Rule(shape=r"[a-z0-9][a-z0-9.-]{0,252}", meaning="a service's name")] = (
        None
    )
    selector: Annotated[str | None, Rule(filled=True)] = None
    namespace: Annotated[str | None, Rule(shape=r"[a-z0-9][a-z0-9-]{0,62}", meaning="a namespace")] = None
    port: Annotated[str | None, Rule(shape=r"[a-z0-9-]{1,15}", meaning="a port's number or name")] = None
    scheme: Literal["http", "https"] = "http"
    path: Annotated[str, Rule(shape=r"(?:/[A-Za-z0-9._~-]+)*", meaning="a plain path such as /llm")] = ""
    api: Annotated[str | None, Rule(convert=base_url)] = None
    token_file: Annotated[str | None, Rule(filled=True, convert=existing_file)] = None
    ca_file: Annotated[str | None, Rule(filled=True, convert=existing_file)] = None
    timeout_s: Annotated[float, Rule(least=0.1, most=60)] = 5.0


def _check(reader: Reader, options: KubernetesOptions) -> None:
    if (options.service is None) == (options.selector is None):
        reader.fault("service", "give one of service and selector")
    if options.api is None and not os.environ.get("KUBERNETES_SERVICE_HOST"):
        reader.fault("api", "missing: this is no pod of a cluster")
    if options.namespace is None and options.api is not None:
        reader.fault("namespace", "missing beside api")


class _GoneError(Exception):
    """The version is forgotten; list anew."""


@implementer(IDiscovery)
class KubernetesDiscovery(Carried):
    """Mirrors the slices of one service.

    :param http: see :class:`llmgw.discovery.http_client.HttpClient`; made at the start if not given.
    """

    def __init__(self, options: KubernetesOptions, reactor: IReactorTime, http: Any = None) -> None:
        super().__init__(reactor, f"kubernetes {options.service or options.selector}")
        self._options = options
        self._http = http
        self._slices = Slices()
        self._backoff = Backoff(1, random.Random(), first_s=0.5, most_s=30.0)

    async def _run(self) -> None:
        # Not sooner: any Twisted program may import this module, and the client needs treq and OpenSSL.
        from llmgw.discovery.http_client import AwayError, HttpClient, QuietError, StatusError, TlsFiles

        if self._http is None:
            own = f"{IN_CLUSTER}/ca.crt"
            ca_file = self._options.ca_file or (own if self._options.api is None else None)
            self._http = HttpClient(self._reactor, TlsFiles(ca_file), self._options.timeout_s)
        while self._update is not None:
            try:
                if self._slices.version is None:
                    await self._list()
                begun_s = self._reactor.seconds()
                await self._watch()
                # A watch ends by itself, after a minute; one that ends at once is no watch.
                if self._reactor.seconds() - begun_s >= LEAST_WATCH_S:
                    self._backoff.reset()
                    continue
            except CancelledError:
                if self._update is None:
                    raise
                self.failed("a question was cancelled, and not by us")
            except _GoneError:
                self.log.info("{source}: version forgotten; listed anew", source=self._called)
                self._slices.version = None
            except (AwayError, QuietError, StatusError, ApiError, OSError) as error:
                fault = _reason(error.status, error.body) if isinstance(error, StatusError) else error
                if isinstance(fault, ApiError) and fault.code == GONE:
                    self._slices.version = None
                self.failed(str(fault))
            except Exception:
                self.log.failure("{source}: a fault of our own", source=self._called)
                self._slices.version = None
            if self._update is not None:
                await deferLater(self._reactor, self._backoff.next_s())

    async def _list(self) -> None:
        status, raw = await self._http.ask("GET", self._url(), self._headers(), None, self._options.timeout_s)
        if status != 200:
            raise _reason(status, raw)
        try:
            answer = msgspec.json.decode(raw, type=dict)
        except (ValueError, RecursionError) as error:
            raise ApiError(f"a list that is no JSON object: {error}") from None
        self._slices.load(answer)
        self.heard()
        self._backoff.reset()
        self._tell()

    async def _watch(self) -> None:
        lines = JsonLines()

        def feed(data: bytes) -> None:
            try:
                events = lines.feed(data)
            except NotJsonLinesError as error:
                raise ApiError(str(error)) from None
            for event in events:
                self._take(event)

        version = self._slices.version or ""
        more = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
        }
        await self._http.stream(
            "GET",
            self._url(**more),
            self._headers(),
            None,
            feed,
            open_s=self._options.timeout_s,
            silence_s=WATCH_S + GRACE_S,
            speaks_first=False,
        )
        self.heard()

    def _take(self, event: Mapping[str, Any]) -> None:
        try:
            heard = self._slices.take(event)
        except ApiError as error:
            if error.code == GONE:
                raise _GoneError from None
            raise
        self.heard()
        self._backoff.reset()
        if heard is Heard.CHANGED:
            self._tell()

    def _tell(self) -> None:
        port: int | str | None = self._options.port
        if isinstance(port, str) and port.isdecimal():
            port = int(port)
        self.tell(self._slices.entries(port, self._options.scheme, self._options.path))

    def _url(self, **more: str) -> str:
        options = self._options
        api = options.api
        if api is None:
            host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
            place = f"[{host}]" if ":" in host else host
            api = f"https://{place}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"
        namespace = options.namespace or _word_in(f"{IN_CLUSTER}/namespace")
        selector = options.selector or f"kubernetes.io/service-name={options.service}"
        query = urlencode({"labelSelector": selector, **more}, quote_via=quote)
        return f"{api}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?{query}"

    def _headers(self) -> dict[str, str]:
        headers = {"accept": "application/json"}
        path = self._options.token_file
        if path is None and self._options.api is None:
            path = f"{IN_CLUSTER}/token"
        if path is not None:
            headers["authorization"] = f"Bearer {_word_in(path)}"
        return headers


def _word_in(path: str) -> str:
    """:raise OSError: it cannot be read, or holds no word."""
    with open_plain(path) as file:
        word = file.read(65_536).decode("ascii", "replace").strip()
    if not word or not word.isprintable() or " " in word:
        raise OSError(f"{path} holds no word")
    return word


def _reason(status: int, raw: bytes) -> ApiError:
    try:
        error = error_of(msgspec.json.decode(raw))
    except (ValueError, RecursionError):
        error = ApiError("no reason told")
    return ApiError(f"status {status}: {error}", status)


@implementer(IDiscoveryFactory)
class KubernetesDiscoveryFactory:
    """Options: see :class:`KubernetesOptions`."""

    name = "kubernetes"
    description = "the ready endpoints of a service, by its EndpointSlices"
    contract = CONTRACT

    def build(self, options: Mapping[str, Any], reactor: IReactorTime) -> KubernetesDiscovery:
        """:raise ConfigError: options are wrong."""
        return KubernetesDiscovery(read_options(KubernetesOptions, options, _check), reactor)
