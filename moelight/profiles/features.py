"""Model features that the engine does not compute: a model with one of them can be planned for, not run.

Every field of a profile is either computed by ``models/`` or listed here, in the torch-free core, so that the planner
can check a model without importing torch.
"""

from __future__ import annotations

from collections.abc import Callable

from moelight.core.errors import ConfigError
from moelight.profiles.model import ModelProfile

NOT_COMPUTED: dict[str, Callable[[ModelProfile], bool]] = {
    "latent attention": lambda model: model.attention.latent is not None,
    "attention sinks": lambda model: model.attention.sinks,
    "a window in some layers only": lambda model: not all(model.attention.window_layers),
    "stretched positions other than linear": lambda model: model.attention.rope_type not in ("default", "linear"),
    "positions in a part of each head": lambda model: model.attention.rotary_share != 1,
    "router scores other than softmax": lambda model: model.router.scoring != "softmax",
    "groups of experts": lambda model: model.router.groups > 1,
    "scaled router weights": lambda model: model.router.scale != 1,
    "a router bias": lambda model: model.router.bias or model.router.selection_bias,
    "shared experts": lambda model: model.experts.shared_intermediate_size > 0,
    "expert biases": lambda model: model.experts.bias,
    "clamped experts": lambda model: model.experts.clamp is not None,
    "LayerNorm": lambda model: model.norm != "rms",
    "norm biases": lambda model: model.norm_bias,
    "a bias of the output matrix": lambda model: model.head_bias,
}


def not_computed(model: ModelProfile) -> tuple[str, ...]:
    """The features of ``model`` that the engine does not compute; empty if the model runs."""
    return tuple(feature for feature, asked in NOT_COMPUTED.items() if asked(model))


def require_computable(model: ModelProfile, *, where: str) -> None:
    """Check that the engine computes every feature of ``model``. ``where`` is the file named in the message.

    Raises:
        ConfigError: features are not computed; the message lists them all.
    """
    missing = not_computed(model)
    if missing:
        raise ConfigError(
            f"{where}: {model.model_type} can be planned for but not run yet: "
            f"the engine does not compute {', '.join(missing)}"
        )
