"""A random GGUF file in which the types of experts differ, as in "dynamic" files of few bits, or with one type of few
bits for all of them.

Gate, up and down of most layers are IQ2_XXS, IQ2_XS and IQ3_XXS, every fourth layer is Q4_K; all else is Q8_0 or
float32. Codes are drawn, not rounded, so that no importance matrix is needed.
"""

from __future__ import annotations

import math
import tempfile
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from make_checkpoint import make_checkpoint

from moelight.convert.gguf_contents import GGUFTensor, contents_of
from moelight.convert.gguf_file import ggml_blocks
from moelight.convert.gguf_vocabulary import vocabulary_of
from moelight.engine.tokenizer import Tokenizer

EXPERTS = {"gate": "IQ2_XXS", "up": "IQ2_XS", "down": "IQ3_XXS"}
LARGE, EVERY = "Q4_K", 4
DYNAMIC = "dynamic"
DEVIATION = 0.02
# By type: bytes of a block at which its float16 scales begin, and their values, which `_scaled` makes smaller.
SCALES = {
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0, (1.0,))),
    "TQ1_0": (52, (1.0,)),
    "TQ2_0": (64, (1.0,)),
    "Q4_K": (0, (1.0, 7.5)),
}


def make_dynamic(out: Path, config: dict[str, Any], experts: str = DYNAMIC) -> dict[str, Any]:
    """Write the model of ``config`` (raw values of a ``config.json``) to ``out``, with ``experts`` of a type of
    `SCALES` or of `EXPERTS`; its bytes by type."""
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        source = Path(scratch) / "hollow"
        make_checkpoint(source, config, hollow=True)
        contents = contents_of(source, "Q8_0")
        vocabulary = vocabulary_of(Tokenizer.from_dir(source), contents.vocab_size, where=str(source))
    writer = gguf.GGUFWriter(out, contents.architecture)
    for key, value in {f"{contents.architecture}.{key}": value for key, value in contents.keys.items()}.items():
        _add(writer, key, value)
    for key, value in vocabulary.items():
        _add(writer, key, value)
    types = dict[str, int]()
    for tensor in contents.tensors:
        kind = _kind(tensor, experts)
        data = _numbers(tensor, kind)
        writer.add_tensor(tensor.name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
        types[kind] = types.get(kind, 0) + data.nbytes
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"out": str(out), "bytes": out.stat().st_size, "types": types}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, int) and not isinstance(value, bool):
        writer.add_uint32(key, value)  # llama.cpp refuses signed ones
    else:
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))


def _kind(tensor: GGUFTensor, experts: str) -> str:
    part = tensor.name.split(".")
    if not tensor.name.endswith("_exps.weight"):
        return tensor.kind
    if experts != DYNAMIC:
        return experts
    matrix = part[2].removeprefix("ffn_").removesuffix("_exps")
    return LARGE if int(part[1]) % EVERY == EVERY - 1 else EXPERTS[matrix]


def _numbers(tensor: GGUFTensor, kind: str) -> np.ndarray:
    """Random contents of ``tensor`` in ``kind``."""
    draw = np.random.default_rng(zlib.crc32(tensor.name.encode()))
    if kind in SCALES:
        block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        blocks = draw.integers(0, 256, (math.prod(tensor.shape) // block, nbytes), dtype=np.uint8)
        return _scaled(blocks, kind).reshape(*tensor.shape[:-1], -1)
    if tensor.name.endswith("_norm.weight"):
        return np.ones(tensor.shape, np.float32)
    deviation = {"token_embd.weight": 1.0, "output.weight": 0.05}.get(
        tensor.name, 0.05 if "gate_inp" in tensor.name else 0.02
    )
    values = (draw.standard_normal(tensor.shape, np.float32) * np.float32(deviation)).reshape(-1, tensor.shape[-1])
    if kind == "F32":
        return values.reshape(tensor.shape)
    return ggml_blocks(torch.from_numpy(values), kind).numpy().reshape(*tensor.shape[:-1], -1)


def _scaled(blocks: np.ndarray, kind: str) -> np.ndarray:
    """``blocks`` [number, bytes] with scales by which their numbers have `DEVIATION`."""
    offset, values = SCALES[kind]

    def put(scales: np.ndarray) -> None:
        codes = scales.astype(np.float16).view(np.uint8)
        blocks[:, offset : offset + len(codes)] = codes

    put(np.array(values))
    drawn = gguf.dequantize(blocks[:256], gguf.GGMLQuantizationType[kind])
    put(np.array(values) * (DEVIATION / drawn.std()))
    return blocks
