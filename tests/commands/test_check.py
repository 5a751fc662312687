"""``llmgw check``: the exit status and the words an operator gets."""

import gzip
import http.server
import json
import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from authority import Authority
from click.testing import CliRunner
from harness import Scripted, backend_table, free_port, json_response
from msgspec.structs import replace

from llmgw.access import key_file
from llmgw.commands import asked, sources, surroundings
from llmgw.commands.check import check
from llmgw.config import BackendConfig, load_config

GOOD = '[[backends]]\nid = "a"\nurl = "http://127.0.0.1:1"\n'


def run(path: Path, *arguments: str):
    return CliRunner().invoke(check, [str(path), *arguments])


def test_a_good_file_says_so(tmp_path):
    path = tmp_path / "llmgw.toml"
    path.write_text(GOOD)
    result = run(path, "--offline")
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("llmgw.toml: good\n")
    assert result.stderr == ""


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
        return run(path, "--offline")

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


# --- what the file names ------------------------------------------------------

LLAMA = {
    "/v1/models": {"data": [{"id": "m"}]},
    "/props": {"total_slots": 2, "default_generation_settings": {"n_ctx": 4096}},
}


@pytest.fixture
def server():
    """A backend that tells of one model, two slots and 4096 tokens."""
    backend = Scripted(probes={path: json_response(body) for path, body in LLAMA.items()})
    yield backend
    backend.close()


def findings(path: Path, *arguments: str) -> dict[str, tuple[str, str]]:
    """What is found and how it is mended, by its place."""
    result = run(path, "--json", *arguments)
    told = json.loads(result.stdout)
    assert told["good"], told
    assert all(each["what"] and each["cure"] for each in told["findings"])
    return {each["where"]: (each["what"], each["cure"]) for each in told["findings"]}


def write(folder: Path, text: str) -> Path:
    path = folder / "llmgw.toml"
    path.write_text(text)
    return path


def test_a_fleet_that_is_as_the_file_says_has_no_findings(tmp_path, server):
    more = 'models = ["m"]\nmax_connections = 2\ncontext_length = 4096'
    path = write(tmp_path, backend_table(server, "a", more) + '[[models]]\nname = "x"\ntarget = "m"\n')
    result = run(path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{path}: good\n"


def test_a_cap_a_window_and_a_model_that_the_server_does_not_have(tmp_path, server):
    more = 'models = ["m", "n"]\nmax_connections = 8\ncontext_length = 32768'
    found = findings(write(tmp_path, backend_table(server, "a", more)))
    assert set(found) == {"backends[0].max_connections", "backends[0].context_length", "backends[0].models"}
    what, cure = found["backends[0].max_connections"]
    assert "8 is above the 2 slots of a" in what
    assert "--parallel 8" in cure
    assert "does not serve 'n', but 'm'" in found["backends[0].models"][0]


def test_a_model_that_is_nowhere(tmp_path, server):
    aliases = '[[models]]\nname = "gpt-4o"\ntarget = "llama"\n[[models]]\nname = "good"\ntarget = "m"\n'
    found = findings(write(tmp_path, backend_table(server, "a", "") + aliases))
    assert found == {
        "models[0].target": (
            "no backend serves 'llama', the target of 'gpt-4o'",
            "There are: 'm'",
        )
    }


def test_a_model_may_be_where_nobody_could_be_asked(tmp_path, server):
    text = (
        backend_table(server, "a", "") + f'[[backends]]\nid = "b"\nurl = "http://127.0.0.1:{free_port()}"\n'
    )
    found = findings(write(tmp_path, text + '[[models]]\nname = "x"\ntarget = "y"\n'))
    assert set(found) == {"backends[1].url"}


def test_who_cannot_be_reached_and_why(tmp_path):
    silent, plain = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))

    def answer_in_the_clear():
        while True:
            try:
                connection, _ = plain.accept()
            except OSError:
                return
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

    threading.Thread(target=answer_in_the_clear, daemon=True).start()
    urls = [
        f"http://127.0.0.1:{free_port()}",
        "http://no-such-host.invalid:8080",
        f"https://127.0.0.1:{plain.getsockname()[1]}",
        f"http://127.0.0.1:{silent.getsockname()[1]}",
    ]
    text = "".join(f'[[backends]]\nid = "b{index}"\nurl = "{url}"\n' for index, url in enumerate(urls))
    path = write(tmp_path, text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asked, "WITHIN_S", 0.5)
        found = findings(path)
        assert run(path, "--strict").exit_code == 1
    silent.close()
    plain.shutdown(socket.SHUT_RDWR)
    plain.close()
    whats = [found[f"backends[{index}].url"][0] for index in range(4)]
    for what, words in zip(
        whats, ("nobody listens", "the name is not known", "no TLS there", "no answer"), strict=True
    ):
        assert words in what


