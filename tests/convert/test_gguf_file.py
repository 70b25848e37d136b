"""Checkpoints written as GGUF files: the tokens, types and texts of the checkpoint, read back by the package's own
reader; `gguf_peer` compares llama.cpp's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from moelight.cli.main import main
from moelight.convert.gguf_file import GGUFOptions, WrittenGGUF, convert_to_gguf
from moelight.convert.gguf_metadata import check_read_back, metadata_of, written_family
from moelight.convert.gguf_types import FILE_TYPES, Mixture
from moelight.convert.gguf_vocabulary import SAMPLES, vocabulary_of
from moelight.convert.k_quants import K_TYPES, quantize_k
from moelight.core.errors import CheckpointError, ConfigError, UserError
from moelight.engine.tokenizer import Tokenizer as OurTokenizer
from moelight.models.graph.model import config_of
from moelight.profiles.gguf import read_gguf
from tests.cases import thorough
from tests.convert.families import NAMES, save_family
from tests.engine import gguf_architectures as architectures

USUAL = ("gpt_oss",)


def written(directory: Path, file_type: str, name: str = "tiny.gguf") -> tuple[Path, WrittenGGUF]:
    out = directory / "out" / name
    out.parent.mkdir(exist_ok=True)
    return out, convert_to_gguf(GGUFOptions(model=str(directory), output=out, file_type=file_type))


@pytest.mark.parametrize("name", thorough(NAMES, but=USUAL))
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    save_family(name, tmp_path)
    out, _ = written(tmp_path, "F32")
    assert architectures.tokens_of(out) == architectures.wanted_tokens(tmp_path)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose rows are blocks of 256, with eight experts a layer."""
    directory = tmp_path_factory.mktemp("wide")
    save_family("mixtral", directory, hidden_size=256, intermediate_size=256, head_dim=64, num_local_experts=8)
    return directory


@pytest.mark.parametrize("file_type", thorough(FILE_TYPES, but=("Q4_K_M",)))
def test_a_quantised_file_has_the_tokens_of_its_values(file_type: str, wide: Path, tmp_path: Path) -> None:
    out = tmp_path / "quantised.gguf"
    result = convert_to_gguf(GGUFOptions(model=str(wide), output=out, file_type=file_type))
    if file_type == "Q4_K_M":
        assert result.types.keys() == {"F32", "Q4_K", "Q5_K", "Q6_K", "Q8_0"}
    reader = gguf.GGUFReader(out)
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType[FILE_TYPES[file_type][0]]
    plain = gguf.GGUFWriter(tmp_path / "values.gguf", "llama")
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            kind, *inner = field.types
            plain.add_key_value(field.name, field.contents(), kind, inner[0] if inner else None)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        plain.add_tensor(tensor.name, np.ascontiguousarray(values, dtype=np.float32))
    plain.write_header_to_file()
    plain.write_kv_data_to_file()
    plain.write_tensors_to_file()
    plain.close()
    assert architectures.tokens_of(out) == architectures.tokens_of(tmp_path / "values.gguf")


@pytest.mark.parametrize(
    ("kind", "share"), [("Q2_K", 0.4), ("Q3_K", 0.2), ("Q4_K", 0.1), ("Q5_K", 0.05), ("Q6_K", 0.025)]
)
def test_k_types_round_well_and_again_to_nearly_the_same(kind: str, share: float) -> None:
    """``share``: of the root mean square of the numbers, the most that the error's may be."""
    values = torch.randn(24, 512, generator=torch.Generator().manual_seed(0)) * 0.02
    values[3] = 0
    values[4, :256] = 0.01
    values[5] *= torch.linspace(0, 100, 512)
    number = gguf.GGMLQuantizationType[kind]

    def rounded(weights: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(dequantize(quantize_k(weights, kind).numpy(), number))

    once = rounded(values)
    assert torch.equal(once[3], values[3])
    error = (once - values).square().mean(-1).sqrt() / values.square().mean(-1).sqrt().clamp_min(1e-9)
    assert error.max() < share
    again = (rounded(once) - once).square().mean(-1).sqrt() / values.square().mean(-1).sqrt().clamp_min(1e-9)
    assert again.max() < share / 2
    assert set(K_TYPES) == {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}


def test_the_mixture_of_a_published_file() -> None:
    """Gemma 3 270M in Q4_K_M, as llama-quantize wrote it: 640 columns are no blocks of 256."""
    mixture = Mixture(file_type="Q4_K_M", layers=18, experts=0, queries_per_key=4, tied=True)
    shapes = {"attn_q": (1024, 640), "attn_k": (256, 640), "attn_v": (256, 640), "attn_output": (640, 1024)}
    shapes |= {"ffn_gate": (2048, 640), "ffn_up": (2048, 640), "ffn_down": (640, 2048), "attn_norm": (640,)}
    types = {
        (layer, name): mixture.type_of(f"blk.{layer}.{name}.weight", shape)
        for layer in range(18)
        for name, shape in shapes.items()
    }
    counts = {kind: list(types.values()).count(kind) for kind in set(types.values())}
    assert counts == {"Q5_0": 81, "Q8_0": 9, "Q4_K": 27, "Q6_K": 9, "F32": 18}
    assert [layer for layer in range(18) if types[layer, "ffn_down"] == "Q6_K"] == [0, 1, 4, 7, 10, 13, 15, 16, 17]
    assert mixture.type_of("token_embd.weight", (262144, 640)) == "Q8_0"


@pytest.mark.thorough
def test_a_conversion_goes_on_where_it_was_interrupted(wide: Path, tmp_path: Path) -> None:
    options = [GGUFOptions(model=str(wide), output=tmp_path / name, file_type="Q8_0") for name in ("a.gguf", "b.gguf")]

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_to_gguf(options[0], interrupt)
    assert not options[0].output.exists()
    result = convert_to_gguf(options[0])
    assert 0 < result.tensors_before < result.tensors
    assert convert_to_gguf(options[1]).tensors_before == 0
    assert options[0].output.read_bytes() == options[1].output.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "b.gguf"]


