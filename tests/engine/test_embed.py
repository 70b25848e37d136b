"""Embeddings beside transformers' last hidden states, however passes cut the prompts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel

from moelight.core.errors import CheckpointError, ConfigError, InputError
from moelight.core.policy import Policy, Shares
from moelight.core.request import PROMPT_ONLY, PoolingParams, Request, SamplingParams
from moelight.engine.engine import Engine
from moelight.models.graph.self_test import tiny as tiny_graph
from moelight.profiles.pooling import resolve_pooling
from tests.cases import thorough
from tests.engine.graphs import STREAMED
from tests.engines import Tiny
from tests.tiny import FAMILIES, save_byte_tokenizer
from tests.weights.gguf_files import write_gguf
from tests.weights.quantised import METHODS, quantise

TOLERANCE = 1e-4  # of the largest number of an embedding
PROMPTS = [[3 + (5 * n + 7 * at) % 90 for at in range(1 + 9 * n % 41)] for n in range(7)]
GRAPHS = ("gpt_oss", "llama", "qwen3_next", "gpt2")
PLACES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "streamed": {"weights": STREAMED},
    "twin": {"ffn_device": "gpu", "weights": Shares(device=0.5, host=0.5)},
    "twin, cache there": {"ffn_device": "gpu", "attention_device": "gpu", "kv": Shares(device=1.0)},
}


def opened(model: Path, position: str = "cpu", **values: Any) -> Engine:
    sizes = {"batch_size": 4, "micro_batch_size": 3, "micro_batch_tokens": 13, "weight_dtype": "float32"}
    policy = Policy(model=str(model), **{**sizes, **PLACES[position], **values})
    return Engine(policy, device="twin" if position.startswith("twin") else "cpu")


@torch.no_grad()
def wanted(directory: Path, pooling_type: str, prompts: Sequence[Sequence[int]] = PROMPTS) -> np.ndarray:
    """As sentence-transformers pools: float32 [prompts, H]."""
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    rows = []
    for ids in prompts:
        hidden = model(torch.tensor([list(ids)])).last_hidden_state[0]
        rows.append({"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}[pooling_type])
    return torch.stack(rows).numpy()


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert ours.shape == theirs.shape and ours.dtype == np.float32
    return float((np.abs(ours - theirs).max(-1) / np.abs(theirs).max(-1)).max())


def check(model: Path, position: str, values: Path | None = None) -> None:
    with opened(model, position) as engine:
        for pooling_type in ("last", "mean", "cls"):
            embeddings = engine.embed(PROMPTS, PoolingParams(pooling_type=pooling_type))
            assert difference(embeddings, wanted(values or model, pooling_type)) < TOLERANCE, pooling_type
        assert engine.stats.completion_tokens == 0


@pytest.mark.parametrize(
    ("family", "position"),
    thorough(
        [*((family, "cpu") for family in FAMILIES), *(("mixtral", position) for position in PLACES)],
        but=[("qwen3_moe", "cpu"), ("mixtral", "streamed"), ("mixtral", "twin, cache there")],
    ),
)
def test_embeddings_are_the_hidden_states_of_transformers(family: str, position: str, tiny: Tiny) -> None:
    check(tiny(family), position)


@pytest.mark.parametrize("family", thorough(GRAPHS, but=["gpt_oss"]))
def test_a_module_graph_gives_its_hidden_states(family: str, checkpoints: Any) -> None:
    check(checkpoints(family)[0], "streamed")


@pytest.mark.parametrize("name", thorough(["gptq int4", "fp8 blocks"], but=["gptq int4"]))
def test_quantised_pages_give_the_hidden_states_of_their_numbers(name: str, tiny: Tiny, tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    quantised, values = quantise(tiny("mixtral", intermediate_size=96, **shape), tmp_path, METHODS[name])
    check(quantised, "cpu", values)


def test_a_checkpoint_of_a_base_model(tmp_path: Path) -> None:
    """As embedding models are published: without the causal model's prefix, and the head tied to the embeddings."""
    config = tiny_graph(AutoConfig.for_model("qwen3", tie_word_embeddings=True))
    config.vocab_size = 320
    module = AutoModel.from_config(config).float().eval()
    module.save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path)
    assert not any(name.startswith("model.") for name in load_file(tmp_path / "model.safetensors"))
    check(tmp_path, "cpu")


