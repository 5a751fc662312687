"""Finding, verifying and building plugins; each test has plugin directories of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner
from twisted.cred.checkers import AllowAnonymousAccess
from twisted.cred.strcred import ICheckerFactory

import twisted.plugins
from llmgw import builtins, plugins
from llmgw.commands.main import main
from llmgw.errors import ConfigError, PluginError
from llmgw.interfaces import IFactory

ROUTER = """
    from zope.interface import implementer
    from llmgw.errors import ConfigError, ConfigFault
    from llmgw.interfaces import CONTRACT, IRouter, IRouterFactory

    @implementer(IRouter)
    class First:
        def choose(self, request, candidates, now_s):
            return candidates[0]
        def observe(self, event):
            pass

    @implementer(IRouterFactory)
    class Factory:
        contract = CONTRACT
        description = "takes the first"
        def __init__(self, name):
            self.name = name
        def build(self, options):
            if "bad" in options:
                raise ConfigError([ConfigFault("bad", "is bad"), ConfigFault("[1]", "too")])
            if "raises" in options:
                1 / 0
            return object() if "unfit" in options else First()
"""

Put = Callable[..., Path]


@pytest.fixture
def put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected_failures: Callable[..., object]
) -> Iterator[Put]:
    """Write a dropin into a plugin directory that is the only one for the while."""
    directory = tmp_path / "twisted" / "plugins"
    directory.mkdir(parents=True)
    monkeypatch.setattr(twisted.plugins, "__path__", [str(directory)])
    before = set(sys.modules)
    plugins.forget()

    def write(module: str, *sources: str) -> Path:
        path = directory / f"{module}.py"
        path.write_text("\n".join(textwrap.dedent(source) for source in sources))
        plugins.forget()
        return path

    yield write
    plugins.forget()
    for name in set(sys.modules) - before:
        if name.startswith("twisted.plugins."):
            del sys.modules[name]
    expected_failures()  # Twisted logs each broken dropin


def test_a_plugin_is_found_and_built(put: Put) -> None:
    put("llmgw_t_one", ROUTER, "first = Factory('first')\nsecond = Factory('a-second')")
    assert list(plugins.installed("router")) == ["a-second", "first"]
    assert plugins.installed("health") == {}
    router = plugins.build("router", "first", {"plugin": "first"}, where="router")
    assert router.choose(None, ["x"], 0.0) == "x"


def test_options_are_handed_over_without_the_key_plugin(put: Put) -> None:
    source = "Factory.build = lambda self, options: (seen.append(options), First())[1]\nseen = []"
    put("llmgw_t_seen", ROUTER, source, "first = Factory('first')")
    options = {"plugin": "first", "vnodes": 3}
    plugins.build("router", "first", options)
    assert sys.modules["twisted.plugins.llmgw_t_seen"].seen == [{"vnodes": 3}]
    assert options == {"plugin": "first", "vnodes": 3}


def test_an_unknown_kind_is_an_error(put: Put) -> None:
    with pytest.raises(PluginError, match="no such kind of plugin: 'rooter'; kinds are router, health"):
        plugins.installed("rooter")
    with pytest.raises(PluginError, match="no such kind"):
        plugins.find("rooter", "x")


def test_an_unknown_name_gets_a_list_and_a_guess(put: Put) -> None:
    put("llmgw_t_one", ROUTER, "a = Factory('least-loaded')\nb = Factory('sticky')")
    with pytest.raises(PluginError) as caught:
        plugins.build("router", "least-loadd", {}, where="router")
    assert str(caught.value) == (
        "router.plugin: no router named 'least-loadd' is installed; did you mean 'least-loaded'?;"
        " installed: least-loaded, sticky"
    )


def test_the_first_plugin_of_all_may_be_missing(put: Put) -> None:
    with pytest.raises(PluginError, match=r"^no router named 'x' is installed; installed: none$"):
        plugins.find("router", "x")


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import no_such_module_at_all", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def broken(:", "SyntaxError: "),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
    ],
)
def test_a_broken_dropin_is_quoted_when_a_name_is_missing(put: Put, source: str, cause: str) -> None:
    put("llmgw_t_good", ROUTER, "good = Factory('good')")
    path = put("llmgw_t_broken", source)
    assert list(plugins.installed("router")) == ["good"]
    with pytest.raises(PluginError) as caught:
        plugins.find("router", "sticky")
    assert f"broken dropin {path}: {cause}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [(dropin.file, dropin.cause.startswith(cause)) for dropin in plugins.broken()] == [
        (str(path), True)
    ]


def test_a_fault_deep_below_a_dropin_names_both_files(
    put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / "llmgw_t_deep_module.py"
    deep.write_text("\n\nraise OSError('deep')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = put("llmgw_t_shallow", "import llmgw_t_deep_module")
    (dropin,) = plugins.broken()
    assert dropin.file == str(path)
    assert dropin.cause == f"OSError: deep ({deep}:3)"


def test_a_name_that_two_have_is_an_error_that_tells_both(put: Put) -> None:
    put("llmgw_t_one", ROUTER, "a = Factory('same')\nc = Factory('other')")
    put("llmgw_t_two", ROUTER, "b = Factory('same')")
    assert list(plugins.installed("router")) == ["other"]
    with pytest.raises(PluginError) as caught:
        plugins.find("router", "same")
    assert "installed twice" in str(caught.value)
    assert "twisted.plugins.llmgw_t_one" in str(caught.value)
    assert "twisted.plugins.llmgw_t_two" in str(caught.value)
    assert [info.fault != "" for info in plugins.describe() if info.name == "same"] == [True, True]


def test_one_name_in_two_kinds_is_no_clash(put: Put) -> None:
    health = """
    from llmgw.interfaces import IHealthSourceFactory
    @implementer(IHealthSourceFactory)
    class Health(Factory):
        def build(self, options, reactor):
            return None
    """
    put("llmgw_t_one", ROUTER, health, "a = Factory('same')\nb = Health('same')")
    # Health inherits IRouterFactory too, so b is a router as well, with a build that does not fit.
    assert [(info.kind, bool(info.fault)) for info in plugins.describe()] == [
        ("router", True),
        ("router", True),
        ("health", False),
    ]


def test_an_object_offered_twice_is_no_clash(put: Put) -> None:
    put("llmgw_t_one", ROUTER, "a = Factory('one')\nb = a")
    put("llmgw_t_two", "from twisted.plugins.llmgw_t_one import a")
    assert list(plugins.installed("router")) == ["one"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ("a.contract = 99", "written for contract 99, this llmgw speaks contract 1"),
        ("a.name = 'Not_Good'", "its name 'Not_Good' is not lower case with hyphens"),
        ("del Factory.description", "description"),
        ("Factory.build = lambda self: None", "build"),
        ("Factory.description = property(lambda self: 1 / 0)", "ZeroDivisionError: division by zero"),
    ],
)
def test_an_unfit_factory_is_left_out_and_explained(put: Put, change: str, fault: str) -> None:
    put("llmgw_t_unfit", ROUTER, "a = Factory('a')", change)
    assert plugins.installed("router") == {}
    (info,) = plugins.describe()
    assert fault in info.fault
    assert "\n" not in info.fault
    with pytest.raises(PluginError) as caught:
        plugins.find("router", info.name)
    assert fault in str(caught.value)
    assert "twisted.plugins.llmgw_t_unfit" in str(caught.value)
    with pytest.raises(PluginError) as caught:
        plugins.find("router", "quite-another")
    assert fault in str(caught.value)


def test_a_factory_of_no_kind_is_told(put: Put) -> None:
    source = """
    from llmgw.interfaces import IFactory
    @implementer(IFactory)
    class Vague:
        name = "vague"
    vague = Vague()
    """
    put("llmgw_t_vague", ROUTER, source)
    (info,) = plugins.describe()
    assert (info.kind, info.name, info.fault) == ("?", "vague", "it provides IFactory but no kind of factory")


def test_refused_options_are_told_with_the_path_of_the_table(put: Put) -> None:
    put("llmgw_t_one", ROUTER, "a = Factory('a')")
    with pytest.raises(ConfigError) as caught:
        plugins.build("router", "a", {"bad": 1}, where="health[1]")
    assert [fault.where for fault in caught.value.faults] == ["health[1].bad", "health[1][1]"]
    with pytest.raises(ConfigError) as caught:
        plugins.build("router", "a", {"bad": 1})
    assert [fault.where for fault in caught.value.faults] == ["bad", "[1]"]


def test_a_build_that_fails_is_told_as_the_plugins_fault(put: Put) -> None:
    put("llmgw_t_one", ROUTER, "a = Factory('a')")
    with pytest.raises(PluginError) as caught:
        plugins.build("router", "a", {"raises": 1}, where="router")
    assert str(caught.value) == "router: router 'a' failed to build: ZeroDivisionError: division by zero"
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_what_was_built_is_verified(put: Put) -> None:
    put("llmgw_t_one", ROUTER, "a = Factory('a')")
    with pytest.raises(PluginError, match=r"^router: router 'a' built something unfit: .*IRouter"):
        plugins.build("router", "a", {"unfit": 1}, where="router")


@pytest.mark.parametrize(
    ("definition", "words"),
    [
        ("async def choose(self, request, candidates, now_s): pass", "`choose` is written with `async def`"),
        ("def observe(self, event): yield", "`observe` is a generator"),
        ("async def adapt(self, *, slot_choice, may_wait): yield", "`adapt` is a generator"),
    ],
)
def test_a_method_that_does_nothing_when_it_is_called_is_refused(
    put: Put, definition: str, words: str
) -> None:
    source = f"""
    class Lazy(First):
        {definition}
    Factory.build = lambda self, options: Lazy()
    """
    put("llmgw_t_one", ROUTER, source, "a = Factory('a')")
    with pytest.raises(PluginError, match=f"^router 'a' built something unfit: {words}"):
        plugins.build("router", "a", {})


def test_an_optional_interface_is_verified_where_claimed(put: Put) -> None:
    source = """
    from llmgw.interfaces import IOrderingRouter
    @implementer(IOrderingRouter)
    class Ordering(First):
        pass
    Factory.build = lambda self, options: Ordering()
    """
    put("llmgw_t_one", ROUTER, source, "a = Factory('a')")
    with pytest.raises(PluginError, match="IOrderingRouter"):
        plugins.build("router", "a", {})


def test_credentials_are_built_from_a_string() -> None:
    checker = plugins.build("credentials", "anonymous", "", where="auth[0]")
    assert isinstance(checker, AllowAnonymousAccess)
    with pytest.raises(ConfigError, match=r"^auth\[0\]: memory: "):
        plugins.build("credentials", "memory", "no-password", where="auth[0]")
    with pytest.raises(PluginError, match=r"^auth\[0\]: no credentials named 'nobody' is installed; "):
        plugins.build("credentials", "nobody", "", where="auth[0]")


def test_describe_names_the_distribution() -> None:
    (memory,) = [info for info in plugins.describe() if (info.kind, info.name) == ("credentials", "memory")]
    assert memory.distribution == "Twisted"
    assert memory.version
    assert memory.description


def test_a_file_that_two_distributions_claim_is_a_fault(
    put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("llmgw_t_shared", ROUTER, "a = Factory('a')")
    for name in ("one", "two"):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "RECORD").write_text("twisted/plugins/llmgw_t_shared.py,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (info_,) = plugins.describe()
    assert "several distributions" in info_.fault


def test_an_editable_distribution_is_known_by_its_directory(
    put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("llmgw_t_editable", ROUTER, "a = Factory('a')")
    info = tmp_path / "site" / "mine-2.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 2.5\n")
    (info / "RECORD").write_text("__editable__.mine-2.5.pth,,\n")
    (info / "direct_url.json").write_text(
        json.dumps({"url": tmp_path.as_uri(), "dir_info": {"editable": True}})
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (found,) = plugins.describe()
    assert (found.distribution, found.version) == ("mine", "2.5")


def test_a_look_is_kept_until_it_is_forgotten(put: Put) -> None:
    path = put("llmgw_t_one", ROUTER, "a = Factory('a')")
    assert "a" in plugins.installed("router")
    path.unlink()
    assert "a" in plugins.installed("router")
    plugins.forget()
    assert plugins.installed("router") == {}


# --- the command --------------------------------------------------------------


def test_the_command_lists_by_kind(put: Put) -> None:
    put("llmgw_t_one", ROUTER, "a = Factory('a-router')")
    result = CliRunner().invoke(main, ["plugins"])
    assert result.exit_code == 0, result.output
    assert "a-router" in result.output
    assert "takes the first" in result.output
    assert "health: none installed" in result.output


def test_the_command_explains_what_is_broken_and_exits_1(put: Put) -> None:
    put("llmgw_t_one", ROUTER, "a = Factory('same')")
    put("llmgw_t_two", ROUTER, "a = Factory('same')")
    path = put("llmgw_t_broken", "import no_such_module_at_all")
    result = CliRunner().invoke(main, ["plugins"])
    assert result.exit_code == 1
    assert f"{path} cannot be imported: ModuleNotFoundError" in result.output
    assert "router same cannot be used: installed twice" in result.output


def test_the_command_speaks_json(put: Put) -> None:
    put("llmgw_t_one", ROUTER, "a = Factory('a-router')")
    path = put("llmgw_t_broken", "import no_such_module_at_all")
    result = CliRunner().invoke(main, ["plugins", "--json"])
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    (plugin,) = told["plugins"]
    assert plugin["kind"] == "router"
    assert plugin["name"] == "a-router"
    assert plugin["module"] == "twisted.plugins.llmgw_t_one"
    assert told["broken"][0]["file"] == str(path)


def test_help_imports_no_command() -> None:
    source = "import sys; from llmgw.commands.main import main; main(['--help'], standalone_mode=False); "
    source += "print([m for m in sys.modules if m.startswith(('llmgw.commands.', 'twisted'))])"
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert re.search(r"plugins +List installed plugins", result.stdout)
    assert result.stdout.splitlines()[-1] == "['llmgw.commands.main']"


def test_a_missing_extra_breaks_one_command_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llmgw.commands.demo", None)
    assert CliRunner().invoke(main, ["--version"]).exit_code == 0
    assert CliRunner().invoke(main, ["--help"]).exit_code == 0
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == 1
    assert "llmgw demo" in result.output
    assert "Traceback" not in result.output


def test_an_unknown_command_is_a_usage_error() -> None:
    assert CliRunner().invoke(main, ["no-such-command"]).exit_code == 2


# --- our own dropin -----------------------------------------------------------


def test_our_dropin_is_cheap_and_installs_no_reactor() -> None:
    source = (
        "import sys, twisted.plugins.llmgw_dropin; "
        "print([m for m in ('twisted.internet.reactor', 'twisted.web', 'treq', 'uvloop', 'txredisapi',"
        " 'prometheus_client', 'OpenSSL', 'rich') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_our_dropin_names_every_builtin() -> None:
    dropin = vars(import_module("twisted.plugins.llmgw_dropin")).values()
    for name, value in vars(builtins).items():
        if IFactory.providedBy(value) or ICheckerFactory.providedBy(value):
            assert any(value is each for each in dropin), f"llmgw.builtins.{name} is not in the dropin"


def test_our_own_plugins_are_fit() -> None:
    plugins.forget()
    ours = [info for info in plugins.describe() if info.module == "twisted.plugins.llmgw_dropin"]
    assert ours
    assert [info for info in ours if info.fault] == []
    assert [dropin for dropin in plugins.broken() if "llmgw_dropin" in dropin.file] == []


def test_the_uvloop_reactor_runs() -> None:
    pytest.importorskip("uvloop")
    source = (
        "from twisted.application.reactors import installReactor\n"
        "reactor = installReactor('uvloop')\n"
        "import uvloop\n"
        "print(type(reactor).__name__, isinstance(reactor._asyncioEventloop, uvloop.Loop))\n"
        "reactor.callLater(0.01, reactor.stop)\n"
        "reactor.run()\n"
        "print('ran')\n"
    )
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["AsyncioSelectorReactor True", "ran"]


def test_without_uvloop_twistd_says_what_to_install(tmp_path: Path) -> None:
    source = (
        "import sys; sys.modules['uvloop'] = None\n"
        "sys.argv = ['twistd', '--reactor=uvloop', '-n', 'llmgw']\n"
        "from twisted.scripts.twistd import run; run()\n"
    )
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert result.returncode == 1
    assert "pip install 'llmgw[fast]'" in result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr
