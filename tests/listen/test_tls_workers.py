"""Workers share a TLS listener, and a reload renews the certificate of each."""

from __future__ import annotations

import json
import socket
import ssl
from pathlib import Path

from authority import Authority
from harness import Gateway, Scripted, backend_table, eventually, free_port, post


def test_every_worker_shows_the_new_certificate(tmp_path: Path) -> None:
    authority = Authority()
    context = ssl.create_default_context(cadata=authority.pem.decode())
    authority.issue("localhost").write(tmp_path, "server")
    port = free_port()
    listen = (
        f"llmtls:proxied:tcp:{port}:interface=127.0.0.1:networks=127.0.0.1/32"
        ":privateKey=server.key:certKey=server.crt"
    )
    backend = Scripted()
    gateway = Gateway(
        tmp_path, f'workers = 2\nlisten = ["{listen}"]\n' + backend_table(backend, "b", 'models = ["m"]')
    )

    def shown() -> int:
        with socket.create_connection(("127.0.0.1", port), 10) as plain:
            plain.sendall(b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n")
            with context.wrap_socket(plain, server_hostname="localhost") as sock:
                sock.sendall(post(headers="Connection: close\r\n"))
                assert b"200 OK" in sock.recv(65536)
                return int(sock.getpeercert()["serialNumber"], 16)  # type: ignore[index, arg-type]

    try:
        eventually(lambda: len({shown() for _ in range(4)}) == 1, 20)
        new = authority.issue("localhost")
        new.write(tmp_path, "server")
        status, body = gateway.admin("/api/reload", "POST")
        assert (status, json.loads(body)["needs_restart"]) == (200, [])
        assert {shown() for _ in range(24)} == {new.serial}
        (tmp_path / "server.crt").write_bytes(authority.issue("localhost").certificate_pem)
        status, body = gateway.admin("/api/reload", "POST")
        assert status == 400
        assert b"does not belong to the private key" in body
        assert {shown() for _ in range(12)} == {new.serial}
    finally:
        gateway.stop()
        backend.close()
    assert "Traceback" not in gateway.log
