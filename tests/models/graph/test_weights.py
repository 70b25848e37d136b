"""What a graph model holds is bit for bit what transformers loads, in either spelling; damage is refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("greenlet")

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.core_model_loading import Transpose, WeightConverter

from moelight.core.errors import CheckpointError, ConfigError
from moelight.core.schedule import Page
from moelight.models.expert import Expert
from moelight.models.graph.families import OUTSIDE, ExpertForm, Projection, interface_form
from moelight.models.graph.model import GraphModel, on_meta
from moelight.models.graph.self_test import tiny
from moelight.models.graph.support import moe_families
from moelight.models.graph.weights import GraphWeightMap, fill_weights, locate_weights, paged
from moelight.models.pages import PagedExperts
from moelight.weights.load import TensorReader
from moelight.weights.torch_dtypes import to_torch
from tests.cases import exhaustive, thorough
from tests.models.graph.released import RELEASED

# Every way that experts lie: loose and fused, transposed, interleaved, biased, in rows, without a gate, of two kinds.
USUAL = (
    "qwen2_moe",
    "gpt_oss",
    "dbrx",
    "deepseek_v3",
    "granitemoe",
    "inkling2_text",
    "jamba",
    "jetmoe",
    "llama4",
    "longcat_flash",
    "nemotron_h",
    "qwen3_5_moe",
)
# Families whose config has a vision tower, by their language models: the tower is of the size of the released one.
TEXT = ("dots3_note_text", "inkling2_text")
MORE = ("aria_text", "gemma4_text", "inkling_text", "kimi_k25", "llama4_text", "minimax_m3_vl_text", "qwen3_5_moe_text")
# Not run, no causal language model, or no experts that are matrices.
WITHOUT = (
    "diffusion_gemma",
    "doge",
    "inkling2_loop",
    "nllb_moe",
    "nllb-moe",
    "openai_privacy_filter",
    "switch_transformers",
)
ALL = sorted({*moe_families().values(), *TEXT, *MORE} - {*WITHOUT, "dots3_note", "inkling2"})
# With experts, and fewer layers where all are alike but tiny models keep them all.
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "gemma4_text": RELEASED["gemma4"]["text_config"],
    "llama4": {"text_config": {"num_hidden_layers": 2}},
    "llama4_text": {"num_hidden_layers": 2},
    "longcat_flash": {"num_layers": 2},
}
EXPERTS = ("DbrxExperts", "JetMoeMoE", "Llama4TextExperts", "LongcatFlashExperts", "Step3p7Experts")


class Graph:
    """The module of a config on the meta device and its experts, in the order of modules."""

    def __init__(self, config: Any) -> None:
        self.module = on_meta(config).eval()
        self.experts = tuple(part for part in self.module.modules() if _holds_experts(part))
        self.forms = tuple(_form(part) for part in self.experts)
        self.moe_layers = (False, *[True] * len(self.experts))
        self.pages = ()
        self.multiplied = frozenset()


def _holds_experts(part: nn.Module) -> bool:
    return type(part).__name__ in EXPERTS or hasattr(part, "has_post_expert_norm")


def _form(part: nn.Module) -> ExpertForm:
    outside = OUTSIDE.get(type(part).__name__)
    return outside.form(part) if outside else interface_form(part)


def tiny_config(family: str, **options: Any) -> Any:
    """A tiny config of ``family``, its encoders too."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    config = AutoConfig.for_model(family, **{**RELEASED.get(family, {}), **CHANGES.get(family, {}), **options})
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None and part is not config.get_text_config():
            setattr(config, name, tiny(part))
    return tiny(config)


