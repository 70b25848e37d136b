"""Files of llama.cpp's own quantiser, beside the same files unpacked by gguf-py (`gguf_architectures`)."""

from __future__ import annotations

import ctypes
import re
import string
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

# Kinds of files by their numbers in llama.h. Some need the importance of columns.
KINDS: Mapping[str, int] = {"Q8_0": 7, "Q4_K_M": 15, "Q2_K": 10, "IQ2_XS": 20, "MXFP4_MOE": 38}
BY_IMPORTANCE = ("IQ2_XS",)
_WIDTH = 256  # numbers of a block of most kinds
_WIDE = re.compile(r"(hidden_size|intermediate_size|d_model|intermediate_size_mlp|hidden_size_per_layer_input)$")
_HEAD = re.compile(r"(head_dim|d_head|d_ssm|state_size|v_head_dim|kv_lora_rank|q_lora_rank)$")


class _Params(ctypes.Structure):
    _fields_ = (
        ("nthread", ctypes.c_int32),
        ("ftype", ctypes.c_int),
        ("output_tensor_type", ctypes.c_int),
        ("token_embedding_type", ctypes.c_int),
        *((name, ctypes.c_bool) for name in ("allow_requantize", "quantize_output_tensor", "only_copy", "pure")),
        *((name, ctypes.c_bool) for name in ("keep_split", "dry_run")),
        *((name, ctypes.c_void_p) for name in ("imatrix", "kv_overrides", "tt_overrides", "prune_layers")),
        ("max_buf_size", ctypes.c_size_t),
    )


class _Importance(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("data", ctypes.POINTER(ctypes.c_float)), ("size", ctypes.c_size_t))


def widened(config: Any) -> Any:
    """The tiny ``config`` with rows of whole blocks."""
    return type(config)(**_widened(config.to_dict()))


def _widened(fields: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(fields)
    for key, value in fields.items():
        if isinstance(value, dict):
            result[key] = _widened(value)
        elif _HEAD.search(str(key)) and type(value) is int:
            result[key] = value * 4
        elif _WIDE.search(str(key)) and type(value) is int and value:
            result[key] = _WIDTH
        elif isinstance(value, list) and str(key).endswith("_factor"):
            result[key] = [factor for factor in value for _ in range(4)]
    return result


def measure_importance(tool: Path, source: Path, path: Path) -> str:
    """Write the importances of the columns of ``source`` to ``path`` with ``tool``, llama-imatrix, from random letters;
    the reason if it does not."""
    draw = np.random.default_rng(4)
    text = path.with_suffix(".txt")
    text.write_text("".join(draw.choice(list(string.ascii_letters + " "), 4000)))
    command = [tool, "-m", source, "-f", text, "-o", path, "-c", "64", "--chunks", "8", "-ngl", "0", "-t", "1"]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace", check=False)
    if ended.returncode == 0 and path.exists():
        return ""
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    return f"llama-imatrix ended with {ended.returncode}: {lines[-1] if lines else ''}"


def quantize(library: Path, source: Path, path: Path, kind: str, importance: Path | None = None) -> str:
    """Write ``source`` as a file ``path`` of ``kind`` with llama.cpp's ``library``; the reason if it does not.

    ``importance``: the file of `measure_importance`; None: drawn at random.
    """
    llama = ctypes.CDLL(str(library))
    llama.llama_model_quantize_default_params.restype = _Params
    llama.llama_model_quantize.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(_Params))
    llama.llama_model_quantize.restype = ctypes.c_uint32
    silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    lines: list[str] = []
    log = silent(lambda level, text, _: lines.append(text.decode(errors="replace")) if level >= 3 else None)
    llama.llama_log_set(log, None)
    params = llama.llama_model_quantize_default_params()
    params.nthread, params.ftype, params.allow_requantize = 1, KINDS[kind], True
    if kind in BY_IMPORTANCE:
        entries = _drawn(source) if importance is None else _measured(importance)
        params.imatrix = ctypes.cast(entries, ctypes.c_void_p)
    if llama.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(params)):
        text = " ".join("".join(lines).split())
        return text.rpartition("failed to quantize: ")[2] or "llama_model_quantize failed"
    return ""


def _drawn(source: Path) -> Any:
    """Importances of the columns of all matrices of ``source``, drawn at random."""
    from moelight.profiles.gguf import read_gguf

    draw, values = np.random.default_rng(3), dict[str, np.ndarray]()
    for tensor in read_gguf(source).tensors.values():
        if len(tensor.shape) > 1:
            count = tensor.shape[-1] * (tensor.shape[0] if len(tensor.shape) == 3 else 1)
            values[tensor.name] = draw.uniform(0.1, 2.0, count)
    return _entries(values)


def _measured(path: Path) -> Any:
    """Mean squares of the inputs of all matrices by ``path``, a file of llama-imatrix; 1 for experts without any."""
    import gguf

    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    values = {}
    for name, data in tensors.items():
        if name.endswith(".in_sum2"):
            matrix = name.removesuffix(".in_sum2")
            sums, counts = np.atleast_2d(data), np.reshape(tensors[f"{matrix}.counts"], (-1, 1))
            values[matrix] = np.where(counts > 0, sums / np.maximum(counts, 1), 1.0).ravel()
    return _entries(values)


def _entries(values: Mapping[str, np.ndarray]) -> Any:
    """``values`` by matrix as llama.cpp takes them, with the entry that ends them."""
    entries = [
        _Importance(name.encode(), (ctypes.c_float * len(columns))(*columns), len(columns))
        for name, columns in values.items()
    ]
    return (_Importance * (len(entries) + 1))(*entries)


def unpack(source: Path, path: Path) -> list[str]:
    """Write ``source`` with all its numbers in float32 to ``path``, by gguf-py; the types that its matrices have."""
    import gguf
    from gguf.quants import dequantize

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        subtype = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=subtype)
    types = set()
    for tensor in reader.tensors:
        types.add(tensor.tensor_type.name)
        if tensor.tensor_type.name in ("I8", "I16", "I32", "I64"):
            writer.add_tensor(tensor.name, tensor.data)  # whole numbers, as they are
            continue
        shape = [int(size) for size in reversed(tensor.shape)]
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(types - {"F32"})
