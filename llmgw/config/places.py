"""Where things are on the network: URLs of backends, endpoint strings of listeners, networks, origins.

Each function takes what stands in the file and gives its one settled form, so
that equal places compare equal and nothing later has to guess.

:source: RFC 3986 and the WHATWG URL standard for hosts; the parsers of Twisted
    26 (``twisted.internet.endpoints``) for endpoint strings.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from msgspec import Struct

from llmgw.config.files import absolute_path, existing_file, existing_folder, private_file
from llmgw.config.reader import Reader
from llmgw.config.words import did_you_mean, shown
from llmgw.core.allowed import settled
from llmgw.listen import PROXIED_PARAMETERS, TLS_PARAMETERS
from llmgw.store.address import parse_address, parse_sentinel

# --- URLs, networks, origins --------------------------------------------------

_HOST = r"(?=.{1,253}\.?$)[a-z0-9_](?:[a-z0-9_-]{0,62})(?:\.[a-z0-9_](?:[a-z0-9_-]{0,62}))*\.?"
_PORTS = {"http": 80, "https": 443}


def base_url(reader: Reader | None, where: str, text: str) -> str:
    """A backend's URL in its one form: lower case, no default port, no trailing slash or ``/v1``.

    Paths of the API are appended to it, so ``http://b``, ``http://b/`` and
    ``http://b/v1/`` must come out the same.

    :raise ValueError: it is no such URL; the message never holds a password.
    """
    if not re.fullmatch(r"[\x21-\x7e]+", text) or "\\" in text:
        raise ValueError(f"not an http(s) URL: {shown(text)}" if "@" not in text else "not an http(s) URL")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ValueError("not an http(s) URL" if "@" in text else f"bad URL: {error}") from None
    scheme = parts.scheme
    if "@" in parts.netloc:
        raise ValueError("must not hold a user or password; use api_key_file")
    if scheme not in _PORTS or not parts.hostname:
        raise ValueError(f"not an http(s) URL: {shown(text)}")
    if "?" in text or "#" in text:
        raise ValueError(f"must have no query or fragment: {shown(text)}")
    if port == 0 or (port is None and parts.netloc.endswith(":")):
        raise ValueError(f"bad port: {shown(text)}")
    host = _host(parts.hostname, bracketed="[" in parts.netloc)
    path = re.sub(r"(?:/v1|/)*$", "", parts.path)
    if "//" in path or any(part in {".", ".."} for part in path.lower().replace("%2e", ".").split("/")):
        raise ValueError(f"path must be plain: {shown(text)}")
    return f"{scheme}://{host}{'' if port in (None, _PORTS[scheme]) else f':{port}'}{path}"


def _host(host: str, bracketed: bool) -> str:
    if bracketed:
        try:
            return f"[{ipaddress.IPv6Address(host).compressed}]" if "%" not in host else _refuse(host)
        except ValueError:
            return _refuse(host)
    # What ends in a number is an IPv4 address or a trick: 127.1, 0x7f.1 (WHATWG URL, "ends in a number").
    if re.search(r"(?:^|\.)(?:\d+|0x[0-9a-f]*)\.?$", host):
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            return _refuse(host)
    return host if re.fullmatch(_HOST, host) else _refuse(host)


def _refuse(host: str) -> str:
    raise ValueError(f"bad host: {shown(host)}")


def network(reader: Reader, where: str, text: str) -> str:
    """A CIDR network in its usual spelling."""
    try:
        return str(ipaddress.ip_network(text))
    except ValueError:
        pass
    try:
        meant = ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"not an address or CIDR network: {shown(text)}") from None
    raise ValueError(f"{shown(text)} has host bits set; did you mean {meant}?")


def allowed_place(reader: Reader, where: str, text: str) -> str:
    """A network, address or name that discovered backends may be at, in its one form."""
    return settled(text)


def origin(reader: Reader, where: str, text: str) -> str:
    """A web origin as browsers send it, or ``*``."""
    if text == "*":
        return text
    try:
        parts = urlsplit(text)
        plain = f"{parts.scheme}://{parts.netloc}"
    except ValueError:
        plain = ""
    if plain != text or parts.scheme not in _PORTS or not re.fullmatch(r"[A-Za-z0-9.:\[\]_-]+", parts.netloc):
        raise ValueError(f"not an origin such as https://app.example: {shown(text)}")
    return text.lower()


def web_url(reader: Reader, where: str, text: str) -> str:
    """An http(s) URL whose path counts as it stands."""
    base = base_url(reader, where, text)
    return base.partition("://")[0] + "://" + base.split("/")[2] + urlsplit(text).path


def store_url(reader: Reader, where: str, text: str) -> str:
    """A URL of the shared store; whether it may lack a host, no single key can tell."""
    parse_address(text, hostless=True)
    return text


def sentinel(reader: Reader, where: str, text: str) -> str:
    """``host:port`` of a Sentinel."""
    parse_sentinel(text)
    return text


def is_local_url(url: str) -> bool:
    """Whether a settled URL names this machine."""
    host = urlsplit(url).hostname or ""
    return host == "localhost" or host.startswith("127.") or host == "::1"


# --- endpoint strings ---------------------------------------------------------

# Parameters in the order of the parsers of Twisted 26. Types that are not listed
# pass through as they are.
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "tcp": ("port", "interface", "backlog"),
    "tcp6": ("port", "backlog", "interface"),
    "ssl": (
        *("port", "privateKey", "certKey", "sslmethod", "interface", "backlog"),
        *("extraCertChain", "dhParameters"),
    ),
    "tls": ("path", "port", "backlog", "interface"),
    "unix": ("address", "mode", "backlog", "lockfile"),
}
# Types that wrap another endpoint, with the parameters that are theirs and have names only.
_WRAPPERS: Mapping[str, tuple[str, ...]] = {
    "haproxy": PROXIED_PARAMETERS,
    "proxied": PROXIED_PARAMETERS,
    "llmtls": TLS_PARAMETERS,
}
_PATHS = (
    *("privateKey", "certKey", "certs", "clientCA"),
    *("extraCertChain", "dhParameters", "path", "address"),
)


class _Endpoint(Struct):
    """A server endpoint string, taken apart as ``twisted.internet.endpoints._parse`` does.

    :param parts: the raw text between unescaped colons, escapes kept.
    :param places: unescaped value of each parameter and the index of its part.
    :param wrappers: what stands around it, the outermost first.
    """

    kind: str
    wrappers: list[str]
    parts: list[str]
    places: dict[str, tuple[int, str]]
    surplus: list[str]


def _endpoint(description: str) -> _Endpoint:
    """:raise ValueError: it ends in the middle of an escape."""
    parts = _parts(description)
    arguments: list[tuple[int, str]] = []
    places: dict[str, tuple[int, str]] = {}
    for index, part in enumerate(parts):
        keyword = re.match(r"((?:\\.|[^\\=])*)=", part, re.DOTALL)
        within = arguments and all(value in _WRAPPERS for _, value in arguments)
        # llmtls:tcp\:80\:backlog=7 has an inner string, and not a parameter tcp:80:backlog.
        if keyword and not (within and ":" in _unescape(keyword[1])):
            places[_unescape(keyword[1])] = (index, _unescape(part[keyword.end() :]))
        else:
            arguments.append((index, _unescape(part)))
    wrappers: list[str] = []
    while len(arguments) > 1 and arguments[0][1] in _WRAPPERS:
        wrappers.append(arguments.pop(0)[1])
        index, inner = arguments[0]
        if ":" in inner:
            # An inner string given whole is written out, part by part.
            return _endpoint(":".join([*parts[:index], *_parts(inner), *parts[index + 1 :]]))
    kind = arguments[0][1] if arguments else ""
    own = _PARAMETERS.get(kind, ())
    names = own and own + tuple(name for each in wrappers for name in _WRAPPERS[each])
    surplus = [name for name in places if names and name not in names]
    for name, place in zip(own, arguments[1:], strict=False):
        if name in places:
            surplus.append(name)
        places[name] = place
    surplus += [value for _, value in arguments[1 + len(own) :] if own]
    return _Endpoint(kind, wrappers, parts, places, surplus)


def _parts(description: str) -> list[str]:
    pieces = re.findall(r"\\.|[^\\]|\\$", description, re.DOTALL)
    if "\\" in pieces:
        raise ValueError("ends in a lone backslash")
    parts = [""]
    for piece in pieces:
        if piece == ":":
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def port_of(description: str) -> int | None:
    """The TCP port of an endpoint string, if one can be read from it."""
    text = _endpoint(description).places.get("port", (0, ""))[1]
    return int(text) if text.isdecimal() else None


def unix_path(description: str) -> str:
    """The path of a settled endpoint string's UNIX socket, empty if it has none. One that begins with
    NUL is of Linux's abstract kind, and no file."""
    endpoint = _endpoint(description)
    path = endpoint.places.get("address", (0, ""))[1] if endpoint.kind == "unix" else ""
    return "" if path.startswith("\0") else path


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)


