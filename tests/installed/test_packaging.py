"""What is shipped works where it is installed: in a fresh environment, from another directory.

Environments are new and hold only what the test installs; the libraries they
need are lent by the environment that runs the tests through a ``.pth`` line, so
nothing is downloaded. Builds run on a copy, since setuptools writes into the tree.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.installed

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "plugins" / "example"
PROJECT = ("llmgw", "twisted", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")

BROKEN = "import no_such_module_at_all\n"


def run(*command: str | Path, cwd: Path, expect: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Run without any of the tests' own environment that could make llmgw importable."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    clean["COLUMNS"] = "200"
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=clean, capture_output=True, text=True, timeout=300
    )
    if expect is not None:
        assert result.returncode == expect, f"{command}\n{result.stdout}\n{result.stderr}"
    return result


def copied(source: Path, target: Path, names: tuple[str, ...] | None = None) -> Path:
    """A copy without what earlier builds and runs left."""
    ignored = shutil.ignore_patterns("__pycache__", "dropin.cache", "*.egg-info", "build", "dist")
    target.mkdir(parents=True)
    for name in names or tuple(entry.name for entry in source.iterdir()):
        here = source / name
        if here.is_dir():
            shutil.copytree(here, target / name, ignore=ignored)
        elif here.exists():
            shutil.copy2(here, target / name)
    return target


def wheel_of(project: Path, to: Path) -> Path:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", to, project, cwd=to)
    (wheel,) = to.glob("*.whl")
    return wheel


class Environment:
    """A fresh virtual environment."""

    def __init__(self, directory: Path) -> None:
        self.elsewhere = directory / "elsewhere"
        self.elsewhere.mkdir(parents=True)
        run(sys.executable, "-m", "venv", "--without-pip", directory / "venv", cwd=directory)
        self.python = directory / "venv" / "bin" / "python"
        (site,) = (directory / "venv" / "lib").glob("python3.*/site-packages")
        self.site = site
        # Last in the alphabet, so that what the test installs comes first. A .pth
        # of a directory that a .pth names is not read: an editable llmgw of the
        # lender stays out of sight.
        lent = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
        (site / "zz_lent.pth").write_text("".join(f"{path}\n" for path in lent))

    def pip(self, *arguments: str | Path) -> None:
        install = (
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--no-build-isolation",
            "--force-reinstall",
        )
        run(sys.executable, "-m", "pip", "--python", self.python, *install, *arguments, cwd=self.elsewhere)

    def twistd(self, *arguments: str) -> str:
        """The script, which unlike ``python -m twisted`` does not add the working directory."""
        script = Path(sysconfig.get_path("scripts")) / "twistd"
        result = run(self.python, script, *arguments, cwd=self.elsewhere)
        assert "Traceback" not in result.stderr, result.stderr
        return result.stdout

    def llmgw(self, *arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
        return run(self.python.with_name("llmgw"), *arguments, cwd=self.elsewhere, expect=expect)

    def told(self) -> dict[tuple[str, str], dict[str, str]]:
        plugins = json.loads(self.llmgw("plugins", "--json").stdout)["plugins"]
        return {(plugin["kind"], plugin["name"]): plugin for plugin in plugins}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our wheel, built once."""
    project = copied(ROOT, tmp_path_factory.mktemp("llmgw") / "project", PROJECT)
    return wheel_of(project, tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path)


@pytest.fixture
def example(tmp_path: Path) -> Callable[[], Path]:
    """Copies the example package; ours to build in."""
    return lambda: copied(EXAMPLE, tmp_path / "example")


def test_the_wheel_holds_one_file_below_twisted(wheel: Path) -> None:
    """An ``__init__.py`` there would overwrite Twisted's own, and take it away when uninstalled."""
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.startswith("twisted/")] == ["twisted/plugins/llmgw_dropin.py"]
    assert "llmgw/py.typed" in names
    strange = [name for name in names if not name.startswith(("llmgw/", "llmgw-", "twisted/"))]
    assert strange == []


def test_the_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    """Packages without ``__init__`` and files of other kinds are the ones that get lost."""
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "llmgw").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert path.relative_to(ROOT).as_posix() in names


def test_the_wheel_serves_twistd_from_any_directory(wheel: Path, environment: Environment) -> None:
    environment.pip(wheel)
    assert "LLM inference gateway" in environment.twistd("--help")
    assert "--listen" in environment.twistd("llmgw", "--help")
    assert "uvloop" in environment.twistd("--help-reactors")


def test_an_editable_install_serves_twistd_from_any_directory(
    tmp_path: Path, environment: Environment
) -> None:
    """Guards the ``=.`` line of setup.cfg: a plain ``.pth``, not an import finder."""
    project = copied(ROOT, tmp_path / "project", PROJECT)
    environment.pip("--editable", project)
    (path,) = [p for p in environment.site.glob("*.pth") if "llmgw" in p.name]
    assert path.read_text().strip() == str(project)
    assert "LLM inference gateway" in environment.twistd("--help")
    assert "--listen" in environment.twistd("llmgw", "--help")
    assert environment.told()["router", "adaptive"]["distribution"] == "llmgw"


def test_a_third_partys_wheel_is_found(
    wheel: Path, environment: Environment, example: Callable[[], Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    theirs = wheel_of(example(), out)
    names = zipfile.ZipFile(theirs).namelist()
    assert [name for name in names if name.startswith("twisted/")] == ["twisted/plugins/llmgw_example.py"]
    environment.pip(wheel, theirs)
    told = environment.told()
    for key in (("router", "example-sticky"), ("health", "example-plain")):
        assert (told[key]["distribution"], told[key]["version"]) == ("llmgw-example", "0.1")
        assert told[key]["fault"] == ""
    ours = told["router", "adaptive"]
    assert ours["distribution"] == "llmgw"
    assert "example-sticky" in environment.llmgw("plugins").stdout


def test_a_third_partys_editable_install_is_found(
    wheel: Path, environment: Environment, example: Callable[[], Path]
) -> None:
    """The src layout is what makes it so."""
    environment.pip(wheel)
    environment.pip("--editable", example())
    assert environment.told()["router", "example-sticky"]["distribution"] == "llmgw-example"


def test_the_examples_own_tests_pass_on_the_wheel(
    wheel: Path, environment: Environment, example: Callable[[], Path]
) -> None:
    project = example()
    environment.pip(wheel, project)
    result = run(
        environment.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", project / "tests", cwd=project
    )
    assert " passed" in result.stdout


def test_a_broken_dropin_is_told_and_harms_nobody(wheel: Path, environment: Environment) -> None:
    environment.pip(wheel)
    dropin = environment.site / "twisted" / "plugins" / "llmgw_broken.py"
    dropin.write_text(BROKEN)
    result = environment.llmgw("plugins", expect=1)
    assert f"{dropin} cannot be imported: ModuleNotFoundError" in result.stdout
    assert "adaptive" in result.stdout
    assert result.stderr == ""


def test_a_read_only_installation_works(wheel: Path, environment: Environment) -> None:
    """No ``dropin.cache`` can be written there; everything is found all the same."""
    environment.pip(wheel)
    directory = environment.site / "twisted" / "plugins"
    # A directory in the cache's place stops even root from writing it.
    (directory / "dropin.cache").mkdir()
    assert ("router", "adaptive") in environment.told()
    assert not (directory / "dropin.cache").is_file()


def test_the_command_is_installed(wheel: Path, environment: Environment) -> None:
    environment.pip(wheel)
    assert environment.llmgw("--version").stdout.startswith("llmgw, version ")
    assert "plugins" in environment.llmgw("--help").stdout
