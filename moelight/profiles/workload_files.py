"""Workloads by name: ``workload_profiles/NAME.yaml`` holds a `Workload` and its source."""

from __future__ import annotations

from pathlib import Path

from moelight.core.errors import ConfigError
from moelight.profiles.files import find_profile, read_yaml
from moelight.profiles.workload import Workload

_FIGURES = ("num_requests", "prompt_len", "max_prompt_len", "gen_len")


def load_workload(name_or_path: str) -> Workload:
    """The workload called ``name_or_path``, or that of a YAML file.

    Raises:
        ConfigError: no such workload (the message names the closest one), or a file breaks a rule.
    """
    path = Path(name_or_path)
    if path.name == name_or_path and path.suffix not in (".yaml", ".yml"):
        path = find_profile("workload", name_or_path)
    root = read_yaml(path)
    fields = root.fields("source", required=("name", *_FIGURES))
    for key in ("name", "source"):
        if key in fields:
            fields[key].text()
    figures = {key: fields[key].integer() for key in _FIGURES}
    try:
        return Workload(**figures)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
