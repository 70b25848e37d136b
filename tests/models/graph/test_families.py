"""Families of transformers as suspended graphs: logits and greedy tokens of transformers' eager forward.

`make thorough` tests every family with experts that the installed transformers has, CI one for each mechanism.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("greenlet")

from moelight.core.errors import ConfigError, MoelightError
from moelight.models.graph import model, self_test
from moelight.models.graph.effects import Attend, Ended, Experts, Latents
from moelight.models.graph.families import (
    ATTENTION,
    CHOSEN_BY_TOKEN,
    ENCODERS,
    OUTSIDE,
    OWN_EXPERTS,
    STATEFUL,
)
from moelight.models.graph.family_table import Table
from moelight.models.graph.imports import transformers_of_graphs
from moelight.models.graph.model import GraphModel, MixerKind, on_meta
from moelight.models.graph.state import State
from moelight.models.graph.support import judge_family, moe_families, support
from moelight.profiles.model import NOT_COMPUTED
from tests.cases import exhaustive
from tests.models.graph import measured
from tests.models.graph.released import RELEASED

MECHANISMS = {  # one family for each
    "mixtral": "attention and experts",
    "gpt_oss": "sinks, windows, biased and interleaved experts",
    "deepseek_v2": "latents",
    "dbrx": "experts in stacked rows, outside the interface",
    "llama4": "chunks of attention, scaled inputs of experts",
    "qwen3_next": "recurrent state",
    "jamba": "state that takes one row at a time",
    "minimax": "a cache class of its own",
    "zaya": "convolutions within attention",
    "deepseek_v32": "attention that selects keys",
    "gemma4": "layers of several shapes",
    "inkling_text": "several states in one layer",
    "inkling2_text": "attention within a token, and by distances that the model is not given",
    "llama": "dense",
}
WITHOUT = {  # a language model, one that is causal, or layers that run once
    "diffusion_gemma": "not made one after another",
    "doge": "depends on the other tokens of its pass",
    "inkling2_loop": "layers that run more than once in a pass",
    "nllb-moe": "no causal language model",
    "openai_privacy_filter": "no causal language model",
    "switch_transformers": "no causal language model",
}
KINDS = sorted(moe_families().values())
ASKED = (
    "mixtral qwen2_moe qwen3_moe olmoe dbrx deepseek_v2 deepseek_v3 gpt_oss glm4_moe phimoe granitemoe minimax_m2 "
    "ernie4_5_moe hunyuan_v1_moe qwen3_next qwen3_5_moe llama4 jamba gemma4"
)


def config_of(model_type: str, **changes: Any) -> Any:
    from transformers import CONFIG_MAPPING, __version__

    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {__version__} has no {model_type}")
    return measured.config_of(model_type, **changes)


def assert_equal(model_type: str, **changes: Any) -> None:
    verdict = self_test.self_test(config_of(model_type, **changes))
    assert verdict.differs is None
    assert verdict.error <= self_test.TOLERANCE
    assert verdict.greedy


@pytest.mark.parametrize("model_type", MECHANISMS)
def test_a_suspended_graph_equals_transformers(model_type: str) -> None:
    assert_equal(model_type)


@pytest.mark.parametrize(("keys", "tiny"), [(32, 4), (8, 2), (1, 1)])
def test_a_tiny_model_has_as_many_keys_as_queries_or_fewer_or_one(keys: int, tiny: int) -> None:
    assert self_test.tiny(config_of("mixtral", num_key_value_heads=keys)).num_key_value_heads == tiny


def test_one_key_for_all_queries_where_transformers_computes_no_groups() -> None:
    """Eager attention of transformers 5.24's Unlimited-OCR does not repeat keys."""
    config = config_of("unlimited_ocr")
    config.get_text_config().num_key_value_heads = 1
    assert support(config).how == "graph"
    assert self_test.self_test(config).differs is None


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}),  # only masks say it
        ("gemma4_text", {"num_kv_shared_layers": 18, "hidden_size_per_layer_input": 256}),
        ("deepseek_v2", {"topk_method": "greedy", "q_lora_rank": None}),
        ("hunyuan_v1_moe", {"num_experts": 64, "moe_topk": [8] * 32}),
    ],
)
def test_a_switch_is_kept_and_equals_transformers(model_type: str, changes: dict[str, Any]) -> None:
    assert_equal(model_type, **changes)


