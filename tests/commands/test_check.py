"""``llmgw check``: the exit status and the words an operator gets."""

import json
from pathlib import Path

import pytest
from authority import Authority
from click.testing import CliRunner

from llmgw.commands.check import check

GOOD = '[[backends]]\nid = "a"\nurl = "http://127.0.0.1:1"\n'


def run(path: Path, *arguments: str):
    return CliRunner().invoke(check, [str(path), *arguments])


def test_a_good_file_says_so(tmp_path):
    path = tmp_path / "llmgw.toml"
    path.write_text(GOOD)
    result = run(path)
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("llmgw.toml: good\n")


def test_every_fault_is_listed_with_its_key(tmp_path):
    path = tmp_path / "llmgw.toml"
    path.write_text('nonsense = 1\n[[backends]]\nid = "a"\nurl = "ftp://x"\n')
    result = run(path)
    assert result.exit_code == 1
    assert "nonsense" in result.stderr
    assert "backends[0].url" in result.stderr


@pytest.mark.parametrize(
    ("table", "where"),
    [
        ('[router]\nplugin = "no-such"\n', "router.plugin"),
        ("[router]\nplugin = \"adaptive\"\nalpha = 'x'\n", "router.alpha"),
        ('[[health]]\nplugin = "llamacpp"\ninterval_s = 0.1\n', "health[0].interval_s"),
        ('[rate_limiter]\nplugin = "local"\nurl = "x"\n', "rate_limiter.url"),
    ],
)
def test_plugins_are_built_and_their_faults_named(tmp_path, table, where):
    path = tmp_path / "llmgw.toml"
    path.write_text(GOOD + table)
    result = run(path)
    assert result.exit_code == 1
    assert where in result.stderr


def test_json_for_machines(tmp_path):
    path = tmp_path / "llmgw.toml"
    path.write_text("workers = 0\n")
    told = json.loads(run(path, "--json").stdout)
    assert told["good"] is False
    assert any("workers" in fault for fault in told["faults"])


def test_certificates_are_looked_at(tmp_path):
    authority = Authority()
    authority.issue("gw.example").write(tmp_path, "good")
    authority.issue("gw.example", days=3).write(tmp_path, "soon")
    authority.issue("gw.example", days=-1).write(tmp_path, "late")
    path = tmp_path / "llmgw.toml"

    def checked(listen: str):
        path.write_text(f'listen = ["llmtls:tcp:8443:interface=127.0.0.1:{listen}"]\n{GOOD}')
        return run(path)

    good = checked("privateKey=good.key:certKey=good.crt")
    assert (good.exit_code, good.stderr) == (0, "")
    for name, told in [("soon", "expires on"), ("late", "expired on")]:
        result = checked(f"privateKey={name}.key:certKey={name}.crt")
        assert result.exit_code == 0
        assert f"warning: listen[0]: {tmp_path}/{name}.crt: {told}" in result.stderr
    mixed = checked("privateKey=good.key:certKey=soon.crt")
    assert mixed.exit_code == 1
    assert "listen[0]" in mixed.stderr
    assert "soon.crt: does not belong to the private key in" in mixed.stderr
    (tmp_path / "good.key").chmod(0o644)
    loose = checked("privateKey=good.key:certKey=good.crt")
    assert loose.exit_code == 1
    assert "is open to other users (mode 0644): chmod 600" in loose.stderr
