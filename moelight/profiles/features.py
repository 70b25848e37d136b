"""What a profile may ask for that the engine does not compute: such a model can be planned for, not run.

A field of a profile is either computed by ``models/`` or named in this table, which stands here so that a plan can
say whether it runs without torch. Refuses to know why a model has it.
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
    """The features of ``model`` that the engine does not compute; none where it runs."""
    return tuple(feature for feature, asked in NOT_COMPUTED.items() if asked(model))


def require_computable(model: ModelProfile, *, where: str) -> None:
    """Refuse a model that needs what is not computed here. ``where`` is the file that asks for it.

    Raises:
        ConfigError: names everything that is missing.
    """
    missing = not_computed(model)
    if missing:
        raise ConfigError(
            f"{where}: {model.model_type} can be planned for but not run yet: "
            f"the engine does not compute {', '.join(missing)}"
        )
