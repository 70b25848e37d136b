"""moelight: offline batch generation with Mixture-of-Experts models that are bigger than the machine.

Importing the package does not import torch; the public names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moelight.core.policy import Policy
    from moelight.core.request import Completion, PoolingParams, SamplingParams
    from moelight.engine.api import optimize, simulate
    from moelight.engine.engine import Engine
    from moelight.integrations.transformers import attach, auto_attach
    from moelight.optimizer.plan import Plan
    from moelight.profiles.policy_files import load_policy
    from moelight.profiles.workload import Workload

__version__ = "0.1.0"
__all__ = [
    "Completion",
    "Engine",
    "Plan",
    "Policy",
    "PoolingParams",
    "SamplingParams",
    "Workload",
    "attach",
    "auto_attach",
    "load_policy",
    "optimize",
    "simulate",
]

_MODULES = {
    "Completion": "moelight.core.request",
    "Engine": "moelight.engine.engine",
    "Plan": "moelight.optimizer.plan",
    "Policy": "moelight.core.policy",
    "PoolingParams": "moelight.core.request",
    "SamplingParams": "moelight.core.request",
    "Workload": "moelight.profiles.workload",
    "attach": "moelight.integrations.transformers",
    "auto_attach": "moelight.integrations.transformers",
    "load_policy": "moelight.profiles.policy_files",
    "optimize": "moelight.engine.api",
    "simulate": "moelight.engine.api",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'moelight' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
