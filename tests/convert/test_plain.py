"""GGUF files written back as safetensors: transformers loads the numbers that were there."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from gguf.quants import dequantize
from transformers import AutoModelForCausalLM

from moelight.cli.main import main
from moelight.convert.gguf_file import GGUFOptions, convert_to_gguf
from moelight.convert.gguf_vocabulary import SAMPLES
from moelight.convert.plain import PlainOptions, convert_to_plain
from moelight.core.errors import InputError
from moelight.engine.tokenizer import Tokenizer
from tests.cases import thorough
from tests.convert.families import save_family


@pytest.mark.parametrize(
    "name", thorough(["llama (Llama 3)", "gemma3", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe"], but=["gpt_oss"])
)
def test_there_and_back_is_the_same_checkpoint(name: str, tmp_path: Path) -> None:
    source, file, back = tmp_path / "source", tmp_path / "file.gguf", tmp_path / "back"
    source.mkdir()
    save_family(name, source)
    convert_to_gguf(GGUFOptions(model=str(source), output=file, file_type="F32"))
    result = convert_to_plain(PlainOptions(model=str(file), output=back, dtype="F32", shard_bytes=1 << 18))
    assert result.files > 1
    wanted, loaded = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (source, back))
    parameters = loaded.state_dict()
    assert parameters.keys() == wanted.state_dict().keys()
    for key, tensor in wanted.state_dict().items():
        assert torch.allclose(parameters[key], tensor, rtol=0, atol=1e-6), key  # norms plus one, and less one
    ids = torch.tensor([[3, 5, 7, 9, 11, 2] * 6])
    with torch.inference_mode():
        assert torch.allclose(loaded(ids).logits, wanted(ids).logits, atol=1e-4)
    theirs, ours = Tokenizer.of(file), Tokenizer.of(back)
    assert [ours.encode(text) for text in SAMPLES] == [theirs.encode(text) for text in SAMPLES]
    assert ours.eos_token_ids == theirs.eos_token_ids


@pytest.mark.thorough
def test_the_command_writes_the_numbers_of_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, file, out = tmp_path / "source", tmp_path / "file.gguf", tmp_path / "out"
    source.mkdir()
    save_family("qwen3", source, hidden_size=256, intermediate_size=512)
    convert_to_gguf(GGUFOptions(model=str(source), output=file, file_type="Q4_K_M"))
    arguments = ["convert", str(file), str(out), "--to", "safetensors", "--type", "f32"]
    assert main(arguments) == 0, capsys.readouterr().err
    assert main(arguments) == 0
    assert capsys.readouterr().out.count("1 of 1 files were there") == 1
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    down = tensors["blk.1.ffn_down.weight"]
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    stored = torch.from_numpy(dequantize(down.data, down.tensor_type))
    assert down.tensor_type != gguf.GGMLQuantizationType.F32
    assert torch.equal(loaded.model.layers[1].mlp.down_proj.weight, stored)
    with pytest.raises(InputError, match="other options"):
        convert_to_plain(PlainOptions(model=str(file), output=out, dtype="BF16"))
