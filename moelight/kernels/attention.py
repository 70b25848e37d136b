"""The faces of CPU attention over the paged key/value cache.

Knows the shapes, and who serves: the extension where it is built, else the twins in `reference.py`. Refuses to know
who owns the cache. Every wrong argument is a ValueError that names it; the extension checks for itself, `checks.py`
checks for the twins.

Legend: B sequences, T tokens, Hq query heads, Hkv key/value heads, D head size, P block size in tokens.
"""

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from moelight.kernels import checks, native, reference


def cpu_gqa_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    out: Tensor | None = None,
    threads: int | None = None,
) -> Tensor:
    """Softmax(scale * q k^T) v of one query per sequence over its paged context -> `out`, or a new [B, Hq, D].

    q, out        [B, Hq, D], Hq a multiple of Hkv, D a multiple of 8 up to 256
    k_cache, v_cache  [blocks, Hkv, P, D], dtype of q: float32, bfloat16 or float16
    block_tables  int32 [B, max_blocks]; entries beyond a sequence's blocks, or before its window, are ignored
    seq_lens      int32 [B], 0 to max_blocks * P; 0 gives zeros
    window        attend to the last `window` positions, the current one included; None for all
    threads       None for torch.get_num_threads()

    CPU memory, contiguous beyond the first dimension. Accumulates in float32. A sequence's result is bit for bit the
    same whatever the rest of the batch and the number of threads. `out` may be `q`. The GIL is released.

    Raises ValueError, naming the argument, for a wrong type, dtype, device, shape, stride, length or block index.
    """
    scale, window, threads = checks.scalars(scale, window, threads)
    extension = native.module()
    if extension is None:
        checks.decode(q, k_cache, v_cache, block_tables, seq_lens, window, out)
        result = reference.gqa_decode(q, k_cache, v_cache, block_tables, seq_lens, scale, window=window)
        return result if out is None else out.copy_(result)
    queries = _view("q", q)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    extension.gqa_decode(
        queries,
        _view("k_cache", k_cache),
        _view("v_cache", v_cache),
        _view("block_tables", block_tables),
        _view("seq_lens", seq_lens),
        scale,
        window or 0,
        _view("out", out),
        threads,
    )
    return out


def cpu_kv_append(
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    slots: Tensor,
    *,
    threads: int | None = None,
) -> None:
    """Writes token t of k_new, v_new to block slots[t] // P, offset slots[t] % P of the caches.

    k_cache, v_cache  [blocks, Hkv, P, D]: float32, bfloat16 or float16, D a multiple of 8 up to 256
    k_new, v_new      [T, Hkv, D], dtype of the caches
    slots             int64 [T], 0 to blocks * P - 1; of a slot named twice the later token stays
    threads           None for torch.get_num_threads()

    CPU memory, contiguous beyond the first dimension. Nothing is written unless everything is right.

    Raises ValueError, naming the argument, for a wrong type, dtype, device, shape, stride or slot.
    """
    _, _, threads = checks.scalars(1.0, None, threads)
    extension = native.module()
    if extension is None:
        checks.append(k_cache, v_cache, k_new, v_new, slots)
        reference.kv_append(k_cache, v_cache, k_new, v_new, slots)
        return
    extension.kv_append(
        _view("k_cache", k_cache),
        _view("v_cache", v_cache),
        _view("k_new", k_new),
        _view("v_new", v_new),
        _view("slots", slots),
        threads,
    )


def _view(name: str, tensor: Tensor) -> object:
    """A capsule that lends the tensor's memory to the extension."""
    try:
        return to_dlpack(tensor)
    except (TypeError, RuntimeError, BufferError) as error:
        raise ValueError(f"{name}: not a tensor in CPU memory: {error}") from error