def tiny_module(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A tiny model of ``family`` with random weights and buffers."""
    torch.manual_seed(0)
    config = tiny_config(family, **options)
    config.dtype = dtype
    # With its encoders, if it has some.
    auto = AutoModelForImageTextToText
    module = (auto if type(config) in auto._model_mapping else AutoModelForCausalLM).from_config(config).eval()
    stored = module.state_dict(keep_vars=True)
    with torch.no_grad():
        for tensor in stored.values():
            tensor.normal_(0, 0.1) if tensor.is_floating_point() else tensor.random_(0, 3)
    return module


def save(module: Any, directory: Path, *, new: bool = False, sharded: bool = False) -> Path:
    size = "300KB" if sharded else "5GB"
    module.save_pretrained(directory, save_original_format=not new, max_shard_size=size)
    return directory


def expected(directory: Path) -> Any:
    """What transformers loads."""
    auto = AutoModelForCausalLM
    if type(AutoConfig.from_pretrained(directory)) not in auto._model_mapping:
        auto = AutoModelForImageTextToText
    return auto.from_pretrained(directory)


def opened(directory: Path) -> tuple[Graph, GraphWeightMap]:
    graph = Graph(AutoConfig.from_pretrained(directory))
    return graph, locate_weights(directory, graph)


def filled(directory: Path, dtype: torch.dtype | None = None) -> tuple[Graph, GraphWeightMap]:
    graph, result = opened(directory)
    dtype = dtype or to_torch(result.dtype)
    arena = torch.full((result.dense_bytes(dtype),), 0xFF, dtype=torch.uint8)
    fill_weights(graph, result, arena, dtype)
    return graph, result


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def read_page(result: GraphWeightMap, page: Page) -> Tensor:
    runs = result.experts.pieces[page]
    with TensorReader([run.file for run in runs], result.dtype) as reader:
        pieces = [torch.empty(run.nbytes, dtype=torch.uint8) for run in runs]
        for run, piece in zip(runs, pieces, strict=True):
            reader.fill(run, 0, piece)
    full = torch.cat(pieces)
    assert full.numel() == result.experts.bytes_of(page)
    return full


def matrices(form: ExpertForm, module: nn.Module, expert: int) -> dict[str, Tensor]:
    """An expert's matrices, of what transformers loaded, by their names in a layout."""
    page = form.page(module, expert)
    names = ("gate", "up") if form.gated else ("up",)

    def upright(item: Projection) -> Tensor:
        return page[item.name].T if item.transposed else page[item.name]

    def two(parts: list[Tensor]) -> list[Tensor]:
        if len(parts) == len(names):
            return parts
        return [parts[0][0::2], parts[0][1::2]] if form.interleaved else list(parts[0].chunk(2))

    result = dict(zip(names, two([upright(item) for item in form.inward]), strict=True))
    result["down"] = upright(form.outward)
    if form.outward.bias:
        biases = two([page[item.bias] for item in form.inward if item.bias])
        result |= {f"{name}_bias": bias for name, bias in zip(names, biases, strict=True)}
        result["down_bias"] = page[form.outward.bias]
    return result


def part_of(expert: Expert, name: str, *, gated: bool) -> Tensor:
    """The matrix or bias ``name`` of ``expert``, whose gate and up may be one."""
    matrix, _, end = name.partition("_")
    end = end and f"_{end}"
    first, up = getattr(expert, f"gate_up{end}"), getattr(expert, f"up{end}")
    if matrix == "down" or (matrix == "up" and up is not None):
        return getattr(expert, name)
    if not gated or up is not None:
        return first
    halves = (first[0::2], first[1::2]) if expert.interleaved else first.chunk(2)
    return halves[matrix == "up"]


def assert_the_same(directory: Path) -> None:
    theirs = expected(directory)
    graph, result = filled(directory)
    ours, wanted = tensors(graph.module), tensors(theirs)
    in_pages = {path for _, _, paths in paged(graph) for path in paths.values()}
    for name, tensor in ours.items():
        if name in in_pages:
            assert tensor.is_meta, name
        elif name.endswith("balancing_biases"):  # the last is what transformers sets whatever the checkpoint says
            assert torch.equal(tensor[:-1], wanted[name][:-1])
        else:
            assert tensor.dtype == wanted[name].dtype, name
            assert torch.equal(tensor, wanted[name]), name
    paths = {part: path for path, part in graph.module.named_modules()}
    count, experts = 0, PagedExperts(result.experts)
    for layer, (part, form) in enumerate(zip(graph.experts, graph.forms, strict=True), start=1):
        for expert in range(form.count):
            page = Page(layer=layer, expert=expert)
            (in_page,) = experts.of_layout(result.experts.layout_ids[page], [read_page(result, page)])
            for name, matrix in matrices(form, theirs.get_submodule(paths[part]), expert).items():
                assert torch.equal(part_of(in_page, name, gated=form.gated), matrix), (layer, expert, name)
            count += 1
    assert count == len(result.experts.pieces) > 0


@pytest.mark.parametrize("new", thorough([False, True], but=[True]), ids=["old", "new"])
@pytest.mark.parametrize("family", USUAL)
def test_all_weights_are_those_that_transformers_loads(family: str, new: bool, tmp_path: Path) -> None:
    dtype = torch.float32 if new else torch.bfloat16
    assert_the_same(save(tiny_module(family, dtype), tmp_path, new=new, sharded=new))


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "dtype"), exhaustive(product(ALL, DTYPES), but=[*zip(ALL, cycle(DTYPES))]))
def test_all_weights_of_every_family(family: str, dtype: str, tmp_path: Path) -> None:
    module = tiny_module(family, DTYPES[dtype])
    for new in (False, True):
        assert_the_same(save(module, tmp_path / str(new), new=new, sharded=new))


