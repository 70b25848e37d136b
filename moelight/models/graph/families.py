"""Data about families beyond transformers' two interfaces: modules with state of their own, and experts that do not
come through `ExpertsInterface`. Does not depend on runs.

A row names a class of transformers; a class that is in no table is what its family's module graph says it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moelight.models.graph.effects import Attend
from moelight.models.graph.state import StateSpec, own_config

_RECURRENT = StateSpec()
_PART = StateSpec(mixer=False)
_OPAQUE = StateSpec(opaque=True)

STATEFUL: Mapping[str, StateSpec] = {
    "BailingHybridDeltaAttention": _RECURRENT,
    "BambaMixer": _RECURRENT,
    "Glm5NextTextLinearAttention": _RECURRENT,
    "FalconH1Mixer": _PART,
    "GraniteMoeHybridMambaLayer": _RECURRENT,
    "JambaMambaMixer": StateSpec(stepwise=True),
    "KimiLinearDeltaAttention": _RECURRENT,
    "LaraMiniGatedDeltaNet": _RECURRENT,
    "Lfm2MoeShortConv": _RECURRENT,
    "Lfm2ShortConv": _RECURRENT,
    "Lfm3ShortConv": _RECURRENT,
    "MiniMaxLightningAttention": StateSpec(cache="MiniMaxCache"),
    "NemotronHMamba2Mixer": _RECURRENT,
    "OlmoHybridGatedDeltaNet": _RECURRENT,
    "Qwen3NextGatedDeltaNet": _RECURRENT,
    "Qwen3_5GatedDeltaNet": _RECURRENT,
    "Qwen3_5MoeGatedDeltaNet": _RECURRENT,
    "Qwen4ExpTextGatedDeltaNet": _RECURRENT,
    # Parts of attention, or of the embedding, that look back
    "Qwen4ExpTextPLELayer": _PART,
    "Inkling2DynamicShortConvolution": _PART,
    "Inkling2ShortConvolution": _PART,
    "InklingShortConvolution": _PART,
    "ZayaCCAProjection": _PART,
    # Attention that selects keys, compresses them, or adds to logits
    "AXK2Attention": _OPAQUE,
    "DeepseekV32Attention": _OPAQUE,
    "DeepseekV4Attention": _OPAQUE,
    "Dots3NoteTextAttention": _OPAQUE,
    "DogeAttention": _OPAQUE,
    "Glm5NextTextAttention": StateSpec(opaque=True, own_mask=True, returns=3),
    "GlmMoeDsaAttention": _OPAQUE,
    "HYV4Attention": _OPAQUE,
    "HYV4VLAttention": _OPAQUE,
    "InklingAttention": _OPAQUE,
    "Inkling2FullAttention": _OPAQUE,
    "Inkling2SlidingAttention": _OPAQUE,
    "MiniMaxM3VLAttention": _OPAQUE,
    "MistralLarge4TextAttention": _OPAQUE,
    "Qwen4ExpTextAttention": StateSpec(opaque=True, all_positions=True, returns=2),
}


@dataclass(frozen=True, kw_only=True)
class Projection:
    """One matrix of every expert of a module.

    Attributes:
        name: of the module's parameter [E, out, in], or [E · out, in] where experts are stacked rows.
        transposed: it is [E, in, out].
        bias: of the parameter [E, out] that is added, if any.
    """

    name: str
    transposed: bool = False
    bias: str | None = None


@dataclass(frozen=True, kw_only=True)
class ExpertForm:
    """The computation of one expert of a module, and the parameters in its page.

    Attributes:
        count: of experts that have a page; ids from here on have none.
        inward: applied to the input: one matrix (up, or gate and up at once), or two (gate, up).
        outward: applied to what ``activate`` makes of them.
        activate: the module's own function of the results of ``inward`` [n, ...] -> [n, I].
        interleaved: rows of gate and up alternate in the one matrix of ``inward``.
        gated: whether a gate is among ``inward``.
        finish: a norm of each expert's output [n, H], which is no part of a page.
    """

    count: int
    inward: tuple[Projection, ...]
    outward: Projection
    activate: Callable[..., Tensor]
    interleaved: bool = False
    gated: bool = True
    finish: Callable[[Tensor], Tensor] | None = None

    def forward(self, page: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """One expert, whose matrices and biases ``page`` has by name, on x [n, H] -> [n, H]."""
        out = _product(page, self.outward, self.activate(*(_product(page, matrix, x) for matrix in self.inward)))
        return out if self.finish is None else self.finish(out)

    def names(self) -> list[str]:
        """The parameters of the module that pages are cut from."""
        every = (*self.inward, self.outward)
        return [matrix.name for matrix in every] + [matrix.bias for matrix in every if matrix.bias is not None]

    def shapes(self, parameters: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The matrices and biases of one expert by their names in a page, given the shapes of the ``parameters``."""
        stack = parameters[self.outward.name]
        one = stack[1:] if len(stack) > 2 else (stack[0] // self.count, stack[1])
        rows, columns = one[:: -1 if self.outward.transposed else 1]
        inward = ("gate", "up") if self.gated else ("up",)
        shapes: dict[str, tuple[int, ...]] = {**dict.fromkeys(inward, (columns, rows)), "down": (rows, columns)}
        if any(matrix.bias is not None for matrix in self.inward):
            shapes |= {f"{name}_bias": (columns,) for name in inward}
        if self.outward.bias is not None:
            shapes["down_bias"] = (rows,)
        return shapes

    def page(self, module: Any, expert: int) -> dict[str, Tensor]:
        """Views of the parameters of one expert of ``module``."""
        tensors = {}
        for matrix in (*self.inward, self.outward):
            weight = module.get_parameter(matrix.name)
            stacked = weight.unflatten(0, (self.count, -1)) if weight.ndim == 2 else weight
            tensors[matrix.name] = stacked[expert]
            if matrix.bias is not None:
                tensors[matrix.bias] = module.get_parameter(matrix.bias)[expert]
        return tensors


def _product(page: Mapping[str, Tensor], projection: Projection, x: Tensor) -> Tensor:
    weight = page[projection.name]
    out = x @ (weight if projection.transposed else weight.T)
    return out if projection.bias is None else out + page[projection.bias]


Mix = Callable[
    [nn.Module, Tensor, Tensor, Tensor], Tensor
]  # experts module, x [T, H], ids and weights [T, k] -> [T, H]


def interface_form(module: Any) -> ExpertForm:
    """The form of a module that transformers' ``use_experts_implementation`` decorates."""

    def projection(name: str) -> Projection:
        bias = f"{name}_bias" if module.has_bias else None
        return Projection(name=name, transposed=module.is_transposed, bias=bias)

    return ExpertForm(
        count=module.num_experts,
        inward=(projection("gate_up_proj" if module.has_gate else "up_proj"),),
        outward=projection("down_proj"),
        activate=module._apply_gate if module.has_gate else module.act_fn,
        interleaved=not module.is_concatenated,
        gated=module.has_gate,
        finish=module.post_expert_norm if module.has_post_expert_norm else None,
    )


@dataclass(frozen=True, kw_only=True)
class OutsideExperts:
    """Experts that do not come through `ExpertsInterface`.

    Attributes:
        forward: in place of the module's: ``forward(module, mix, *its arguments)``.
            None: its own.
        form: of the experts, where the module is what is given to ``mix``.
        routes: the module is given hidden states, and has its router within.
    """

    forward: Callable[..., Any] | None = None
    form: Callable[[Any], ExpertForm] = interface_form
    routes: bool = False


def _gate_up(
    act: Callable[[Tensor], Tensor],
    count: int,
    *,
    up: str = "gate_up_proj",
    down: str = "down_proj",
    transposed: bool = False,
) -> ExpertForm:
    def activate(both: Tensor) -> Tensor:
        gate, value = both.chunk(2, dim=-1)
        return act(gate) * value

    inward = Projection(name=up, transposed=transposed)
    outward = Projection(name=down, transposed=transposed)
    return ExpertForm(count=count, inward=(inward,), outward=outward, activate=activate)


def _dbrx_form(module: Any) -> ExpertForm:
    act = module.mlp.activation_fn
    return ExpertForm(
        count=module.num_experts,
        inward=(Projection(name="mlp.w1"), Projection(name="mlp.v1")),
        outward=Projection(name="mlp.w2", transposed=True),
        activate=lambda gate, up: act(gate) * up,
    )


def _step3p7_form(module: Any) -> ExpertForm:
    return ExpertForm(
        count=module.num_experts,
        inward=(Projection(name="gate_up_proj"),),
        outward=Projection(name="down_proj"),
        activate=module._apply_gate,
    )


def _as_called(module: Any, mix: Mix, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return mix(module, hidden, ids, weights)


def _longcat(module: Any, mix: Mix, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Experts from ``num_routed_experts`` on return their input."""
    same = (weights * (ids >= module.num_routed_experts)).sum(-1, keepdim=True).to(hidden.dtype)
    return mix(module, hidden, ids, weights) + hidden * same


def _llama4(module: Any, mix: Mix, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """A token's one expert is applied to the token times its score."""
    x = hidden.reshape(-1, module.hidden_dim)
    scores, logits = module.router(x)
    ids = scores.argmax(-1, keepdim=True)
    mixture = mix(module.experts, x * scores.gather(1, ids), ids, torch.ones_like(ids, dtype=torch.float32))
    return module.shared_expert(x) + mixture, logits


def _jetmoe(module: Any, mix: Mix, hidden: Tensor) -> Tensor:
    logits = module.router.layer(hidden.reshape(-1, module.input_size)).float()
    chosen, ids = logits.topk(module.router.top_k, dim=1)
    return mix(module, hidden, ids, chosen.softmax(dim=1).type_as(hidden)) + module.bias


def _jetmoe_gating(module: Any, _: Mix, hidden: Tensor) -> tuple[Any, ...]:
    """The router of attention's own experts, which stay resident: transformers' own, with counts on the meta device."""
    if hidden.device.type != "meta":
        return type(module).forward(module, hidden)
    rows = hidden.shape[0] * module.top_k
    index = torch.zeros(rows, dtype=torch.int64, device="meta")
    return index, index, hidden.new_zeros(rows), [rows] + [0] * (module.num_experts - 1), hidden


OUTSIDE: Mapping[str, OutsideExperts] = {
    "DbrxExperts": OutsideExperts(forward=_as_called, form=_dbrx_form),
    "JetMoeMoE": OutsideExperts(
        forward=_jetmoe,
        routes=True,
        form=lambda module: _gate_up(
            module.activation, module.router.num_experts, up="input_linear.weight", down="output_linear.weight"
        ),
    ),
    "JetMoeTopKGating": OutsideExperts(forward=_jetmoe_gating),
    "Llama4TextExperts": OutsideExperts(
        form=lambda module: _gate_up(module.act_fn, module.num_experts, transposed=True)
    ),
    "Llama4TextMoe": OutsideExperts(forward=_llama4),
    "LongcatFlashExperts": OutsideExperts(
        forward=_longcat, form=lambda module: _gate_up(module.act_fn, module.num_routed_experts)
    ),
    "Step3p7Experts": OutsideExperts(forward=_as_called, form=_step3p7_form),
}


@dataclass(frozen=True, kw_only=True)
class AttentionNotes:
    """Notes about a class of attention that relies on masks or counts from the first row, which an effect must state.

    Attributes:
        prepare: ``prepare(module)``, once.
        complete: ``complete(module, effect, positions [T])``, for each effect; none where ``prepare`` leaves none.
    """

    prepare: Callable[[Any], None]
    complete: Callable[[Any, Attend, Tensor], None] = lambda *_: None


def _window_of_config(module: Any) -> None:
    """Let the effects of ``module`` say the window that only its model's masks have."""
    module.sliding_window = module.config.sliding_window


def _llama4_prepare(module: Any) -> None:
    module.attn_temperature_tuning = False  # it counts positions from the first row of the run


def _llama4_complete(module: Any, effect: Attend, positions: Tensor) -> None:
    if module.config.layer_types[module.layer_idx] == "chunked_attention":  # as a rule, layers with positions
        effect.chunk = module.config.attention_chunk_size
    if module.config.attn_temperature_tuning and not module.use_rope:
        scales = torch.log1p(((positions.float() + 1.0) / module.floor_scale).floor()) * module.attn_scale + 1.0
        effect.q = (effect.q * scales[:, None, None]).to(effect.q.dtype)


ATTENTION: Mapping[str, AttentionNotes] = {
    "Inkling2BlockAttentionResidual": AttentionNotes(prepare=own_config),  # to other states of the same token
    "Llama4TextAttention": AttentionNotes(prepare=_llama4_prepare, complete=_llama4_complete),
    "PhimoeAttention": AttentionNotes(prepare=_window_of_config),
}
ENCODERS: Mapping[str, tuple[str, ...]] = {  # modules within text models that text never reaches
    "Ernie4_5_VLMoeMoeBlock": ("vision_moe",),
}
CHOSEN_BY_TOKEN: Mapping[str, str] = {  # routers' tables [V, k] of the experts of each token, all different
    "DeepseekV4HashRouter": "tid2eid",
}
REFUSED: Mapping[str, str] = {
    "diffusion_gemma": "its tokens are not made one after another",
}
OWN_EXPERTS = ("DogeCDMoE", "NllbMoeSparseMLP", "SwitchTransformersSparseMLP")  # that no effect carries


def refusal(config: Any) -> str | None:
    """Why a graph of ``config`` is not served, in words; None if nothing is known against it."""
    if config.model_type in REFUSED:
        return REFUSED[config.model_type]
    if config.model_type == "doge" and config.is_moe:
        return "which experts a token has depends on the other tokens of its pass"
    if config.model_type == "llama4_text" and config.num_experts_per_tok != 1:
        return f"num_experts_per_tok {config.num_experts_per_tok}: experts of one token have different inputs"
    if (passes := getattr(config, "loop_num_passes", 1)) > 1:
        return f"loop_num_passes {passes}: layers that run more than once in a pass are not served"
    return None
