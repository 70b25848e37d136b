"""Multi-threaded copies of bytes within host memory, through torch without the extension; and host memory from which
copies to a device are asynchronous."""

from __future__ import annotations

import torch
from torch import Tensor

from moelight.kernels import arguments, native
from moelight.kernels.arguments import check_tensor, lend


def copy_pages(dst: Tensor, src: Tensor, *, threads: int | None = None) -> None:
    """Copy src uint8 [n] to dst uint8 [n], both contiguous in CPU memory (pinned or not), without overlap.

    From 2 MiB on, `dst` is written past the caches, which saves reading it first. ``threads`` is None for
    torch.get_num_threads(). The GIL is released. Every wrong argument is a ValueError that names it.
    """
    threads = arguments.check_threads(threads)
    extension = native.extension()
    if extension is not None:
        extension.copy_pages(*lend(dst=dst, src=src), threads)
        return
    check_tensor("src", src, torch.uint8, check_tensor("dst", dst, torch.uint8, (None,)))
    if dst.numel() and abs(dst.data_ptr() - src.data_ptr()) < dst.numel():
        raise ValueError("src: overlaps dst")
    dst.copy_(src)
