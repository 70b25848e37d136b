"""The layer of multi-token prediction drafts what its formula in plain torch gives; completions stay the same."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from moelight.core.errors import ConfigError
from moelight.core.policy import Policy
from moelight.engine.batcher import RunningSequence
from moelight.engine.engine import Engine
from moelight.engine.prediction_drafts import PredictionDrafts
from moelight.models.graph.prediction import prediction_config
from tests.cases import thorough
from tests.engine import test_gguf_architectures as gguf_files
from tests.engine.test_speculation import GREEDY, PROMPTS, SAMPLED, SIZES, run
from tests.engines import Tiny

FAMILIES, GGUF_FILE = ["glm4_moe", "deepseek_v3"], "glm4moe of a GGUF file"


def with_layer(directory: Path, *, stored_head: bool) -> Any:
    """Add a random prediction layer to the checkpoint in ``directory``; returns what drafts by it: from the model and a
    sequence the next tokens."""
    config = AutoConfig.from_pretrained(directory)
    torch.manual_seed(5)
    layer = AutoModelForCausalLM.from_config(prediction_config(config), attn_implementation="eager").float().eval()
    hidden_size, number = config.hidden_size, config.num_hidden_layers
    norms = {name: 1 + 0.2 * torch.randn(hidden_size) for name in ("enorm", "hnorm")}
    projection = 0.2 * torch.randn(hidden_size, 2 * hidden_size)
    with torch.no_grad():
        for weight in layer.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.15)
    layer.save_pretrained(directory / "layer")
    stored, tensors = load_file(directory / "layer" / "model.safetensors"), load_file(directory / "model.safetensors")
    prefix = f"model.layers.{number}."
    for name, tensor in stored.items():
        if name.startswith("model.layers.0."):
            tensors[prefix + name.removeprefix("model.layers.0.")] = tensor
    tensors[f"{prefix}shared_head.norm.weight"] = stored["model.norm.weight"]
    if stored_head:
        tensors[f"{prefix}shared_head.head.weight"] = stored["lm_head.weight"]
        tensors[f"{prefix}embed_tokens.weight"] = stored["model.embed_tokens.weight"]
    for name, tensor in norms.items():
        tensors[f"{prefix}{name}.weight"] = tensor
    tensors[f"{prefix}eh_proj.weight"] = projection
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").float().eval()
    owner = layer if stored_head else model
    eps = config.rms_norm_eps

    def normed(rows: Tensor, weight: Tensor) -> Tensor:
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * weight

    @torch.no_grad()
    def drafts(token_ids: list[int], count: int) -> list[int]:
        ids = torch.tensor([token_ids])
        before = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        following, drafted = ids[:, 1:], list[int]()
        for _ in range(count):
            embedded = owner.model.embed_tokens(following)
            both = torch.cat((normed(embedded, norms["enorm"]), normed(before, norms["hnorm"])), dim=-1)
            final = layer.model(inputs_embeds=both @ projection.T, use_cache=False).last_hidden_state
            drafted.append(int(owner.lm_head(final[0, -1]).argmax()))
            before = torch.cat((before, final[:, -1:]), dim=1)
            following = torch.cat((following, torch.tensor([[drafted[-1]]])), dim=1)
        return drafted

    return drafts


def write_file(directory: Path, path: Path) -> None:
    """Write the checkpoint of glm4_moe in ``directory`` with its prediction layer as llama.cpp's converter does."""
    header, config = gguf_files.HEADERS["glm4moe"], AutoConfig.from_pretrained(directory)
    number = config.num_hidden_layers
    writer = gguf.GGUFWriter(path, "glm4moe")
    for key, value in {**header["keys"], "block_count": number + 1, "nextn_predict_layers": 1}.items():
        gguf_files.add_value(writer, f"glm4moe.{key}", value)
    gguf_files.write_vocabulary(writer, directory)
    tensors = gguf_files.checkpoint_tensors("glm4moe", directory)
    names, prefix = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, number + 1), f"model.layers.{number}."
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in sorted(load_file(directory / "model.safetensors").items()):
        if expert := re.fullmatch(rf"{prefix}mlp\.experts\.\d+\.(gate|up|down)_proj\.weight", name):
            stacks.setdefault(f"blk.{number}.ffn_{expert[1]}_exps.weight", []).append(tensor)
        elif name.startswith(prefix):
            listed = names.get_name(name.replace("_correction_bias", "_correction.bias"), (".weight", ".bias"))
            assert listed is not None, name
            tensors[listed] = tensor.numpy()
    for name, values in {**tensors, **{name: torch.stack(stack).numpy() for name, stack in stacks.items()}}.items():
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("family", thorough([*FAMILIES, GGUF_FILE], but=["glm4_moe", GGUF_FILE]))
@pytest.mark.parametrize("stored_head", thorough([True, False], but=[True]), ids=["stored head", "shared head"])
def test_drafts_are_those_of_the_formula(
    family: str, stored_head: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path
    if family == GGUF_FILE:
        gguf_files.architectures.save_checkpoint("glm4moe", tmp_path)
    else:
        from tests.engine.graphs import made

        made(tmp_path, family)
    expected = with_layer(tmp_path, stored_head=stored_head)
    if family == GGUF_FILE:
        model = tmp_path / "tiny.gguf"
        write_file(tmp_path, model)
    compared: list[tuple[list[int], list[int]]] = []
    draft = PredictionDrafts.draft

    def noted(self: PredictionDrafts, asked: Iterable[tuple[RunningSequence, int]]) -> Any:
        counts = dict(asked)
        result = draft(self, counts.items())
        for owner, tokens in result.items():
            compared.append(([*owner.request.token_ids, *owner.generated], list(tokens)))
        return result

    monkeypatch.setattr(PredictionDrafts, "draft", noted)
    policy = Policy(model=str(model), **SIZES, weight_dtype="float32")
    options = {"speculate": "mtp", "num_speculative_tokens": 2, "prefix_caching": False}
    sampling = replace(GREEDY, max_tokens=20)
    max_others = sorted(map(len, PROMPTS))[-2] + 20
    answers, stats = run(policy, sampling, **options)
    assert answers == run(policy, sampling, prefix_caching=False)[0]
    assert stats.counts["mtp_drafted_tokens"] == stats.counts["drafted_tokens"] > 100
    # Those of the prompt that is computed in several passes, and some others; sums are in another order.
    some = [entry for entry in compared if len(entry[0]) > max_others][::4] + compared[::9]
    equal = [expected(token_ids, len(tokens)) == tokens for token_ids, tokens in some]
    assert len(equal) > 15 and equal.count(False) <= 1
    assert run(policy, SAMPLED, **options)[0] == run(policy, SAMPLED, prefix_caching=False)[0]


def test_a_checkpoint_without_the_layer_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.3\.eh_proj"):
        Engine(Policy(model=str(tiny("mixtral"))), device="cpu", speculate="mtp")
    gguf_files.architectures.save_checkpoint("glm4moe", tmp_path)
    gguf_files.write_file("glm4moe", tmp_path, tmp_path / "tiny.gguf")
    with pytest.raises(ConfigError, match=r"no tensor blk\.4\.nextn\.eh_proj"):
        Engine(Policy(model=str(tmp_path / "tiny.gguf")), device="cpu", speculate="mtp")