ROWS = {family.name: family for family in Table.read().families}


@pytest.mark.thorough
@pytest.mark.parametrize("name", moe_families())
def test_every_family_is_judged_as_the_table_says(name: str) -> None:
    model_type, row = moe_families()[name], ROWS[name]
    verdict = judge_family(name, model_type, RELEASED.get(model_type, {}))
    assert (verdict.how, verdict.reason, verdict.mixers) == (row.how, row.reason, row.mixers)


@pytest.mark.thorough
@pytest.mark.parametrize("name", exhaustive(moe_families(), but=MECHANISMS))
def test_every_family_is_what_the_table_says(name: str) -> None:
    """Logits and greedy tokens of 32 prompts, and drawn shapes, are measured anew."""
    measurement = measured.family_of(name, moe_families()[name])
    row = ROWS[name]
    assert (measurement.how, measurement.reason, measurement.mixers) == (row.how, row.reason, row.mixers)
    if measurement.how is not None:
        assert measurement.error is not None and measurement.error <= self_test.TOLERANCE
    assert measurement.same == measurement.prompts
    assert (measurement.shapes, measurement.shapes_equal) == (row.shapes, row.shapes_equal)
    assert measurement.shapes_differ == row.shapes_differ


def test_the_table_has_the_families_of_the_installed_transformers() -> None:
    missing = sorted(set(moe_families()) - set(ROWS))
    assert not missing, f"measure them: make families ARGS='{' '.join(missing)}'"
    assert measured.on_page() == list(measured.page_of(Table.read()))


def test_families_that_are_asked_for_run_and_equal_transformers() -> None:
    runs = {name: item for name, item in ROWS.items() if item.how is not None}
    assert len(runs) >= 55
    assert set(ASKED.split()) <= set(runs)
    assert {name for name, run in runs.items() if run.how == "native"} == {"mixtral", "olmoe", "qwen3_moe"}
    for run in runs.values():
        assert run.error is not None and run.error <= self_test.TOLERANCE, run.name
        assert (run.same, run.prompts) == (measured.PROMPTS, measured.PROMPTS), run.name


@pytest.mark.thorough
@pytest.mark.parametrize(
    "model_type", exhaustive([item for item in KINDS if item not in {*WITHOUT, "muse_spark"}], but=MECHANISMS)
)
def test_the_whole_graph_runs_dry_and_its_buffers_are_transformers_own(model_type: str) -> None:
    assert support(config_of(model_type)).how is not None
    assert_buffers(model_type)


def assert_buffers(model_type: str) -> None:
    """Buffers of a model made on the meta device are those of one made on the CPU."""
    from transformers.initialization import no_init_weights

    result = model.decoder_of(on_meta(self_test.tiny(config_of(model_type))))
    with no_init_weights():
        expected = dict(type(result)(result.config).named_buffers())
    for name, buffer in result.named_buffers():
        assert buffer.is_meta or torch.equal(buffer, expected[name]), name


@pytest.mark.parametrize("model_type", ["gpt_oss", "gemma4", "llama4"])
def test_buffers_that_no_checkpoint_holds_are_transformers_own(model_type: str) -> None:
    assert_buffers(model_type)


@pytest.mark.thorough
def test_the_self_test_names_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("mixtral", sliding_window=4096)
    serve = self_test.serve_attention

    def without_window(effect: Attend, rows: self_test.Rows) -> torch.Tensor:
        assert effect.window is not None
        effect.window = None
        return serve(effect, rows)

    monkeypatch.setattr(self_test, "serve_attention", without_window)
    differs = self_test.self_test(config).differs
    assert differs is not None
    assert differs.startswith("model.layers.0.self_attn (MixtralAttention)")
    monkeypatch.setattr(self_test, "serve_attention", serve)
    experts = self_test.serve_experts
    monkeypatch.setattr(self_test, "serve_experts", lambda *inputs: experts(*inputs) * 1.01)
    differs = self_test.self_test(config).differs
    assert differs is not None
    assert differs.startswith("model.layers.0.mlp (MixtralSparseMoeBlock)")


def tiny_graph(model_type: str, **changes: Any) -> GraphModel:
    return GraphModel(on_meta(self_test.tiny(config_of(model_type, **changes))))


