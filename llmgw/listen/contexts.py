"""The OpenSSL contexts of one listener: made from its certificates, swapped on reload, chosen by name.

1. The groups of the key exchange are set through a private handle of pyOpenSSL, which
   has no call for it; where that is not to be had, OpenSSL's own list holds.
2. Keys of session tickets are OpenSSL's own: made with the context and thrown away with
   it. They live for :data:`TICKET_KEYS_S` at most, in one process; pyOpenSSL has no
   call to share them, so a client that meets another process shakes hands in full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from OpenSSL import SSL, crypto
from twisted.internet.interfaces import IOpenSSLServerConnectionCreator
from zope.interface import implementer

from llmgw.certificates import BadPair, Pair, Pairs, find, read_certificates, read_directory, read_pair

CIPHERS = ":".join(
    f"ECDHE-{signature}-{cipher}"
    for cipher in ("AES128-GCM-SHA256", "AES256-GCM-SHA384", "CHACHA20-POLY1305")
    for signature in ("ECDSA", "RSA")
)
"""For TLS 1.2: forward secrecy and authenticated encryption only. (1.3 has nothing else.)
With :data:`GROUPS`: Mozilla's Server Side TLS, "intermediate"."""
SUITES = "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256"
"""For TLS 1.3. OpenSSL's clients put AES-256 first, whose SHA-384 makes a handshake dearer by a twentieth."""
PRIORITIZE_CHACHA = 1 << 21
"""Ours is the order, unless a client puts ChaCha20 first: it has no AES in hardware
(``SSL_OP_PRIORITIZE_CHACHA``; pyOpenSSL has no name for it)."""
GROUPS = "X25519:P-256:P-384"
MINIMA = {"1.2": SSL.TLS1_2_VERSION, "1.3": SSL.TLS1_3_VERSION}
ALPN = (b"http/1.1", b"http/1.0")
"""No HTTP/2. ``curl -0`` offers the second one alone."""
TICKET_KEYS_S = 12 * 3600.0
SESSION_S = 2 * 3600
CLIENT_CERTIFICATES = ("required", "optional")

_REASONS = {
    9: "not valid yet",
    10: "expired",
    18: "self-signed",
    19: "signed by an authority that is not known",
    20: "signed by an authority that is not known",
    21: "signed by an authority that is not known",
    26: "not made for clients",
}
"""X.509 verification errors (``openssl-verification-options(1)``) that have plain words."""


@dataclass(frozen=True)
class TlsFiles:
    """What an operator has set for a listener; paths are absolute.

    :param key: with ``certificate``: what serves clients that name nothing known.
    :param certificate: may be the same file.
    :param directory: see :func:`~llmgw.certificates.read_directory`.
    :param client_ca: authorities of client certificates; ``None``: none is asked for.
    :param minimum: a key of :data:`MINIMA`.
    :param client_certificates: one of :data:`CLIENT_CERTIFICATES`.
    """

    key: str | None = None
    certificate: str | None = None
    directory: str | None = None
    client_ca: str | None = None
    minimum: str = "1.2"
    client_certificates: str = "required"

    def read(self) -> Material:
        """Everything anew from the disk.

        :raise BadPair: some file will not do; the message names it.
        """
        pair = read_pair(self.certificate or self.key, self.key) if self.key else None
        if self.directory:
            pairs = read_directory(self.directory, pair)
        elif pair is None:
            raise BadPair("privateKey or certs is missing")
        else:
            pairs = Pairs(pair)
        authorities = read_certificates(self.client_ca) if self.client_ca else []
        material = Material(self, pairs, tuple(authorities))
        material.default_context()  # OpenSSL has rules of its own
        return material