def test_a_backend_that_wants_a_key_and_one_that_is_no_model_server(tmp_path):
    closed = Scripted(probes={"/v1/models": json_response({}, 401), "/props": json_response({}, 401)})
    other = Scripted(probes={"/health": json_response({}, 404)})
    loading = Scripted(probes={"/health": json_response({"error": {"message": "Loading model"}}, 503)})
    text = "".join(
        backend_table(each, f"b{index}", "") for index, each in enumerate((closed, other, loading))
    )
    found = findings(write(tmp_path, text))
    for each in (closed, other, loading):
        each.close()
    assert "refuses us (401 from /v1/models)" in found["backends[0].api_key_file"][0]
    assert "Is it a model server?" in found["backends[1].url"][1]
    assert "is loading" in found["backends[2]"][0]


def test_a_key_is_sent_as_the_gateway_sends_it(tmp_path, server):
    (tmp_path / "key").write_text("s3cret")
    (tmp_path / "key").chmod(0o600)
    assert findings(write(tmp_path, backend_table(server, "a", 'api_key_file = "key"'))) == {}
    assert {each.get("authorization") for each in server.probed} == {"Bearer s3cret"}


def test_a_backends_certificate_that_runs_out_or_is_not_trusted(tmp_path):
    authority = Authority()
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    authority.issue("localhost", days=3).write(tmp_path, "soon")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "soon.crt", tmp_path / "soon.key")
    backend = Scripted(probes={"/v1/models": json_response(LLAMA["/v1/models"])}, tls=tls)
    table = backend_table(backend, "a", "")
    trusted = findings(write(tmp_path, f"{table}[backends.tls]\nca_file = 'ca.pem'\n"))
    untrusted = findings(write(tmp_path, table))
    backend.close()
    assert "the certificate of a runs out on" in trusted["backends[0].url"][0]
    assert "its certificate is not trusted" in untrusted["backends[0].url"][0]
    assert "ca_file" in untrusted["backends[0].url"][1]


def test_key_files_open_to_all_empty_and_about_to_end(tmp_path, server):
    keys = tmp_path / "keys.toml"
    text = f"auth = ['keys:keys.toml']\n{backend_table(server, 'a', '')}"
    keys.write_text("")
    keys.chmod(0o644)
    told = json.loads(run(write(tmp_path, text), "--json").stdout)
    assert not told["good"]
    assert "chmod 600" in told["faults"][0]
    keys.chmod(0o600)
    assert "llmgw keys new" in findings(write(tmp_path, text))["auth[0]"][1]
    ends = datetime.now(UTC) + timedelta(days=2)
    held = key_file.Key(id="k1", name="ada", hash=f"sha256:{'0' * 64}", expires=ends.replace(microsecond=0))
    keys.write_text(key_file.dump(key_file.KeyFile({"k1": held})))
    assert "the key k1 of ada ends on" in findings(write(tmp_path, text))["auth[0]"][0]
    scoped = key_file.Key(id="k2", name="bob", hash=f"sha256:{'1' * 64}", models=("m", "gone"))
    keys.write_text(key_file.dump(key_file.KeyFile({"k2": scoped})))
    assert "may use 'gone', which nobody serves" in findings(write(tmp_path, text))["auth[0]"][0]


def test_a_store_that_is_not_there(tmp_path, server):
    text = f'[store]\nurl = "redis://127.0.0.1:{free_port()}/0"\n{backend_table(server, "a", "")}'
    assert "cannot be reached" in findings(write(tmp_path, text))["store.url"][0]


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ('listen = ["proxied:tcp:8000:networks=10.0.0.0/8"]', True),
        ('listen = ["haproxy:tcp:8443"]', True),
        ('listen = ["tcp:8000"]', False),
        ('listen = ["proxied:tcp:8000"]\nworkers = 2', False),
        ('listen = ["proxied:tcp:8000"]\n[store]\nurl = "unix:///run/x.sock"', False),
        ('listen = ["proxied:tcp:8000"]\n[[discovery]]\nplugin = "etcd"\nendpoints = ["http://e:1"]', False),
    ],
)
def test_gateways_that_load_and_share_nothing(tmp_path, more, found):
    """Asked of the judgement alone: most of these would want files, or servers."""
    config = load_config(write(tmp_path, f'auth = ["anonymous"]\n{more}\n'))
    for told, by_name in ((asked.Told(router=True), True), (asked.Told(), False)):
        backend = BackendConfig(id="a", url="http://127.0.0.1:1")
        findings = list(surroundings._alone(replace(config, backends=(backend,)), {"a": told}))
        assert [each.where for each in findings] == (["listen[0]"] if found and by_name else [])