def test_effects_have_the_shapes_of_the_family() -> None:
    graph = tiny_graph("gpt_oss")
    assert graph.mixers == (MixerKind.ATTENTION,) * 4
    assert graph.moe_layers == (True,) * 4
    assert not graph.stateful
    assert len(graph.experts) == len(graph.forms) == 4
    rows = torch.zeros(5, dtype=torch.int64, device="meta")
    run = graph.start(rows, rows, [(State(), 3), (State(), 2)])
    effect = run.resume(None)
    assert isinstance(effect, Attend)
    assert (effect.q.shape, effect.k.shape, effect.v.shape) == ((5, 4, 16), (5, 2, 16), (5, 2, 16))
    assert effect.window == 8  # the first layer's
    assert effect.sinks is not None
    assert not torch.is_inference_mode_enabled()
    effect = run.resume(torch.zeros(5, 4, 16, device="meta"))
    assert isinstance(effect, Experts)
    assert (effect.layer, effect.index, effect.x.shape, effect.ids.shape) == (0, 0, (5, 64), (5, 2))
    assert effect.weights.dtype == torch.float32
    effect = run.resume(effect.x)
    assert isinstance(effect, Attend)
    assert (effect.layer, effect.window) == (1, None)


def test_latents_are_what_a_cache_keeps() -> None:
    config = self_test.tiny(config_of("deepseek_v3"))
    rows = torch.zeros(3, dtype=torch.int64, device="meta")
    effect = GraphModel(on_meta(config)).start(rows, rows, [(State(), 3)]).resume(None)
    assert isinstance(effect, Latents)
    assert effect.latent.shape == (3, config.kv_lora_rank + config.qk_rope_head_dim)
    assert effect.q.shape == (3, config.num_attention_heads, config.kv_lora_rank)
    expanded = GraphModel(on_meta(config), latents=False).start(rows, rows, [(State(), 3)]).resume(None)
    assert isinstance(expanded, Attend)
    assert expanded.k.shape[2] != expanded.v.shape[2]


def test_a_rotary_embedding_that_depends_on_length_sees_one_sequence() -> None:
    """Of prompts on both sides of the length from which factors are other ones, each has its own."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 64, "long_factor": [8.0] * 64}
    rope |= {"original_max_position_embeddings": 8, "short_mscale": 1.0, "long_mscale": 1.5, "factor": 32.0}
    config = self_test.tiny(config_of("phimoe", head_dim=128, rope_parameters=rope))
    prompts = [torch.arange(3, 3 + length) for length in (5, 20, 7)]
    eager = self_test.random_model(config, 0)
    with torch.inference_mode():
        expected = torch.cat([eager(input_ids=prompt[None], use_cache=False).logits[0] for prompt in prompts])
    bench = self_test.Bench(self_test.random_model(config, 0))
    (logits,) = bench.run([[(self_test.Tokens(prompt), len(prompt)) for prompt in prompts]])
    assert (logits - expected).abs().max() / expected.abs().max() < self_test.TOLERANCE


def test_state_counts_its_bytes() -> None:
    graph = self_test.Bench(self_test.random_model(self_test.tiny(config_of("qwen3_next")), 0))
    tokens = self_test.Tokens(torch.arange(9))
    assert tokens.state.nbytes == 0
    graph.run([[(tokens, 4)]])
    retained = tokens.state.nbytes
    assert retained > 0
    graph.run([[(tokens, 1)]])
    assert tokens.state.nbytes == retained
    assert graph.model.stateful


@pytest.mark.parametrize(
    ("model_type", "how", "mixers"),
    [
        ("mixtral", "native", ("attention",)),
        ("gpt_oss", "graph", ("attention",)),
        ("qwen3_next", "graph", ("recurrent", "attention")),
        ("deepseek_v32", "opaque", ("opaque",)),
    ],
)
def test_how_a_family_runs(model_type: str, how: str, mixers: tuple[str, ...]) -> None:
    result = support(self_test.tiny(config_of(model_type)))
    assert (result.model_type, result.how, result.reason, result.mixers) == (model_type, how, None, mixers)
    assert any("prefix" in item for item in result.refused) == (model_type in ("qwen3_next", "deepseek_v32"))


def test_experts_that_no_table_names_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in docs/guides/add-a-model.md."""
    rows = {name: item for name, item in OUTSIDE.items() if name != "LongcatFlashExperts"}
    monkeypatch.setattr(model, "OUTSIDE", rows)
    result = support(self_test.tiny(config_of("longcat_flash")))
    assert result.how is None
    assert str(result.reason).startswith("dry run failed in LongcatFlashExperts: ")


