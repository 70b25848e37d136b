"""CPU attention over the paged key/value cache.

Selects the implementation: the extension where it is built, else `reference.py`. Does not depend on the owner of the
cache. Every wrong argument is a ValueError that names it; the extension has checks of its own, `checks.py` checks for
the reference implementations.

Legend: B sequences, T tokens, Hq query heads, Hkv key/value heads, D head size, P block size in tokens; of latent
attention H heads, R the size of the latent, Rr of the rotary part.
"""

import torch
from torch import Tensor

from moelight.kernels import checks, native, reference
from moelight.kernels.dlpack import as_dlpack
from moelight.kernels.prefill_cpu import cpu_prefill_attention

__all__ = ["cpu_gqa_decode", "cpu_kv_append", "cpu_mla_append", "cpu_mla_decode", "cpu_prefill_attention"]


def cpu_gqa_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    out: Tensor | None = None,
    threads: int | None = None,
) -> Tensor:
    """Softmax(scale * q k^T) v of one query per sequence over its paged context -> `out`, or a new [B, Hq, D].

    q, out        [B, Hq, D]: float32, bfloat16 or float16, Hq a multiple of Hkv, D a multiple of 8 up to 256
    k_cache, v_cache  [blocks, Hkv, P, D]: dtype of q, or int8; P one of 16, 32, 64 and 128
    block_tables  int32 [B, max_blocks]; entries beyond a sequence's blocks, or before its window, are ignored
    seq_lens      int32 [B], 0 to max_blocks * P; 0 gives zeros
    window        attend to the last `window` positions, the current one included; None for all
    sinks         float32 [Hq]: a logit of each head that joins its softmax and is dropped
    softcap       scores become softcap * tanh(score / softcap) before the softmax
    k_scale, v_scale  float32 [blocks, Hkv, P]: the factor of each position's row; for int8 caches, and only for them
    k_new, v_new  [B, Hkv, D], dtype of q: written first, at position seq_lens - 1, as by `cpu_kv_append`; both or none
    threads       None for torch.get_num_threads()

    CPU memory, contiguous beyond the first dimension. Accumulates in float32. A sequence's result is bit for bit
    independent of the rest of the batch and of the number of threads. `out` may be `q`. The GIL is released.

    Raises ValueError, naming the argument, for a wrong type, dtype, device, shape, stride, length or block index.
    """
    scale, window, threads = checks.check_scalars(scale, window, threads)
    softcap = checks.check_softcap(softcap)
    extension = native.extension()
    if extension is None:
        checks.check_decode(q, k_cache, v_cache, block_tables, seq_lens, window, out)
        checks.check_decode_extras(q, k_cache, sinks, k_scale, v_scale, k_new, v_new)
        if k_new is not None and v_new is not None:
            reference.kv_append_last(k_cache, v_cache, k_new, v_new, block_tables, seq_lens, k_scale, v_scale)
        result = reference.gqa_decode(
            q,
            k_cache,
            v_cache,
            block_tables,
            seq_lens,
            scale,
            window=window,
            sinks=sinks,
            softcap=softcap,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return result if out is None else out.copy_(result)
    queries = as_dlpack("q", q)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    extension.gqa_decode(
        queries,
        as_dlpack("k_cache", k_cache),
        as_dlpack("v_cache", v_cache),
        as_dlpack("block_tables", block_tables),
        as_dlpack("seq_lens", seq_lens),
        scale,
        window or 0,
        _optional("sinks", sinks),
        softcap or 0.0,
        _optional("k_scale", k_scale),
        _optional("v_scale", v_scale),
        _optional("k_new", k_new),
        _optional("v_new", v_new),
        as_dlpack("out", out),
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
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    threads: int | None = None,
) -> None:
    """Write token t of k_new, v_new to block slots[t] // P, offset slots[t] % P of the caches.

    k_cache, v_cache  [blocks, Hkv, P, D]: float32, bfloat16, float16 or int8, D a multiple of 8 up to 256, P
                      one of 16, 32, 64 and 128
    k_new, v_new      [T, Hkv, D], dtype of the caches; any of the three float dtypes if those are int8
    slots             int64 [T], 0 to blocks * P - 1; if a slot occurs twice, the later token is kept
    k_scale, v_scale  float32 [blocks, Hkv, P], for int8 caches and only for them: written too. A row's scale is its
                      largest magnitude / 127, its codes the nearest multiples of that; a row that is not finite gets
                      the scale nan
    threads           None for torch.get_num_threads()

    CPU memory, contiguous beyond the first dimension. Nothing is written if any argument is wrong.

    Raises ValueError, naming the argument, for a wrong type, dtype, device, shape, stride or slot.
    """
    _, _, threads = checks.check_scalars(1.0, None, threads)
    extension = native.extension()
    if extension is None:
        checks.check_append(k_cache, v_cache, k_new, v_new, slots, k_scale, v_scale)
        reference.kv_append(k_cache, v_cache, k_new, v_new, slots, k_scale=k_scale, v_scale=v_scale)
        return
    extension.kv_append(
        as_dlpack("k_cache", k_cache),
        as_dlpack("v_cache", v_cache),
        as_dlpack("k_new", k_new),
        as_dlpack("v_new", v_new),
        as_dlpack("slots", slots),
        _optional("k_scale", k_scale),
        _optional("v_scale", v_scale),
        threads,
    )


def cpu_mla_decode(
    q_nope_absorbed: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    out: Tensor | None = None,
    threads: int | None = None,
) -> Tensor:
    """Latent attention of one query per sequence over its paged context -> `out`, or a new [B, H, R].

    A cached row is a latent c of R elements and a rotary key r of Rr, shared by all heads. The score of a position is
    scale * (q_nope_absorbed . c + q_rope . r), the result the sum of softmax weights times c.

    q_nope_absorbed, out  [B, H, R]: float32, bfloat16 or float16
    q_rope        [B, H, Rr]
    cache         [blocks, P, R + Rr]
    block_tables  int32 [B, max_blocks]; entries beyond a sequence's blocks are ignored
    seq_lens      int32 [B], 0 to max_blocks * P; 0 gives zeros
    threads       None for torch.get_num_threads()

    One dtype throughout, CPU memory, contiguous beyond the first dimension. Accumulates in float32. A sequence's result
    is bit for bit independent of the rest of the batch and of the number of threads. `out` may be `q_nope_absorbed`.
    The GIL is released.

    Raises ValueError, naming the argument, for a wrong type, dtype, device, shape, stride, length or block index.
    """
    scale, _, threads = checks.check_scalars(scale, None, threads)
    extension = native.extension()
    if extension is None:
        checks.check_latent_decode(q_nope_absorbed, q_rope, cache, block_tables, seq_lens, out)
        result = reference.mla_decode(q_nope_absorbed, q_rope, cache, block_tables, seq_lens, scale)
        return result if out is None else out.copy_(result)
    queries = as_dlpack("q_nope_absorbed", q_nope_absorbed)
    if out is None:
        out = torch.empty_like(q_nope_absorbed, memory_format=torch.contiguous_format)
    extension.mla_decode(
        queries,
        as_dlpack("q_rope", q_rope),
        as_dlpack("cache", cache),
        as_dlpack("block_tables", block_tables),
        as_dlpack("seq_lens", seq_lens),
        scale,
        as_dlpack("out", out),
        threads,
    )
    return out


def cpu_mla_append(cache: Tensor, new: Tensor, slots: Tensor, *, threads: int | None = None) -> None:
    """Write token t of `new` to block slots[t] // P, offset slots[t] % P of a latent cache.

    cache    [blocks, P, R + Rr]: float32, bfloat16 or float16
    new      [T, R + Rr], dtype of the cache
    slots    int64 [T], 0 to blocks * P - 1; if a slot occurs twice, the later token is kept
    threads  None for torch.get_num_threads()

    CPU memory, contiguous beyond the first dimension. Nothing is written if any argument is wrong.

    Raises ValueError, naming the argument, for a wrong type, dtype, device, shape, stride or slot.
    """
    _, _, threads = checks.check_scalars(1.0, None, threads)
    extension = native.extension()
    if extension is None:
        checks.check_latent_append(cache, new, slots)
        reference.mla_append(cache, new, slots)
        return
    extension.mla_append(as_dlpack("cache", cache), as_dlpack("new", new), as_dlpack("slots", slots), threads)


def _optional(name: str, tensor: Tensor | None) -> object:
    return None if tensor is None else as_dlpack(name, tensor)
