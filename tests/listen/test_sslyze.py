"""sslyze against a listener: Mozilla's "intermediate" profile, whole."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from authority import Authority
from harness import Gateway, Scripted, backend_table, free_port

SSLYZE = shutil.which("sslyze", path=str(Path(sys.prefix) / "tools" / "bin")) or shutil.which("sslyze")


@pytest.mark.skipif(SSLYZE is None, reason="no sslyze (make test installs it into .venv/tools)")
def test_it_is_mozilla_intermediate(tmp_path: Path) -> None:
    authority = Authority()
    authority.issue("localhost").write(tmp_path, "server")
    ca = authority.write(tmp_path / "ca.pem")
    port = free_port()
    listen = f"llmtls:tcp:{port}:interface=127.0.0.1:privateKey=server.key:certKey=server.crt"
    backend = Scripted()
    gateway = Gateway(tmp_path, f'listen = ["{listen}"]\n' + backend_table(backend, "b"))
    try:
        report = tmp_path / "report.json"
        done = subprocess.run(
            [
                str(SSLYZE),
                "--mozilla_config=intermediate",
                *("--resum", "--reneg", "--compression", "--early_data"),
                f"--certinfo_ca_file={ca}",
                f"--json_out={report}",
                f"localhost:{port}",
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
        assert "OK - Compliant" in done.stdout
        [scan] = json.loads(report.read_text())["server_scan_results"]
        results: dict[str, Any] = {name: value["result"] for name, value in scan["scan_result"].items()}
        curves = {each["name"] for each in results["elliptic_curves"]["supported_curves"]}
        assert curves == {"X25519", "secp256r1", "secp384r1"}
        accepted = results["tls_1_2_cipher_suites"]["accepted_cipher_suites"]
        suites = {each["cipher_suite"]["name"] for each in accepted}
        assert suites == {
            "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
            "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
            "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
        }
        resumed = results["session_resumption"]
        assert resumed["tls_ticket_resumption_result"] == "FULLY_SUPPORTED"
        assert not results["session_renegotiation"]["is_vulnerable_to_client_renegotiation_dos"]
        assert not results["tls_1_3_early_data"]["supports_early_data"]
        assert not results["tls_compression"]["supports_compression"]
    finally:
        gateway.stop()
        backend.close()
    assert "Traceback" not in gateway.log