def test_offline_asks_nobody(tmp_path, server):
    assert findings(write(tmp_path, backend_table(server, "a", "max_connections = 9")), "--offline") == {}
    assert server.accepted == 0


def test_words_for_people_name_the_place_and_the_cure(tmp_path, server):
    path = write(tmp_path, backend_table(server, "a", "max_connections = 9"))
    result = run(path)
    assert result.stdout == f"{path}: good, with 1 finding\n"
    assert result.stderr.startswith(f"{path}: backends[0].max_connections: 9 is above the 2 slots of a: ")
    assert result.stderr.endswith("--parallel 9.\n")
    assert result.exit_code == 0


def test_workers_are_judged_as_they_would_start(tmp_path: Path) -> None:
    """They bring a store along, so a limiter that wants one has it."""
    path = tmp_path / "gw.toml"
    path.write_text(
        'workers = 2\n[rate_limiter]\nplugin = "redis"\n[[backends]]\nid = "b"\nurl = "http://127.0.0.1:1"\n'
    )
    good = CliRunner().invoke(check, [str(path), "--offline"])
    assert good.exit_code == 0, good.output
    path.write_text(path.read_text().replace("workers = 2", "workers = 1"))
    alone = CliRunner().invoke(check, [str(path), "--offline"])
    assert alone.exit_code == 1
    assert "rate_limiter.url" in alone.output


# --- a server of another kind ---------------------------------------------------

KINDS = {
    "llama-server": LLAMA,
    "router": {"/props": {"role": "router"}, "/models": {"data": []}},
    "openai": {"/v1/models": {"data": [{"id": "m"}]}},
    "ollama": {"/v1/models": {"data": [{"id": "m"}]}, "/api/tags": {"models": []}, "/api/ps": {"models": []}},
}


@pytest.mark.parametrize("setting", ["auto", *KINDS])
@pytest.mark.parametrize("what", KINDS)
def test_a_server_that_is_not_what_its_table_says(tmp_path, what, setting, monkeypatch):
    monkeypatch.setattr("harness.PROBES", tuple({path for paths in KINDS.values() for path in paths}))
    backend = Scripted(probes={path: json_response(body) for path, body in KINDS[what].items()})
    key = 'loader = "llamacpp-router"' if setting == "router" else f'kind = "{setting}"'
    found = findings(write(tmp_path, backend_table(backend, "a", key)))
    backend.close()
    good = setting in ("auto", what) or (what, setting) == ("router", "llama-server")
    assert set(found) == (set() if good else {f"backends[0].{key.split()[0]}"})


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ('kind = "ollama"', 'a llama-server, not "ollama": nothing is loaded there by name'),
        (
            'loader = "llamacpp-router"',
            'a llama-server that is not in router mode, not "llamacpp-router": '
            "nothing is loaded there by name",
        ),
        (
            'kind = "openai"',
            'a llama-server, not "openai": a call that is not streamed keeps its slot when its client leaves',
        ),
    ],
)
def test_what_another_kind_of_server_costs_is_told(tmp_path, server, key, told):
    found = findings(write(tmp_path, backend_table(server, "a", key)))
    assert found == {
        f"backends[0].{key.split()[0]}": (f"a seems to be {told}", "Take the key out, or correct the url")
    }


# --- files and sockets ----------------------------------------------------------


def test_a_place_that_cannot_be_written_to_is_a_fault(tmp_path):
    path = write(tmp_path, '[log]\naccess = "logs/access.log"\n' + GOOD)
    result = run(path, "--offline")
    assert result.exit_code == 1
    assert result.stderr == f"{path}: log.access: there is no folder {tmp_path}/logs\n"


def test_a_store_at_a_socket_that_nobody_listens_on(tmp_path, server):
    text = f'[store]\nurl = "unix://{tmp_path}/redis.sock"\n'
    found = findings(write(tmp_path, text + backend_table(server)))
    assert (
        found["store.url"][0]
        == f"the store at {tmp_path}/redis.sock cannot be reached: No such file or directory"
    )
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "redis.sock"))
        listening.listen()
        assert findings(write(tmp_path, text + backend_table(server))) == {}