def test_a_gguf_file_is_written_in_another_type(wide: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    convert_to_gguf(GGUFOptions(model=str(wide), output=first, file_type="Q8_0"))
    convert_to_gguf(GGUFOptions(model=str(first), output=second, file_type="F32"))
    one, other = gguf.GGUFReader(first), gguf.GGUFReader(second)
    for tensor, plain in zip(one.tensors, other.tensors, strict=True):
        assert tensor.name == plain.name
        assert np.array_equal(dequantize(tensor.data, tensor.tensor_type), plain.data)
    metadata = [
        {
            key: value
            for key, value in read_gguf(path).metadata.items()
            if key not in ("general.name", "general.file_type")
        }
        for path in (first, second)
    ]
    assert metadata[0] == metadata[1]


def test_the_command_writes_a_file_with_tokenizer_and_template(
    wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    source = tmp_path / "source"
    source.mkdir()
    for path in wide.iterdir():
        if path.is_file():
            (source / path.name).symlink_to(path)
    (source / "chat_template.jinja").write_text(template)
    out = tmp_path / "model.gguf"
    assert main(["convert", str(source), str(out), "--to", "gguf", "--type", "q4_0"]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.startswith(f"{out}: ")
    theirs, ours = OurTokenizer.of(source), OurTokenizer.of(out)
    assert ours.template is not None and ours.template.sources == {"default": template}
    assert [ours.encode(text) for text in SAMPLES] == [theirs.encode(text) for text in SAMPLES]
    assert ours.eos_token_ids >= theirs.eos_token_ids


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--to gguf", "needs a --type: F32, "),
        ("--to gguf --type Q4_K_X", "did you mean 'Q4_K_"),
        ("--to gguf --type IQ2_XS", "is not written"),
        ("--to gguff --type Q8_0", "did you mean 'gguf'"),
        ("--type Q8_0", "give --to gguf"),
        ("--to gguf --type Q8_0 --experts int8", "contradict each other"),
    ],
)
def test_contradictions_are_refused(
    arguments: str, told: str, wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(wide), str(tmp_path / "out.gguf"), *arguments.split()]) == 2
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_a_file_cannot_state_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    save_family("qwen3_moe", tmp_path, norm_topk_prob=False)
    with pytest.raises(ConfigError, match="norm_topk_prob is 'False', which files of qwen3moe do not state"):
        written(tmp_path, "F32")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "gpt_neox"}))
    with pytest.raises(UserError, match="gpt_neox is not written as GGUF; written are arcee, "):
        written(tmp_path, "F32")
    assert list((tmp_path / "out").iterdir()) == []


_QWEN = {"max_window_layers": 21, "sliding_window": 32768, "use_sliding_window": False, "rope_theta": 1000000.0}
_YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
}
# What published configs state beside sizes: fields without effect, of older releases, and of other programs.
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen2": _QWEN,
    "qwen2_moe": {**_QWEN, "norm_topk_prob": False, "decoder_sparse_step": 1, "output_router_logits": False},
    "llama": {"is_llama_config": True, "rope_interleaved": False, "rope_scaling": None, "pretraining_tp": 1},
    "mistral": {"sliding_window": None, "rope_theta": 1000000.0},
    "deepseek_v2": {
        "moe_layer_freq": 1,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "rope_scaling": _YARN,
    },
    "glm4_moe": {"head_dim": 128, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "use_qk_norm": False},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_as_they_are_published_are_written(name: str) -> None:
    config = config_of({"model_type": name, "num_hidden_layers": 2, **PUBLISHED[name]}, where="here")
    family = written_family(config, where="here")
    tensors = ["output.weight", "blk.0.attn_output.weight", "blk.1.attn_output.weight"]
    check_read_back(config, family, metadata_of(config, family), tensors, where="here")


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_vocabulary_keeps_its_ids(prefix: bool, tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefgThequickbrown"]
    vocabulary = {text: number for number, text in enumerate(dict.fromkeys(tokens))}
    merges = [("T", "h"), ("Th", "e"), ("▁", "The"), ("q", "u"), ("b", "r"), ("▁", "qu"), ("▁", "br")]
    for merge in merges:
        vocabulary["".join(merge)] = len(vocabulary)
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Prepend("▁")] if prefix else []
    inner.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends = [decoders.Strip(" ", 1, 0)] if prefix else []
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}')
    theirs = OurTokenizer.from_dir(tmp_path)
    metadata = vocabulary_of(theirs, len(vocabulary) + 5, where="here")
    assert metadata["tokenizer.ggml.model"] == "llama" and metadata["tokenizer.ggml.add_space_prefix"] is prefix
    ours = OurTokenizer.from_metadata(metadata, "here")
    for text in (*SAMPLES, "The quick brown", " The", "a</s>b"):
        assert ours.encode(text) == theirs.encode(text)
    with pytest.raises(CheckpointError, match="and its embeddings 10"):
        vocabulary_of(theirs, 10, where="here")
