"""Dense models by pages, one a layer, through the whole engine: tokens of transformers' greedy search in float32 in
every order, with layers in memory and streamed, and on the twin of a GPU; log-probabilities; prefixes; refusals."""

from __future__ import annotations

from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("greenlet")

from safetensors.torch import load_file, save_file

from moelight.core.dtypes import BFLOAT16
from moelight.core.errors import CheckpointError, ConfigError
from moelight.core.policy import Policy, Shares
from moelight.core.request import SamplingParams
from moelight.core.schedule import Page
from moelight.engine.engine import Engine
from moelight.experts.options import ExpertOptions
from moelight.experts.policy import DEFAULT_POLICY
from moelight.hrm import costs
from moelight.models.checkpoints import open_model
from moelight.models.graph import self_test
from moelight.models.graph.model import GraphModel, on_meta
from tests.cases import exhaustive, thorough
from tests.engine.graphs import HOW, ORDERS, ORDERS_BY_NAME, SIZES, STREAMED, prompts, tokens

FAMILIES = {  # what each has that others have not
    "llama": "nothing",
    "qwen2": "biases of queries, keys and values",
    "qwen3": "norms of heads",
    "gemma2": "tied embeddings, windows in every other layer, soft caps, norms behind as well",
    "gemma3_text": "two rotary embeddings",
    "mistral": "windows",
    "phi3": "joined matrices",
    "olmo2": "norms of projections",
    "qwen3_5_text": "recurrent mixers, pages of several sizes",
    "gpt2": "transposed matrices, LayerNorm",
    "falcon_h1": "state spaces beside attention in each layer",
    "apertus": "parameters of activations",
}
QUICK = ("gemma2", "qwen3_5_text")
HOMES = (STREAMED, Shares(device=0.5, host=0.5), Shares(device=0.25, host=0.25, disk=0.5))


@pytest.mark.parametrize("family", thorough(FAMILIES, but=QUICK))
def test_a_dense_family_gives_the_tokens_of_transformers(family: str, checkpoints: Any) -> None:
    """Every layer comes from disk in every pass."""
    directory, expected = checkpoints(family)
    assert tokens(directory, weights=STREAMED) == expected


@pytest.mark.parametrize("schedule", thorough(["module", "flexgen", "serial"], but=["module"]))
def test_orders_without_a_gpu(schedule: str, checkpoints: Any) -> None:
    directory, expected = checkpoints("llama")
    assert tokens(directory, schedule=schedule, weights=Shares(host=0.25, disk=0.75)) == expected


@pytest.mark.parametrize("order", thorough(["cgopipe-gpu", "module-gpu", "flexgen-gpu"], but=["flexgen-gpu"]))
def test_orders_beside_a_gpu(order: str, checkpoints: Any) -> None:
    """Layers are on the device when they are computed."""
    schedule, attention, _, _ = ORDERS_BY_NAME[order]
    directory, expected = checkpoints("llama")
    result = tokens(
        directory, "twin", schedule=schedule, attention_device=attention, ffn_device="gpu", weights=HOMES[2]
    )
    assert result == expected


HOMES_BY_NAME = dict(zip(("streamed", "halves", "thirds"), HOMES, strict=True))
ON_THE_GPU = {order[0]: order for order in ORDERS if order[2] == "gpu"}
# Every order with every home, the families in turn.
IN_TURN = [(family, *pair) for family, pair in zip(cycle(FAMILIES), product(ON_THE_GPU, HOMES_BY_NAME), strict=False)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "order", "homes"), exhaustive(product(FAMILIES, ON_THE_GPU, HOMES_BY_NAME), but=IN_TURN)
)
def test_every_order_gives_the_same_tokens(family: str, order: str, homes: str, checkpoints: Any) -> None:
    directory, expected = checkpoints(family)
    schedule, attention, experts, _ = ON_THE_GPU[order]
    devices = {"attention_device": attention, "ffn_device": experts}
    assert tokens(directory, "twin", schedule=schedule, weights=HOMES_BY_NAME[homes], **devices) == expected


@pytest.mark.parametrize("device", ["cpu", "twin"])
def test_expert_policies_choose_nothing(device: str, checkpoints: Any) -> None:
    """Residents stay those of the plan, and the routing of every token to its layer can be recorded."""
    directory, expected = checkpoints("llama")
    gpu = {"ffn_device": "gpu", "weights": HOMES[2]} if device == "twin" else {"weights": Shares(host=0.5, disk=0.5)}
    options = ExpertOptions(policy=DEFAULT_POLICY, record=True)
    with Engine(Policy(model=str(directory), **SIZES, **gpu), device=device, experts=options) as engine:
        result = engine.generate(prompts(), HOW)
        assert engine.residents_reason == "every pass uses every layer of a dense model"
    assert [list(item.token_ids) for item in result] == expected