def test_embeddings_are_cut_then_normalized(tiny: Tiny) -> None:
    model = tiny("mixtral")
    full = wanted(model, "last")
    with opened(model) as engine:
        assert difference(engine.embed(PROMPTS), full) < TOLERANCE
        cut = engine.embed(PROMPTS, PoolingParams(dimensions=7))
        unit = engine.embed(PROMPTS, PoolingParams(dimensions=7, normalize=True))
        with pytest.raises(InputError, match="dimensions must be at most 48, the model's hidden size, not 49"):
            engine.embed(PROMPTS, PoolingParams(dimensions=49))
    assert difference(cut, full[:, :7]) < TOLERANCE
    assert difference(unit, cut / np.linalg.norm(cut, axis=1, keepdims=True)) < TOLERANCE


@pytest.mark.parametrize("pooling_type", thorough(["last", "mean", "cls"], but=["mean"]))
def test_prompts_are_embedded_beside_others(pooling_type: str, tiny: Tiny) -> None:
    """In the passes of requests that generate or are scored; a prefix that was computed before is reused where its
    hidden states are not pooled."""
    model = tiny("mixtral")
    prompt = PROMPTS[4] * 2
    prompts = [prompt, [*prompt[:-1], 5], *PROMPTS]
    pooling = PoolingParams(pooling_type=pooling_type)
    requests = [
        Request(index=n, token_ids=tuple(ids), sampling=PROMPT_ONLY, pooling=pooling) for n, ids in enumerate(prompts)
    ]
    how = SamplingParams(max_tokens=5, ignore_eos=True)
    others = [
        Request(index=n + 50, token_ids=tuple(ids), sampling=replace(how, prompt_logprobs=n % 2 or None))
        for n, ids in enumerate(prompts)
    ]
    with opened(model, kv_block_size=16) as engine:
        generated = engine.generate(prompts, how)
        result = {item.index: item for pair in [[*requests, *others]] for item in engine.run(pair)}
    embeddings = np.stack([result[n].embedding for n in range(len(prompts))])  # type: ignore[arg-type]
    assert difference(embeddings, wanted(model, pooling_type, prompts)) < TOLERANCE
    assert [result[n + 50].token_ids for n in range(len(prompts))] == [item.token_ids for item in generated]
    assert all(result[n + 50].embedding is None for n in range(len(prompts)))
    assert (result[0].cached_tokens > 0) == (pooling_type == "last")


def test_a_prompt_may_fill_the_context(tiny: Tiny) -> None:
    model = tiny("mixtral", max_position_embeddings=24)
    with opened(model) as engine:
        prompts = [list(range(3, 27))]
        assert difference(engine.embed(prompts), wanted(model, "last", prompts)) < TOLERANCE
        with pytest.raises(InputError, match="prompt 0: the prompt has 25 tokens, the model's context is 24"):
            engine.embed([list(range(3, 28))])


def test_messages_open_no_turn(tiny: Tiny) -> None:
    model, messages = tiny("mixtral"), [{"role": "user", "content": "hi"}]
    with opened(model) as engine:
        rendered = engine.embed({"messages": messages})
        text = engine.embed([{"prompt": "<user>hi\n"}])
    assert np.array_equal(rendered, text)


def test_hidden_states_that_are_not_finite_are_an_error(tiny: Tiny, tmp_path: Path) -> None:
    from tests.engine.test_not_finite import ILL, damaged

    model = damaged(tiny("mixtral"), tmp_path / "ill", "model.embed_tokens.weight", float("nan"), ILL)
    with opened(model) as engine:
        assert np.isfinite(engine.embed([[5, 6, 7]])).all()
        with pytest.raises(InputError, match="prompt 1: the model's hidden states are not finite"):
            engine.embed([[5, 6, 7], [5, ILL, 7]])