def test_the_graph_and_the_page_reader_take_them(tmp_path: Path) -> None:
    directory = save(tiny_module("qwen3_moe"), tmp_path)
    model = GraphModel.from_config(directory)
    result = locate_weights(directory, model)
    arena = torch.empty(result.dense_bytes(torch.float32), dtype=torch.uint8)
    fill_weights(model, result, arena, torch.float32)
    begin, end = arena.data_ptr(), arena.data_ptr() + arena.numel()
    state = model.module.state_dict()
    places = [(item.data_ptr(), item.data_ptr() % 64) for name, item in state.items() if not item.is_meta]
    assert all(begin <= position < end and offset == begin % 64 for position, offset in places)
    assert len(places) == len(result.dense)
    layers = result.experts.ids_by_layer
    assert [layer in layers for layer in range(len(model.moe_layers))] == list(model.moe_layers)
    assert [list(layout.parts) for layout in result.experts.layouts] == [["gate_up", "down"]]


def test_weights_are_rounded_to_the_dtype_of_the_computation(tmp_path: Path) -> None:
    directory = save(tiny_module("qwen2_moe", torch.bfloat16), tmp_path)
    stored = tensors(expected(directory))
    for dtype in (torch.float32, torch.float16):
        for name, tensor in tensors(filled(directory, dtype)[0].module).items():
            if not tensor.is_meta and "inv_freq" not in name:
                assert tensor.dtype == dtype
                assert torch.equal(tensor, stored[name].to(dtype)), name


def test_numbers_beyond_float16_are_refused(tmp_path: Path) -> None:
    directory = save(tiny_module("qwen2_moe"), tmp_path)
    edit(directory, lambda state: state["model.norm.weight"].fill_(1e6))
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' has numbers that float16 does not hold"):
        filled(directory, torch.float16)


def test_a_router_bias_stays_float32_among_bfloat16(tmp_path: Path) -> None:
    for family in ("deepseek_v3", "minimax_m2"):
        directory = save(tiny_module(family, torch.bfloat16), tmp_path / family)
        exact = torch.rand(8)

        def widen(state: dict[str, Tensor], exact: Tensor = exact) -> None:
            state.update({name: exact.clone() for name in state if name.endswith("e_score_correction_bias")})

        edit(directory, widen)
        graph, result = filled(directory)
        buffers = [buffer for name, buffer in graph.module.named_buffers() if name.endswith("e_score_correction_bias")]
        assert result.dtype.name == "bfloat16"
        assert buffers and all(torch.equal(buffer, exact) for buffer in buffers)


@pytest.mark.skipif(transformers.__version__.startswith("5.20."), reason="it asks for all of them")
def test_a_buffer_that_checkpoints_may_lack_is_initialised(tmp_path: Path) -> None:
    directory = save(tiny_module("axk1", num_hidden_layers=2), tmp_path)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    edit(directory, lambda state: state.pop(bias))
    graph, result = filled(directory)
    assert result.initial == (bias,)
    assert torch.equal(graph.module.get_buffer(bias), torch.zeros(8))
    assert_the_same(directory)


def test_tied_weights_have_one_place(tmp_path: Path) -> None:
    directory = save(tiny_module("qwen2_moe", tie_word_embeddings=True), tmp_path)
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    assert head not in load_file(directory / SINGLE)
    graph, result = filled(directory)
    assert graph.module.lm_head.weight is graph.module.model.embed_tokens.weight
    assert sum(len(tensor.names) == 2 for tensor in result.dense) == 1
    edit(directory, lambda state: state.update({head: state[embed].clone()}))
    twice, again = filled(directory)
    assert torch.equal(twice.module.lm_head.weight, graph.module.lm_head.weight)
    assert again.dense_bytes(torch.float32) == result.dense_bytes(torch.float32)
    edit(directory, lambda state: state.pop(embed))
    assert torch.equal(filled(directory)[0].module.model.embed_tokens.weight, graph.module.lm_head.weight)
    edit(directory, lambda state: state.update({embed: state[head] + 1}))
    with pytest.raises(CheckpointError, match="differs from"):
        filled(directory)


SINGLE = "model.safetensors"
EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"


