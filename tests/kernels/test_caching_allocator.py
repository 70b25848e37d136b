"""Blocks of large results serve the next ones, none that is still seen, and are given back."""

from __future__ import annotations

import threading

import torch

from moelight.kernels import caching_allocator
from moelight.kernels.caching_allocator import CachingAllocator

LARGE = (caching_allocator.LARGE_BYTES // 2 // 8, 8)


def test_a_block_is_used_again_once_no_view_of_its_tensor_is_left() -> None:
    blocks = CachingAllocator()
    with blocks.caching():
        first = blocks.empty(LARGE, torch.bfloat16)
        position, view = first.data_ptr(), first[5:].view(-1)
        first.fill_(3.0)
        del first
        assert blocks.kept_bytes == 0
        other = blocks.empty(LARGE, torch.float16)
        assert other.data_ptr() != position
        assert bool((view == 3.0).all())
        del view
        assert blocks.kept_bytes == caching_allocator.LARGE_BYTES
        again = blocks.empty((LARGE[0] // 2, 2, 8), torch.bfloat16)
        assert again.data_ptr() == position
        assert again.shape == (LARGE[0] // 2, 2, 8)
        assert again.is_contiguous()


def test_kept_blocks_are_at_most_what_was_in_use_at_once() -> None:
    blocks, (rows, columns) = CachingAllocator(), LARGE
    with blocks.caching():
        for times in (1, 3, 7, 20, 50):  # none serves the next
            blocks.empty((rows * times, columns), torch.bfloat16)
            assert blocks.kept_bytes <= times * caching_allocator.LARGE_BYTES
        blocks.release()
        assert blocks.kept_bytes == 0
        blocks.empty(LARGE, torch.bfloat16)
        assert blocks.kept_bytes == caching_allocator.LARGE_BYTES
    assert blocks.kept_bytes == 0


def test_small_results_and_those_without_an_engine_are_torchs() -> None:
    blocks = CachingAllocator()
    blocks.empty(LARGE, torch.bfloat16)
    assert blocks.kept_bytes == 0
    with blocks.caching():
        blocks.empty((LARGE[0] - 1, LARGE[1]), torch.bfloat16)
        assert blocks.kept_bytes == 0
        blocks.empty(LARGE, torch.bfloat16)
        assert blocks.kept_bytes > 0


def test_threads_share_blocks() -> None:
    blocks, wrong = CachingAllocator(), []

    def fill(number: int) -> None:
        for _ in range(50):
            tensor = blocks.empty(LARGE, torch.int16)
            tensor[::512] = number
            if not bool((tensor[::512] == number).all()):
                wrong.append(number)

    with blocks.caching():
        threads = [threading.Thread(target=fill, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
