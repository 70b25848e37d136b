"""What users type and write: the options of the command line, and the files for Kubernetes and clouds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from moelight.core.errors import ConfigError
from moelight.integrations.ray import cluster
from moelight.integrations.ray.cluster import Cluster, ClusterOptions
from tests.cli.program import ROOT, moelight_inside

PROMPTS = ROOT / "examples" / "prompts.jsonl"


def refused(*options: str) -> str:
    done = moelight_inside("generate", str(PROMPTS), "-o", "/tmp/never.jsonl", *options)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_without_ray_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert refused("--ray", "local") == "moelight: error: --ray: Ray is not installed: pip install 'moelight[ray]'\n"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--ray-engines", "2"), "--ray-engines goes with --ray local or --ray ADDRESS"),
        (("--ray-label", "a=b"), "--ray-label goes with --ray local or --ray ADDRESS"),
    ],
)
def test_options_of_a_cluster_need_one(options: tuple[str, ...], reason: str) -> None:
    assert reason in refused(*options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--ray-resource", "tpu"), "--ray-resource tpu: must be NAME=VALUE"),
        (("--ray-resource", "tpu=many"), "--ray-resource tpu=many: the amount must be a number"),
        (("--ray-label", "=b"), "--ray-label =b: must be NAME=VALUE"),
    ],
)
def test_amounts_and_labels_are_checked_before_a_cluster_is_reached(options: tuple[str, ...], reason: str) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'moelight[ray]'")
    assert reason in refused("--ray", "192.0.2.1:6379", *options)


@pytest.mark.parametrize(
    ("address", "reason", "line"),
    [
        ("10.0.0.1:6379", "no\nanswer", "--ray 10.0.0.1:6379: no cluster can be reached there (no answer)"),
        ("local", "The node timed out during startup.", "--ray local: no cluster starts here (Ray gives its node 30 s"),
    ],
)
def test_a_cluster_that_does_not_answer_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, address: str, reason: str, line: str
) -> None:
    def init(**options: Any) -> None:
        assert options["address"] == address
        raise RuntimeError(reason)

    monkeypatch.setattr(cluster, "require_ray", lambda: SimpleNamespace(init=init))
    with pytest.raises(ConfigError) as refusal, Cluster(ClusterOptions(address=address)):
        pass
    assert str(refusal.value).startswith(line)
    assert "\n" not in str(refusal.value)


def test_a_simulated_cluster_is_shown() -> None:
    work = ("--num-requests", "24", "--prompt-len", "12", "--gen-len", "8")
    question = ("-m", "demo", "--hw", "t4", *work, "--nodes", "4", "--rows", "4000", "--load", "0")
    done = moelight_inside("simulate", *question, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)["cluster"]
    assert (result["nodes"], result["rows"], result["failures"]) == (4, 4000, 0)
    assert 0 < result["efficiency"] <= 1.0
    assert result["tokens_per_s"] == pytest.approx(4 * result["engine_tokens_per_s"] * result["efficiency"], rel=0.2)
    assert "4,000" in moelight_inside("simulate", *question).stdout


def test_the_cluster_for_clouds_has_rays_schema() -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'moelight[ray]'")
    from jsonschema import validate

    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    validate(yaml.safe_load((ROOT / "examples" / "ray" / "cluster.yaml").read_text()), schema)


def test_the_rayjob_runs_our_command() -> None:
    """Ray's package has no schema of KubeRay's resources: the command and the places of the pods are checked."""
    job: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "ray" / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]["rayClusterSpec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        assert {"name", "image", "resources", "volumeMounts"} <= container.keys()
    command = job["spec"]["entrypoint"].split()
    assert command[:2] == ["moelight", "generate"]
    options = [item for item in command if item.startswith("--")]
    assert moelight_inside("generate", "--help").stdout.count("--ray-engines") == 1
    assert all(option in moelight_inside("generate", "--help").stdout for option in options)