def listener(reader: Reader, where: str, description: str) -> str:
    """A server endpoint string with absolute paths, its files looked at.

    Only types of Twisted's own are judged; whether the rest can be parsed is
    for ``serverFromString`` to say.
    """
    endpoint = _endpoint(description)
    own = _PARAMETERS.get(endpoint.kind, ())
    if not endpoint.kind or endpoint.kind in _WRAPPERS:
        raise ValueError("names no endpoint type" if not endpoint.kind else "wraps no endpoint")
    if not own and not endpoint.wrappers:
        return description
    names = own + tuple(name for each in endpoint.wrappers for name in _WRAPPERS[each])
    for name in endpoint.surplus:
        what = "doubled" if name in names else "unknown"
        hint = did_you_mean(name, [each for each in names if each != name])
        reader.fault(where, f"{endpoint.kind}: {what} parameter {shown(name)}{hint}")
    if own and own[0] not in endpoint.places:
        reader.fault(where, f"{endpoint.kind}: {own[0]} is missing")
    port = endpoint.places.get("port", (0, "0"))[1]
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        reader.fault(where, f"{endpoint.kind}: bad port {shown(port)}")
    if "llmtls" in endpoint.wrappers and endpoint.kind in ("ssl", "tls"):
        reader.fault(where, f"llmtls: wraps an endpoint without TLS, such as tcp:8443, not {endpoint.kind}")
    if endpoint.kind == "ssl" and "privateKey" not in endpoint.places:
        # Twisted's own default, made to count from the folder of the file as well.
        endpoint.places["privateKey"] = (len(endpoint.parts), "server.pem")
        endpoint.parts.append("")
    for name in _PATHS:
        if name in names and name in endpoint.places:
            _settle_path(reader, where, endpoint, name)
    return ":".join(endpoint.parts)


