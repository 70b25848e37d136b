"""Small models, policies and pass shapes: by hand, and as Hypothesis strategies."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from moelight.core.dtypes import FLOAT32
from moelight.core.policy import Policy, Shares
from moelight.hrm.costs import PAGE_ALIGNMENT, page_elements
from moelight.hrm.footprint import WHOLE_EXPERTS
from moelight.profiles.model import AttentionSpec, ExpertSpec, LatentSpec, LayerSpec, ModelProfile, RouterSpec
from moelight.profiles.names import MIXTRAL_STYLE
from moelight.profiles.stored import StoredWeights
from moelight.profiles.tensor_list import pages
from moelight.scheduler.layout import Layout, MicroBatchShape, layout_of
from moelight.scheduler.requirements import misfit


def examples(count: int) -> settings:
    """Hypothesis settings of these tests: repeatable, and without deadlines.

    One in ten of ``count`` examples are drawn, or the percentage in the environment variable MOELIGHT_EXAMPLES (40 in
    CI).
    """
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    drawn = max(1, count * int(os.environ.get("MOELIGHT_EXAMPLES", "10")) // 100)
    return settings(max_examples=drawn, deadline=None, derandomize=True, suppress_health_check=slow)


PARTS_OF_4_KIB = 100  # the width of experts whose pages take three of them


def small_model(
    moe_layers: Sequence[bool] = (True, True), *, experts: int = 4, width: int = 12, tie: bool = False
) -> ModelProfile:
    """A model of a few hundred numbers, with experts where ``moe_layers`` says so."""
    return ModelProfile(
        name="small",
        model_type="mixtral",
        num_layers=len(moe_layers),
        hidden_size=8,
        vocab_size=32,
        max_positions=64,
        norm_eps=1e-5,
        tie_embeddings=tie,
        dtype="float32",
        attention=AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8),
        router=RouterSpec(top_k=1, normalize=True, weights_in_model_dtype=False),
        experts=ExpertSpec(num_experts=experts, intermediate_size=width),
        moe_layers=tuple(moe_layers),
        dense_intermediate_size=0 if all(moe_layers) else 16,
        names=MIXTRAL_STYLE,
    )


def with_pages(model: ModelProfile, sizes: Sequence[int]) -> ModelProfile:
    """``model``, quantised, with pages of ``sizes`` bytes in its layers with experts, one after another."""
    left, count = iter(sizes), model.experts.num_experts
    by_layer = [[next(left)] * count if has_experts else [] for has_experts in model.moe_layers]
    return replace(model, stored=StoredWeights.of("uneven", "uneven", by_layer, page_elements(model), ()))


def small_policy(model: ModelProfile, *, discrete: bool, resident: int = 0, host: int = 0) -> Policy:
    """``resident`` pages beside the compute unit, ``host`` more in host memory across a link, the others on disk."""
    total = len(pages(model))
    if discrete:
        shares = Shares(device=resident / total, host=host / total, disk=(total - resident - host) / total)
    else:
        shares = Shares(host=resident / total, disk=(total - resident) / total)
    return Policy(
        model="small",
        batch_size=8,
        micro_batch_size=4,
        micro_batch_tokens=16,
        kv_tokens=512,
        ffn_device="gpu" if discrete else "cpu",
        weights=shares,
    )


def small_layout(
    moe_layers: Sequence[bool] = (True, True),
    *,
    experts: int = 4,
    discrete: bool = True,
    resident: int = 0,
    host: int = 0,
    in_parts: bool = False,
    ranks: int = 1,
    **changes: Any,
) -> Layout:
    """The pipeline of such a model and policy; ``changes`` are further fields of the policy.

    ``in_parts``: a page crosses in three parts. ``ranks``: as many have as many experts each.
    With ``ffn_device="cpu"`` beside a GPU the experts are near the CPU, so ``resident`` pages are in host memory.
    """
    model = small_model(moe_layers, experts=experts * ranks, width=PARTS_OF_4_KIB if in_parts else 12)
    model = model if ranks == 1 else model.on_ranks(ranks)
    beside = discrete and changes.get("ffn_device", "gpu") != "cpu"
    policy = replace(small_policy(model, discrete=beside, resident=resident, host=host), **changes)
    return layout_of(model, policy, FLOAT32, discrete=discrete, part_bytes=PAGE_ALIGNMENT)


@st.composite
def models(draw: st.DrawFn) -> ModelProfile:
    """One to four layers, at least one of them with one to five experts; they may differ in what they keep."""
    moe_layers = draw(st.lists(st.booleans(), min_size=1, max_size=4).filter(any))
    width = draw(st.sampled_from((12, PARTS_OF_4_KIB)))
    model = small_model(moe_layers, experts=draw(st.integers(1, 5)), width=width, tie=draw(st.booleans()))
    return replace(model, layers=tuple(draw(layer_specs()) for _ in moe_layers)) if draw(st.booleans()) else model


NO_ATTENTION = AttentionSpec(num_heads=0, num_kv_heads=0, head_dim=0)
LATENT = LatentSpec(q_lora_rank=None, kv_lora_rank=16, nope_head_dim=8, rope_head_dim=8, value_head_dim=8)
ATTENTIONS = (  # padded to 16 numbers a head with a window; latents; with sinks; in chunks; a state instead
    AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=12, value_head_dim=8, window=20, scale=0.2),
    AttentionSpec(num_heads=3, num_kv_heads=3, head_dim=16, latent=LATENT),
    AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8, sinks=True, softcap=2.0),
    AttentionSpec(num_heads=4, num_kv_heads=1, head_dim=8, chunk=22),
    NO_ATTENTION,
)


def layer_specs() -> st.SearchStrategy[LayerSpec]:
    """Layers of every kind; those without attention keep a state."""

    def spec(attention: AttentionSpec, before: int, after: int) -> LayerSpec:
        retained = 0 if attention.num_heads else 640
        return LayerSpec(
            attention=attention, before=before, after=after, state_bytes=retained, state_token_bytes=retained // 20
        )

    return st.builds(spec, st.sampled_from(ATTENTIONS), st.integers(0, 500), st.integers(0, 500))


@st.composite
def placed(draw: st.DrawFn) -> tuple[ModelProfile, Policy]:
    """A model and a policy that gives each of its pages any home."""
    model = draw(models())
    total, discrete = len(pages(model)), draw(st.booleans())
    resident = draw(st.integers(0, total))
    host = draw(st.integers(0, total - resident)) if discrete else 0
    return model, small_policy(model, discrete=discrete, resident=resident, host=host)


@st.composite
def layouts(draw: st.DrawFn, schedule: str = "serial") -> Layout:
    """The pipeline of any small model under any placement and choice of devices that ``schedule`` can serve; where
    pages cross, they may do so in parts."""
    model = replace(draw(models()), ranks=draw(st.sampled_from((1, 1, 2))))
    total = len(pages(model))
    places = [("cpu", "gpu", True), ("gpu", "gpu", True), ("cpu", "split", True), ("gpu", "split", True)]
    places += [("cpu", "cpu", True), ("gpu", "cpu", True), ("cpu", "cpu", False)]
    named = {"gpu": "device", "split": "split", "cpu": "host"}
    fitting = [
        (attention, ffn, discrete)
        for attention, ffn, discrete in places
        if misfit(schedule, discrete=discrete, attention=attention, experts=named[ffn]) is None
    ]
    attention, ffn, discrete = draw(st.sampled_from(fitting))
    resident = draw(st.integers(0, total))
    host = draw(st.integers(0, total - resident)) if ffn != "cpu" else 0
    policy = replace(
        small_policy(model, discrete=ffn != "cpu", resident=resident, host=host),
        attention_device=attention,
        ffn_device=ffn,
        cpu_experts=draw(st.integers(0, host)) / total if ffn == "split" else 0.0,
    )
    policy = replace(policy, host_pages=draw(st.sampled_from(["staged", "pinned"])))
    if schedule in WHOLE_EXPERTS:
        policy = replace(policy, ring_pages=draw(st.sampled_from([0, 0, 2, 3, 4, 5, 8])))
    if attention == "gpu":
        on_device = draw(st.sampled_from([0.0, 0.3, 1.0]))
        policy = replace(policy, kv=Shares(device=on_device, host=1 - on_device))
    return layout_of(
        model, policy, FLOAT32, discrete=discrete, part_bytes=draw(st.sampled_from((1, 2))) * PAGE_ALIGNMENT
    )


def micro_batches(layout: Layout) -> st.SearchStrategy[tuple[MicroBatchShape, ...]]:
    """The micro-batches of one pass; fresh ones only where a link makes a difference, contexts where they cross. Any
    part of them may be on the device where the cache is on both sides."""
    crosses = layout.context_crosses
    mixed = crosses and layout.kv_host < 1
    one = st.builds(
        MicroBatchShape,
        tokens=st.integers(1, 40),
        prefill_only=st.booleans() if layout.discrete else st.just(False),
        samples=st.booleans(),
        context=st.integers(0, 90) if crosses else st.just(0),
        continues=st.booleans() if crosses else st.just(False),
    )

    def with_parts(shape: MicroBatchShape) -> st.SearchStrategy[MicroBatchShape]:
        return st.builds(
            replace,
            st.just(shape),
            device_tokens=st.integers(0, shape.tokens),
            device_context=st.integers(0, shape.context),
        )

    return st.lists(one.flatmap(with_parts) if mixed else one, min_size=1, max_size=5).map(tuple)