def test_the_file_of_a_model_that_a_command_serves(tmp_path, server):
    (tmp_path / "there.gguf").touch()
    more = (
        '[backends.loader]\nplugin = "command"\ncommand = ["true", "{path}"]\n'
        f'models = {{ a = "{tmp_path}/there.gguf", b = "{tmp_path}/gone.gguf", c = "org/repository" }}\n'
    )
    found = findings(write(tmp_path, backend_table(server, "x", more)))
    assert list(found) == ["backends[0].loader.models"]
    assert found["backends[0].loader.models"][0].startswith(f"{tmp_path}/gone.gguf, the file of 'b'")


def test_wrong_keys_hide_no_wrong_plugins(tmp_path):
    """And a wrong entry leaves those behind it their places."""
    text = '[router]\nplugin = "none"\n[[health]]\nplugin = 5\n[[health]]\nplugin = "none"\ntypo = 1\n' + GOOD
    result = run(write(tmp_path, "bogus = 1\n" + text), "--offline", "--json")
    told = json.loads(result.output)["faults"]
    assert result.exit_code == 1
    assert [each.partition(": ")[0] for each in told] == [
        "bogus",
        "health[0].plugin",
        "router.plugin",
        "health[1].plugin",
    ]


# --- what discoveries name ------------------------------------------------------


def discovering(folder: Path, options: str) -> Path:
    return write(folder, f"[[discovery]]\n{options}\n")


def test_what_a_discovery_names_is_told_and_asked(tmp_path, server):
    (tmp_path / "fleet.toml").write_text(
        backend_table(server, "a", "max_connections = 9")
        + f'[[backends]]\nid = "b"\nurl = "http://127.0.0.1:{free_port()}"\n'
        + '[[backends]]\nid = "c"\nurl = "http://8.8.8.8:80"\n'
    )
    path = discovering(tmp_path, 'plugin = "static"\nfile = "fleet.toml"\nstate_file = "kept.json"')
    result = run(path)
    assert result.stdout == (
        f"{path}: discovery[0] (static) names 2 backends: 'a', 'b'\n{path}: good, with 3 findings\n"
    )
    found = findings(path)
    assert "9 is above the 2 slots of a" in found["discovery[0].a.max_connections"][0]
    assert "nobody listens" in found["discovery[0].b.url"][0]
    assert found["discovery[0]"][0].startswith("c is not served: url: 8.8.8.8 is not in `allow`")
    assert json.loads(run(path, "--json").stdout)["discovered"] == {"discovery[0]": ["a", "b"]}
    assert not (tmp_path / "kept.json").exists()
    assert findings(path, "--offline") == {}


def test_a_discovery_that_cannot_be_reached_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "WITHIN_S", 0.5)
    options = f'plugin = "etcd"\nendpoints = ["http://127.0.0.1:{free_port()}"]'
    what, cure = findings(discovering(tmp_path, options))["discovery[0]"]
    assert what.startswith("etcd has told nothing within 0.5 s: ")
    assert "refused" in what
    assert "state_file" in cure
    result = run(tmp_path / "llmgw.toml", "--strict")
    assert (result.exit_code, result.stdout.count("names")) == (1, 0)


def test_a_discovery_that_names_nobody_and_an_id_that_is_taken(tmp_path, server):
    (tmp_path / "fleet.toml").write_text("backends = []\n")
    path = discovering(tmp_path, 'plugin = "static"\nfile = "fleet.toml"')
    assert findings(path)["discovery[0]"][0] == "static names no backend"
    (tmp_path / "fleet.toml").write_text(backend_table(server, "a", ""))
    path.write_text(path.read_text() + backend_table(server, "a", ""))
    what, _ = findings(path)["discovery[0]"]
    assert what == "a is not served: id: is already that of a backend from config"


def test_a_backend_behind_a_proxy_that_compresses(tmp_path):
    probes = {path: json_response(gzip.compress(json.dumps(body).encode())) for path, body in LLAMA.items()}
    backend = Scripted(probes=probes)
    what, cure = findings(write(tmp_path, backend_table(backend, "a", "")))["backends[0].url"]
    backend.close()
    assert what.startswith("a compresses its answers, though none is asked for")
    assert "gzip off" in cure


def test_localhost_is_both_loopback_addresses_as_it_is_for_the_gateway(tmp_path):
    class Six(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps(LLAMA.get(self.path, {})).encode()
            self.send_response(200 if self.path in (*LLAMA, "/health") else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    class Server(http.server.ThreadingHTTPServer):
        address_family = socket.AF_INET6

    with Server(("::1", 0), Six) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        table = (
            f'[[backends]]\nid = "a"\nurl = "http://localhost:{server.server_port}"\nmax_connections = 9\n'
        )
        found = findings(write(tmp_path, table))
        server.shutdown()
    assert set(found) == {"backends[0].max_connections"}
