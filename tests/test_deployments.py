"""What `etc/` offers for systemd, containers and Kubernetes is what those programs take, and what we do."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from test_example_config import AnyFile

from llmgw.admin.metrics import Metrics
from llmgw.commands.register import register
from llmgw.config import Config, parse_config
from llmgw.core.breaker import BreakerRules
from llmgw.core.fleet import BackendSpec, Fleet

ETC = Path(__file__).resolve().parents[1] / "etc"
MANIFESTS = ["llmgw.yaml", "llama-server.yaml"]


def manifest(name: str, kind: str) -> Any:
    (found,) = (one for one in documents(name) if one["kind"] == kind)
    return found


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((ETC / "kubernetes" / name).read_text(encoding="utf-8")))


def config_of(text: str) -> Config:
    return parse_config(text, source="example", base_dir="/etc/llmgw", files=AnyFile())


@pytest.mark.parametrize("path", sorted((ETC / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_an_example_is_good_and_warns_of_nothing(path: Path) -> None:
    config = config_of(path.read_text(encoding="utf-8"))
    assert config.auth
    assert config.backends or config.discovery


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    for name in ("llmgw.service", "llmgw.socket"):
        # It looks for the programs, which here are somewhere else.
        text = (ETC / "systemd" / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(re.sub(r"/opt/llmgw/bin/\w+", "/bin/true", text))
    told = subprocess.run(
        ["systemd-analyze", "verify", *tmp_path.iterdir()], capture_output=True, text=True, check=False
    )
    assert (told.returncode, told.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_unit_of_a_registration(tmp_path: Path) -> None:
    text = (ETC / "systemd" / "llmgw-register@.service").read_text(encoding="utf-8")
    unit = tmp_path / "llmgw-register@gpu-0.service"
    unit.write_text(text.replace("/opt/llmgw/bin/llmgw", "/bin/true"))
    server = tmp_path / "llama-server@gpu-0.service"
    server.write_text("[Service]\nExecStart=/bin/true\n")
    told = subprocess.run(
        ["systemd-analyze", "verify", unit, server], capture_output=True, text=True, check=False
    )
    assert (told.returncode, told.stderr) == (0, "")
    # Each option that the unit gives is one of the command's.
    command = re.search(r"ExecStart=\S+ register (.*) \$OPTIONS", text)
    assert command is not None
    known = {name for each in register.params for name in each.opts}
    assert set(re.findall(r"--[a-z-]+", command[1])) <= known


def test_every_stop_gives_a_drain_its_time() -> None:
    drain = Config().drain
    most_s = drain.lame_duck_s + drain.finish_s + drain.abort_s
    unit = (ETC / "systemd" / "llmgw.service").read_text(encoding="utf-8")
    assert int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0]) > most_s
    pod = manifest("llmgw.yaml", "Deployment")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > most_s


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_takes_the_manifests(name: str) -> None:
    for one in documents(name):
        kubernetes_validate.validate(one, "1.31", strict=True)


def test_the_gateways_manifest_holds_together() -> None:
    config = config_of(manifest("llmgw.yaml", "ConfigMap")["data"]["llmgw.toml"])
    deployment = manifest("llmgw.yaml", "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert f":{ports['https']}:" in config.listen[0]
    assert config.admin[0].startswith(f"tcp:{ports['admin']}")
    assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "admin"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "admin"}
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for kind in ("Service", "PodDisruptionBudget"):
        selector = manifest("llmgw.yaml", kind)["spec"]["selector"]
        assert selector.get("matchLabels", selector) == labels
    found = config.discovery[0].options
    servers = manifest("llama-server.yaml", "Service")
    assert found["service"] == servers["metadata"]["name"]
    assert found["port"] in {port["name"] for port in servers["spec"]["ports"]}


@pytest.mark.parametrize("name", MANIFESTS)
def test_nothing_is_scaled_down_in_haste(name: str) -> None:
    behaviour = manifest(name, "HorizontalPodAutoscaler")["spec"]["behavior"]
    assert behaviour["scaleDown"]["stabilizationWindowSeconds"] >= 300
    assert behaviour["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 120}]


def fleet() -> list[dict[str, Any]]:
    """One backend that nobody knows anything of."""
    known = Fleet(BreakerRules(), random.Random(1))
    known.put(BackendSpec(id="b", url="http://b"), 0.0)
    return list(known.snapshot(0.0))


def test_the_metrics_that_are_scaled_by_are_there() -> None:
    rules = documents("prometheus-adapter.yaml")[0]["rules"]["external"]
    asked = {re.split(r"[{ ]", rule["seriesQuery"])[0] for rule in rules}
    metrics = Metrics(fleet, dict)
    metrics.rejected("overloaded")
    told = set(re.findall(r"llmgw_\w+", metrics.render().decode()))
    assert asked <= told
    (metric,) = manifest("llama-server.yaml", "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] in {rule["name"]["as"] for rule in rules}