def edit(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    state = load_file(directory / SINGLE)
    change(state)
    save_file(state, directory / SINGLE)


def fuse(state: dict[str, Tensor]) -> None:
    state["model.layers.1.mlp.experts.down_proj"] = torch.stack([state[EXPERT.format(e, "down")] for e in range(8)])


def one_more(state: dict[str, Tensor]) -> None:
    state.update({EXPERT.format(8, part): state[EXPERT.format(7, part)].clone() for part in ("gate", "up", "down")})


DAMAGE: Mapping[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "an expert's matrix is missing": (lambda state: state.pop(EXPERT.format(3, "up")), EXPERT.format(3, "up")),
    "the last expert is missing": (lambda state: state.pop(EXPERT.format(7, "down")), r"experts\.0\.down_proj.* make "),
    "a matrix of all experts is missing": (
        lambda state: [state.pop(EXPERT.format(e, "up")) for e in range(8)],
        EXPERT.format(0, "up"),
    ),
    "all experts of a layer are missing": (
        lambda state: [state.pop(EXPERT.format(e, part)) for e in range(8) for part in ("gate", "up", "down")],
        r"model\.layers\.1\.mlp\.experts\.gate_up_proj' \[8, 64, 64\] is missing.*1 more fault",
    ),
    "a norm is missing": (lambda state: state.pop("model.norm.weight"), r"'model\.norm\.weight' \[64\] is missing"),
    "one expert too many": (one_more, r"make .* \[9, 64, 64\], but config\.json asks for \[8, 64, 64\].*1 more fault"),
    "an expert of another width": (
        lambda state: state.update({EXPERT.format(5, "gate"): torch.zeros(31, 64)}),
        rf"{EXPERT.format(5, 'gate')}' \(F32 \[31, 64\]\) differs from",
    ),
    "a norm of another width": (
        lambda state: state.update({"model.norm.weight": torch.zeros(63)}),
        r"'model\.norm\.weight' has shape \[63\], but config\.json asks for \[64\]",
    ),
    "a tensor is left over": (
        lambda state: state.update({"model.layers.9.input_layernorm.weight": torch.zeros(64)}),
        r"'model\.layers\.9\.input_layernorm\.weight' \[64\] has no place .*qwen2_moe, num_hidden_layers 4",
    ),
    "experts are stored twice": (fuse, "two spellings of the same weights"),
    "an expert of another dtype": (
        lambda state: state.update({EXPERT.format(0, "down"): torch.zeros(64, 32, dtype=torch.bfloat16)}),
        r"\(F32 \[64, 32\]\) differs from .*\(BF16",
    ),
    "an unsupported dtype": (
        lambda state: state.update({EXPERT.format(0, "up"): torch.zeros(32, 64, dtype=torch.float8_e4m3fn)}),
        rf"{EXPERT.format(0, 'up')}' has dtype F8_E4M3; supported: F32, BF16, F16",
    ),
    "whole numbers": (
        lambda state: state.update({"model.norm.weight": torch.zeros(64, dtype=torch.int64)}),
        r"'model\.norm\.weight' has dtype I64; supported",
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_module("qwen2_moe"), tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_by_name(damage: str, good: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(good, tmp_path / "damaged")
    change, says = DAMAGE[damage]
    edit(directory, change)
    with pytest.raises(CheckpointError, match=says) as caught:
        opened(directory)
    assert "\n" not in str(caught.value)


def test_what_computes_no_weights_is_refused_by_name(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Halve(Transpose):
        def convert(self, input_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
            return {"mlp.experts.down_proj": torch.stack(next(iter(input_dict.values()))) / 2}

    converting(monkeypatch, [Halve()])
    with pytest.raises(CheckpointError, match=r"becomes .*down_proj' by the operation div, which moelight does not do"):
        opened(good)


def test_experts_whose_bytes_are_apart_are_refused_by_name(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def together(state: dict[str, Tensor]) -> None:
        for layer in range(4):
            parts = [state.pop(f"model.layers.{layer}.mlp.experts.{e}.down_proj.weight") for e in range(8)]
            state[f"model.layers.{layer}.mlp.experts.all_down"] = torch.stack(parts, dim=1)

    directory = shutil.copytree(good, good.parent / "apart")
    edit(directory, together)
    converting(monkeypatch, [Transpose(0, 1)], source="mlp.experts.all_down")
    with pytest.raises(CheckpointError, match=r"all_down': the bytes of expert 0 are not together"):
        opened(directory)


def converting(monkeypatch: pytest.MonkeyPatch, operations: list[Any], source: str = "") -> None:
    """Let transformers' rules make down_proj by ``operations``, of ``source`` or of the usual tensors."""
    from transformers import conversion_mapping

    usual = conversion_mapping.get_model_conversion_mapping
    down = "mlp.experts.down_proj"

    def mapping(*inputs: Any, **named: Any) -> list[Any]:
        converter = WeightConverter(source or "mlp.experts.*.down_proj.weight", down, operations=operations)
        return [converter, *(item for item in usual(*inputs, **named) if item.target_patterns != [down])]

    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", mapping)


def test_buffers_that_nothing_computes_are_named(good: Path) -> None:
    graph, result = opened(good)
    graph.module.model.register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(ConfigError, match=r"'table' of Qwen2MoeModel is neither stored nor computed"):
        fill_weights(graph, result, torch.empty(result.dense_bytes(torch.float32), dtype=torch.uint8), torch.float32)