class Material:
    """Files that were read and found good.

    :raise BadPair: OpenSSL refuses a pair.
    """

    def __init__(self, files: TlsFiles, pairs: Pairs, authorities: tuple[x509.Certificate, ...]) -> None:
        self.files = files
        self.pairs = pairs
        self.authorities = authorities
        made = {id(pair): self._context(pair) for pair in pairs.by_name.values()}
        self._by_name = {name: made[id(pair)] for name, pair in pairs.by_name.items()}

    def default_context(self) -> SSL.Context:
        """A new context to begin handshakes with: it gives way to another when a client asks for a name.

        The keys of session tickets are always this one's.
        """
        by_name = self._by_name

        def choose(connection: SSL.Connection) -> None:
            name = connection.get_servername()
            if name is not None:
                context = find(by_name, name.decode("ascii", "replace"))
                if context is not None:
                    connection.set_context(context)

        context = self._context(self.pairs.default)
        if by_name:
            context.set_tlsext_servername_callback(choose)
        return context

    def _context(self, pair: Pair) -> SSL.Context:
        context = SSL.Context(SSL.TLS_SERVER_METHOD)
        context.set_min_proto_version(MINIMA[self.files.minimum])
        context.set_options(SSL.OP_NO_COMPRESSION | SSL.OP_NO_RENEGOTIATION)
        context.set_options(SSL.OP_CIPHER_SERVER_PREFERENCE | PRIORITIZE_CHACHA)
        context.set_cipher_list(CIPHERS.encode())
        context.set_tls13_ciphersuites(SUITES.encode())
        set_groups(context)
        # An idle connection holds no buffers.
        context.set_mode(SSL.MODE_RELEASE_BUFFERS)
        # Sessions are kept in tickets by clients; a table of our own would only grow.
        context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
        context.set_session_id(b"llmgw")
        context.set_timeout(SESSION_S)
        context.set_alpn_select_callback(_select_protocol)
        try:
            context.use_certificate(pair.leaf)
            for each in pair.chain[1:]:
                context.add_extra_chain_cert(each)
            context.use_privatekey(pair.key)
            context.check_privatekey()
        except (SSL.Error, crypto.Error, TypeError) as error:
            raise BadPair(f"{pair.source}: {reason_of(error)}") from None
        if self.authorities:
            self._ask_for_client_certificates(context)
        return context

    def _ask_for_client_certificates(self, context: SSL.Context) -> None:
        store = context.get_cert_store()
        assert store is not None
        for authority in self.authorities:
            store.add_cert(crypto.X509.from_cryptography(authority))
            context.add_client_ca(authority)
        mode = SSL.VERIFY_PEER
        if self.files.client_certificates == "required":
            mode |= SSL.VERIFY_FAIL_IF_NO_PEER_CERT
        context.set_verify(mode, _judge_client)


@implementer(IOpenSSLServerConnectionCreator)
class Contexts:
    """Makes the TLS connections of a listener.

    :param clock: monotonic seconds.
    :ivar material: in use.
    """

    def __init__(self, material: Material, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.use(material)

    def use(self, material: Material) -> None:
        """Use ``material`` for handshakes from now on; existing connections keep theirs."""
        self.material = material
        self._default = material.default_context()
        self._made_s = self._clock()

    @property
    def asks_clients(self) -> bool:
        """Client certificates are asked for."""
        return bool(self.material.authorities)

    def serverConnectionForTLS(self, tlsProtocol: Any) -> SSL.Connection:
        """A new TLS connection."""
        if self._clock() - self._made_s > TICKET_KEYS_S:
            self.use(self.material)
        return SSL.Connection(self._default, None)


def set_groups(context: SSL.Context) -> bool:
    """Allow :data:`GROUPS` alone for the key exchange. :return: whether it could be done."""
    try:
        done = SSL._lib.SSL_CTX_set1_curves_list(context._context, GROUPS.encode())  # type: ignore[attr-defined]
    except AttributeError:
        return False
    return bool(done == 1)


def reason_of(error: BaseException) -> str:
    """Why OpenSSL gave up, in its own fixed words: nothing that a peer has sent is in them."""
    queue = error.args[0] if error.args else None
    if isinstance(queue, list) and queue:
        words: Sequence[Any] = queue[-1]
        return str(words[-1]) or "no reason given"
    return str(error) or type(error).__name__


def _select_protocol(connection: SSL.Connection, offered: list[bytes]) -> bytes:
    for protocol in ALPN:
        if protocol in offered:
            return protocol
    # Fatal, as RFC 7301 section 3.2 wants it: who speaks only HTTP/2 should not begin to.
    raise SSL.Error([("SSL routines", "", "no application protocol in common")])


def _judge_client(
    connection: SSL.Connection, certificate: crypto.X509, code: int, depth: int, good: int
) -> bool:
    if not good:
        protocol = connection.get_app_data()
        whose = "client certificate" if depth == 0 else "authority of the client certificate"
        told = f"{whose} {_REASONS.get(code, f'not valid (X.509 error {code})')}"
        protocol.refused_because = told
    return bool(good)