def _settle_path(reader: Reader, where: str, endpoint: _Endpoint, name: str) -> None:
    index, value = endpoint.places[name]
    path = absolute_path(reader, value)
    try:
        if not value:
            raise ValueError("is empty")
        if name == "privateKey":
            private_file(reader, path)
        elif name in ("certs", "path"):
            existing_folder(reader, path)
        elif name != "address":
            existing_file(reader, where, path)
    except ValueError as error:
        reader.fault(where, f"{name}: {error}")
    if path != value or not endpoint.parts[index]:
        quoted = re.sub(r"([\\:=])", r"\\\1", path)
        positional = endpoint.parts[index] and not re.match(r"(?:\\.|[^\\=])*=", endpoint.parts[index])
        endpoint.parts[index] = quoted if positional else f"{name}={quoted}"


def is_loopback_endpoint(description: str) -> bool:
    """Only this machine can reach what listens there.

    A Unix socket is local. A socket that systemd hands over, and a type that
    is not known, may be anything and count as reachable.
    """
    try:
        endpoint = _endpoint(description)
    except ValueError:
        return False
    if endpoint.kind == "unix":
        return True
    if "interface" not in _PARAMETERS.get(endpoint.kind, ()):
        return False
    interface = endpoint.places.get("interface", (0, ""))[1]
    if interface.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(interface)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def address_of(description: str) -> tuple[str, str, str] | None:
    """What a settled endpoint string takes for itself: kind of address, interface (empty for all) and
    port, or the path of a UNIX socket. ``None`` where that cannot be read from it."""
    endpoint = _endpoint(description)
    if endpoint.kind == "unix" and "address" in endpoint.places:
        return ("unix", endpoint.places["address"][1], "")
    if "port" not in _PARAMETERS.get(endpoint.kind, ()) or port_of(description) in (None, 0):
        return None
    text = endpoint.places.get("interface", (0, "::" if endpoint.kind == "tcp6" else ""))[1]
    try:
        address = ipaddress.ip_address({"": "0.0.0.0", "localhost": "127.0.0.1"}.get(text.lower(), text))
    except ValueError:
        return ("name", text.lower(), str(port_of(description)))
    interface = "" if address.is_unspecified else str(address)
    return (f"IPv{address.version}", interface, str(port_of(description)))


def with_backlog(description: str, backlog: int) -> str:
    """A settled endpoint string that says how many connections may wait to be accepted.

    Twisted's own default is 50, which a burst of callers overruns. A figure that
    stands there already wins; types that know no such parameter stay as they are.
    """
    endpoint = _endpoint(description)
    if "backlog" in endpoint.places or "backlog" not in _PARAMETERS.get(endpoint.kind, ()):
        return description
    return f"{description}:backlog={backlog}"