def of_sentence_transformers(source: Path, target: Path, *modules: str, **config: Any) -> Path:
    shutil.copytree(source, target)
    names = ["Transformer", "Pooling", *modules]
    listed = [
        {"idx": n, "name": str(n), "path": f"{n}_{name}" if n else "", "type": f"sentence_transformers.models.{name}"}
        for n, name in enumerate(names)
    ]
    (target / "modules.json").write_text(json.dumps(listed))
    (target / "1_Pooling").mkdir()
    (target / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **config}))
    return target


@pytest.mark.parametrize(
    ("config", "modules", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, (), {"pooling_type": "mean"}),
        ({"pooling_mode_lasttoken": True}, ("Normalize",), {"pooling_type": "last", "normalize": True}),
        ({"pooling_mode": "cls"}, ("Normalize",), {"pooling_type": "cls", "normalize": True}),
    ],
)
def test_the_default_is_that_of_sentence_transformers(
    config: dict[str, Any], modules: tuple[str, ...], pooling: dict[str, Any], tiny: Tiny, tmp_path: Path
) -> None:
    source = tiny("mixtral")
    with opened(source) as engine:
        expected = engine.embed(PROMPTS, PoolingParams(**pooling))
        other = engine.embed(PROMPTS, PoolingParams(**{**pooling, "normalize": False}))
    with opened(of_sentence_transformers(source, tmp_path / "model", *modules, **config)) as engine:
        assert np.array_equal(engine.embed(PROMPTS), expected)
        assert np.array_equal(engine.embed(PROMPTS, PoolingParams(normalize=False)), other)


@pytest.mark.parametrize(
    ("config", "modules", "message"),
    [
        ({"pooling_mode_max_tokens": True}, (), r"its pooling \(\['max'\]\) is not implemented"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, (), r"\(\['mean', 'cls'\]\)"),
        ({"pooling_mode": {"a": 1}}, (), "is not implemented; name one with --pooling"),
        ({}, (), r"its pooling \(\[\]\) is not implemented"),
        ({"pooling_mode_mean_tokens": True}, ("Dense",), "the module 'Dense' is not implemented"),
    ],
)
def test_other_pooling_is_refused_unless_one_is_named(
    config: dict[str, Any], modules: tuple[str, ...], message: str, tiny: Tiny, tmp_path: Path
) -> None:
    model = of_sentence_transformers(tiny("mixtral"), tmp_path / "model", *modules, **config)
    with opened(model) as engine:
        with pytest.raises(ConfigError, match=message):
            engine.embed(PROMPTS)
        assert len(engine.embed(PROMPTS, PoolingParams(pooling_type="mean"))) == len(PROMPTS)


@pytest.mark.parametrize(
    ("number", "pooling_type"), [(None, "last"), (0, "last"), (1, "mean"), (2, "cls"), (3, "last")]
)
def test_a_gguf_file_names_its_pooling(number: int | None, pooling_type: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", metadata={"llama.pooling_type": number})
    assert resolve_pooling(path, PoolingParams()) == PoolingParams(pooling_type=pooling_type, normalize=False)


def test_another_pooling_of_a_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank.gguf"
    write_gguf(path, "llama", metadata={"llama.pooling_type": 4})
    with pytest.raises(ConfigError, match="its pooling_type 4 is not implemented"):
        resolve_pooling(path, PoolingParams())
    asked = PoolingParams(pooling_type="mean", normalize=True)
    assert resolve_pooling(path, asked) == asked


@pytest.mark.parametrize("modules", ["{}", "[1]", "[", '[{"type": "a.Pooling", "path": "../1_Pooling"}]'])
def test_damaged_files_of_sentence_transformers_are_refused(modules: str, tiny: Tiny, tmp_path: Path) -> None:
    model = of_sentence_transformers(tiny("mixtral"), tmp_path / "model", pooling_mode="mean")
    (model / "modules.json").write_text(modules)
    with opened(model) as engine, pytest.raises(CheckpointError, match=r"modules\.json"):
        engine.embed(PROMPTS)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pooling_type": "max"}, "pooling_type must be last, mean or cls, not 'max'"),
        ({"dimensions": 0}, "dimensions must be an integer of at least 1, not 0"),
        ({"normalize": "yes"}, "normalize must be true or false, not 'yes'"),
    ],
)
def test_pooling_params_are_checked(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PoolingParams(**values)
