"""The endpoint strings ``llmtls:`` and ``proxied:``: each wraps another endpoint.

What is not a parameter of the wrapper belongs to the endpoint within::

    llmtls:tcp:8443:privateKey=key.pem:certKey=cert.pem
    llmtls:proxied:tcp:8443:networks=10.0.0.0/8:certs=/etc/llmgw/certs:minimum=1.3

An inner string may also be given whole, its colons escaped, as first parameter
(``llmtls:proxied\\:tcp\\:8443:certs=…``); no endpoint type has a colon in its name, so
the two cannot be confused. Every Twisted program of the environment may import this
module, so what costs time is imported where it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twisted.internet.interfaces import IStreamServerEndpointStringParser
from twisted.plugin import IPlugin
from zope.interface import implementer

from llmgw.listen import PROXIED_PARAMETERS, TLS_PARAMETERS


@implementer(IPlugin, IStreamServerEndpointStringParser)
class TlsParser:
    """``llmtls:`` TLS whose certificates can be changed while it runs.

    ``privateKey``, ``certKey``
        PEM files: the key, and the certificate with its chain (absent: in the same file).
    ``certs``
        A directory of ``NAME.pem`` or ``NAME.crt`` with ``NAME.key``, chosen by SNI.
    ``clientCA``
        PEM file: ask clients for a certificate of these authorities.
    ``clientCerts``
        ``required`` (the default with ``clientCA``) or ``optional``.
    ``minimum``
        ``1.2`` or ``1.3``.
    """

    prefix = "llmtls"

    def parseStreamServer(self, reactor: Any, *args: Any, **kwargs: Any) -> Any:
        """:raise ValueError: a parameter or a file is wrong."""
        from llmgw.listen.contexts import CLIENT_CERTIFICATES, MINIMA, TlsFiles
        from llmgw.listen.tls import TlsEndpoint

        own, rest = _split(kwargs, TLS_PARAMETERS)
        inner = inner_description(args, rest)
        if inner.partition(":")[0] in ("ssl", "tls", self.prefix):
            raise ValueError("llmtls: wraps an endpoint without TLS, such as tcp:8443")
        if not own.get("privateKey") and not own.get("certs"):
            raise ValueError("llmtls: needs privateKey= or certs=")
        if own.get("certKey") and not own.get("privateKey"):
            raise ValueError("llmtls: certKey= needs privateKey=")
        if own.get("clientCerts") and not own.get("clientCA"):
            raise ValueError("llmtls: clientCerts= needs clientCA=")
        files = TlsFiles(
            key=own.get("privateKey"),
            certificate=own.get("certKey"),
            directory=own.get("certs"),
            client_ca=own.get("clientCA"),
            minimum=_one_of("minimum", own.get("minimum", "1.2"), MINIMA),
            client_certificates=_one_of(
                "clientCerts", own.get("clientCerts", "required"), CLIENT_CERTIFICATES
            ),
        )
        return TlsEndpoint(_endpoint(reactor, inner), files, reactor)


@implementer(IPlugin, IStreamServerEndpointStringParser)
class ProxiedParser:
    """``proxied:`` connections begin with a PROXY header, version 1 or 2, and come from a listed network.

    ``networks``
        CIDR networks, a comma between them; absent: the gateway's ``limits.trusted_networks``,
        loopback and Unix sockets.
    """

    prefix = "proxied"

    def parseStreamServer(self, reactor: Any, *args: Any, **kwargs: Any) -> Any:
        """:raise ValueError: a parameter is wrong."""
        from llmgw.listen.proxied import ProxiedEndpoint, networks_of

        own, rest = _split(kwargs, PROXIED_PARAMETERS)
        networks = networks_of(own["networks"]) if "networks" in own else None
        return ProxiedEndpoint(_endpoint(reactor, inner_description(args, rest)), networks, reactor)


def inner_description(args: Sequence[str], kwargs: Mapping[str, str]) -> str:
    """The endpoint string within.

    :raise ValueError: there is none.
    """
    from twisted.internet.endpoints import quoteStringArgument

    # tcp\\:8443\\:interface=… comes as a parameter called tcp:8443:interface.
    whole = [f"{name}={value}" for name, value in kwargs.items() if ":" in name]
    args = [*whole, *args]
    if not args or not args[0]:
        raise ValueError("wraps another endpoint, such as tcp:8443, and there is none")
    first = args[0] if ":" in args[0] else quoteStringArgument(args[0])
    # Twisted's quoting leaves the = alone, which would make a parameter with a name.
    rest = [quoteStringArgument(arg).replace("=", r"\=") for arg in args[1:]]
    named = [f"{name}={quoteStringArgument(value)}" for name, value in kwargs.items() if ":" not in name]
    return own_haproxy(":".join([first, *rest, *named]))


def own_haproxy(description: str) -> str:
    """``haproxy:`` is read as ``proxied:``: Twisted's believes everybody, and wants a header in one piece."""
    kind, colon, rest = description.partition(":")
    return f"{ProxiedParser.prefix}{colon}{rest}" if kind == "haproxy" else description


def _endpoint(reactor: Any, description: str) -> Any:
    from twisted.internet.endpoints import serverFromString

    return serverFromString(reactor, description)


def _split(kwargs: Mapping[str, str], names: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    own = {name: value for name, value in kwargs.items() if name in names}
    return own, {name: value for name, value in kwargs.items() if name not in own}


def _one_of(name: str, value: str, allowed: Any) -> str:
    if value not in allowed:
        raise ValueError(f"llmtls: {name} must be {' or '.join(allowed)}, not {value!r}")
    return value


llmtls = TlsParser()
proxied = ProxiedParser()