def test_prefixes_and_scores_are_those_of_transformers(checkpoints: Any) -> None:
    """Prompts that begin as the first does compute no shared block again."""
    from transformers import AutoModelForCausalLM

    directory, _ = checkpoints("llama")
    first = prompts()[1]
    asked, how = [first, [*first[:20], 7, 8]], SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    policy = Policy(model=str(directory), weights=STREAMED, kv_block_size=16, **SIZES)
    with Engine(policy, device="cpu") as engine:
        alone = [engine.generate([prompt], HOW)[0].token_ids for prompt in asked]
        together = engine.generate(asked * 3, HOW)
        scored = engine.generate(asked, how)
    assert sum(item.cached_tokens for item in together) >= 3 * 16
    assert [item.token_ids for item in together] == alone * 3
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for prompt, result in zip(asked, scored, strict=True):
        with torch.no_grad():
            wanted = torch.log_softmax(module(torch.tensor([prompt])).logits[0], dim=-1)
        for at, token in enumerate(prompt[1:], 1):
            assert result.prompt_logprobs[at][token].logprob == pytest.approx(float(wanted[at - 1, token]), abs=1e-4)


def test_a_page_is_what_runs_between_two_attentions(checkpoints: Any) -> None:
    """The output projection and feed-forward of a layer, and the next one's queries, keys and values; in the last layer
    no such, so its page is shorter. The stored runs are exactly those matrices."""
    directory, _ = checkpoints("llama")
    opened = open_model(str(directory))
    inner = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    then = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    count = opened.profile.num_layers
    for layer in range(count):
        wanted = {f"model.layers.{layer}.{name}.weight" for name in inner}
        wanted |= {f"model.layers.{layer + 1}.{name}.weight" for name in then if layer + 1 < count}
        assert {info.name for info in opened.weight_map.experts.pieces[Page(layer=layer, expert=0)]} == wanted
    names = {tensor.name for tensor in opened.profile.tensors}
    assert {"model.layers.0.self_attn.q_proj.weight", "model.layers.1.input_layernorm.weight"} <= names


def test_the_ledger_counts_each_matrix_once() -> None:
    """Llama 3.1 8B from its config alone: its parameters, and two flops a token for each number of its layers."""
    from transformers import AutoConfig

    from moelight.hrm.estimate import flops_per_token
    from moelight.hrm.inventory import inventory
    from moelight.models.graph.profile import profile_of

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}
    config = AutoConfig.for_model("llama", **sizes, dtype="bfloat16", tie_word_embeddings=False)
    profile = profile_of(GraphModel(on_meta(config)), name="it", where="config.json")
    parts = inventory(profile)
    assert parts.total_parameters == parts.active == 8_030_261_248
    assert parts.total_bytes == 2 * 8_030_261_248
    matrices = parts.total_parameters - 2 * 128256 * 4096 - 65 * 4096
    short = costs.page_elements(profile) - min(_page_numbers(profile).values())  # the last page is priced as the others
    assert flops_per_token(profile) == 2 * (matrices + short)
    assert short == 4096 * (4096 + 2 * 1024)
    resident = 2 * 128256 * 4096 + 4096 * (4096 + 2 * 1024) + 65 * 4096
    assert costs.dense_bytes(profile, BFLOAT16) == 2 * resident
    assert profile.num_moe_layers == 32
    assert costs.page_bytes(profile, BFLOAT16) == 2 * (3 * 4096 * 14336 + 4096 * (2 * 4096 + 2 * 1024))


def _page_numbers(profile: Any) -> dict[int, int]:
    result = dict.fromkeys(range(profile.num_layers), 0)
    for tensor in profile.page_tensors:
        result[tensor.layer] += tensor.elements
    return result


@pytest.mark.parametrize("experts", ["cpu", "split"])
def test_a_dense_layer_is_not_computed_beside_the_gpu(experts: str, checkpoints: Any) -> None:
    directory, _ = checkpoints("llama")
    with pytest.raises(ConfigError, match=f"ffn_device is '{experts}', but llama is dense"):
        tokens(directory, "twin", attention_device="gpu", ffn_device=experts)


def test_a_matrix_of_another_dtype_is_no_part_of_a_page(checkpoints: Any, tmp_path: Path) -> None:
    directory, _ = checkpoints("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    state = {key: item.bfloat16() for key, item in load_file(directory / "model.safetensors").items()}
    save_file({**state, name: state[name].float()}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    with pytest.raises(CheckpointError, match=f"{name}' .*F32.*others of its kind BF16"):
        open_model(str(tmp_path))


def test_the_self_test_finds_a_matrix_in_a_page_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no more than one page at a time, so a matrix that the next segment needs is missed."""
    from transformers import AutoConfig

    find = GraphModel._find_pages

    def moved(model: GraphModel) -> tuple[tuple[str, ...], ...]:
        first, second, *others = find(model)
        return ((*first, second[-1]), second[:-1], *others)

    config = AutoConfig.for_model("llama")
    assert self_test.self_test(config).differs is None
    monkeypatch.setattr(GraphModel, "_find_pages", moved)
    assert "model.layers.2.self_attn" in str(self_test.self_test(config).differs)


def test_plans_stream_layers_where_memory_is_short(checkpoints: Any) -> None:
    """The plan of the engine itself, in two thirds of what the model takes: tokens stay the same."""
    directory, expected = checkpoints("qwen3")
    planned = partial(Engine.from_pretrained, str(directory), device="cpu", batch_size=4)
    with planned(host_memory="1GiB") as engine:
        roomy = engine.policy
        assert roomy.weights.disk == 0
        assert [list(item.token_ids) for item in engine.generate(prompts(), HOW)] == expected