def test_a_family_is_native_as_far_as_profiles_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NOT_COMPUTED, "anything", lambda profile: True)
    assert support(self_test.tiny(config_of("mixtral"))).how == "graph"


@pytest.mark.parametrize(
    ("model_type", "changes", "says"),
    [
        *((model_type, {}, says) for model_type, says in WITHOUT.items()),
        ("muse_spark", {}, "experts of inputs of 4096 numbers beside hidden states of 64 are not computed"),
        ("minimax_m2", {"quantization_config": {"quant_method": "hqq"}}, "the weights are quantised 'hqq'"),
    ],
)
def test_why_a_family_does_not_run(model_type: str, changes: dict[str, Any], says: str) -> None:
    result = support(self_test.tiny(config_of(model_type, **changes)))
    assert result.how is None
    assert result.reason is not None
    assert says in result.reason
    assert "\n" not in result.reason


@pytest.mark.parametrize("model_type", ["mixtral", "llama4", "jetmoe"])
def test_a_router_is_asked_before_its_layer(model_type: str) -> None:
    """What it says of its own input is what it says within a run."""
    bench = self_test.Bench(self_test.random_model(self_test.tiny(config_of(model_type)), 0))
    assert bench.model.predicts
    tokens = self_test.Tokens(torch.arange(3, 14))
    run = bench.model.start(tokens.ids, torch.arange(11), [(tokens.state, 11)])
    effect = run.resume(None)
    while not isinstance(effect, Experts):
        assert isinstance(effect, Attend)
        effect = run.resume(self_test.serve_attention(effect, [(tokens, 11)]))
    result = bench.model.route(effect.index, effect.x)
    assert torch.equal(result.ids, effect.ids)
    assert torch.equal(result.weights, effect.weights)
    run.close()


def test_a_router_outside_of_a_block_is_not_asked() -> None:
    assert not tiny_graph("gemma4").predicts


def test_a_run_ends_once() -> None:
    graph = tiny_graph("llama")
    rows = torch.zeros(2, dtype=torch.int64, device="meta")
    run = graph.start(rows, rows, [(State(), 2)])
    effect = run.resume(None)
    while isinstance(effect, Attend):
        effect = run.resume(torch.zeros_like(effect.q))
    assert isinstance(effect, Ended)
    assert effect.hidden.shape == (2, 64)
    with pytest.raises(MoelightError, match="ended"):
        run.resume(None)


def test_experts_ids_without_a_page_add_nothing() -> None:
    x = torch.ones(1, 4)
    ids, weights = torch.tensor([[7, 9]]), torch.ones(1, 2)
    graph = tiny_graph("mixtral")
    assert not self_test.serve_experts(Experts(0, 0, x, ids, weights), graph.forms[0], [{}] * 7).any()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "no_such_family"}, "no_such_family"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "a.B"}}, "'mine' is code of its own repository"),
        ({"model_type": "t5"}, "no causal language model"),
        ({"model_type": "llama4_text", "num_experts_per_tok": 2}, "num_experts_per_tok 2"),
        ({}, "model_type"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=says) as error:
        GraphModel.from_config(tmp_path)
    assert "\n" not in str(error.value)


def test_a_missing_library_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers_of_graphs.cache_clear()
    monkeypatch.setitem(sys.modules, "greenlet", None)
    with pytest.raises(ConfigError, match=r"moelight\[graph\]"):
        GraphModel.from_config(tmp_path)


def test_every_class_of_the_tables_is_one_of_transformers() -> None:
    """A module whose name is another one would run without its state, its chunks or its pages."""
    import transformers

    sources = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    if transformers.__version__ != Table.read().transformers:
        pytest.skip("classes come and go")
    named = {*STATEFUL, *OUTSIDE, *ATTENTION, *ENCODERS, *OWN_EXPERTS, *CHOSEN_BY_TOKEN}
    assert [name for name in named if f"class {name}(" not in text] == []
