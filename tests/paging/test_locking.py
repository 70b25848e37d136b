"""Memory locked where it lies: as much as asked for, given back before it is unmapped; refusals are survived."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator

import pytest
import torch

from moelight.hrm.footprint import ArenaSize, Footprint
from moelight.paging import arena
from moelight.paging.arena import PinningError, allocate, page_locked

CUDA = torch.device("cuda", 0)
MIB = 1 << 20


class Runtime:
    """CUDA's register, played: ranges that are locked, at most ``room`` bytes of them."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room, self.locked, self.cleared = room, dict[int, int](), 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        assert address % 4096 == 0 and size % 4096 == 0 and flags == 1
        ends = [(start, start + taken) for start, taken in self.locked.items()]
        assert all(address + size <= start or end <= address for start, end in ends), "locked twice"
        if size + sum(self.locked.values()) > self.room:
            return 2
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        # A mapping that is gone already would fault here.
        assert len(ctypes.string_at(address, 64)) == 64
        del self.locked[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    played = Runtime()
    monkeypatch.setattr(arena, "_runtime", lambda: played)

    def clear(device: torch.device) -> None:
        assert device == CUDA
        played.cleared += 1

    monkeypatch.setattr(arena, "_clear_error", clear)
    arena.locks_in_place.cache_clear()
    yield played
    arena.locks_in_place.cache_clear()


def test_what_lies_beside_a_link_is_locked_as_announced_and_given_back(runtime: Runtime) -> None:
    sizes = {"pinned_ring": 5 * MIB + 4096, "crossing": 3 * MIB, "host_experts": 7 * MIB}
    announced = Footprint(arenas=tuple(ArenaSize(purpose=name, tier="host", bytes=n) for name, n in sizes.items()))
    arenas = allocate(announced, CUDA)
    gc.collect()
    assert sorted(runtime.locked.values()) == [3 * MIB, 5 * MIB + 4096]
    assert arenas["pinned_ring"].data_ptr() in runtime.locked
    placed = Footprint(arenas=announced.arenas[-1:])
    assert allocate(placed, CUDA, pinned_pages=True)["host_experts"].data_ptr() in runtime.locked
    gc.collect()
    part = arenas["pinned_ring"][4096:8192].fill_(7)
    del arenas
    gc.collect()
    assert list(runtime.locked.values()) == [5 * MIB + 4096], "a part that is in use keeps the whole"
    assert part.eq(7).all()
    del part
    gc.collect()
    assert not runtime.locked


def test_a_machine_that_locks_less_refuses_by_purpose(runtime: Runtime) -> None:
    runtime.room = 4 * MIB
    announced = Footprint(arenas=(ArenaSize(purpose="crossing", tier="host", bytes=9 * MIB),))
    with pytest.raises(PinningError, match=r"refuses to page-lock 9.0MiB of host memory for crossing .* after 0B"):
        allocate(announced, CUDA)
    assert not runtime.locked
    assert runtime.cleared == 1, "the next launch would report the error"


def test_slots_are_locked_in_pieces_of_whole_slots(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """What crosses at once lies in one slot, so no copy crosses two pieces; other regions are locked whole."""
    monkeypatch.setattr(arena, "LOCKED_AT_ONCE", 5 * MIB)
    slot = 2 * MIB + 4096
    sizes = {"pinned_ring": (slot,) * 3, "crossing": (11 * MIB,), "host_experts": (slot, slot, MIB, MIB, MIB, slot)}
    announced = Footprint(
        arenas=tuple(
            ArenaSize(purpose=name, tier="host", bytes=sum(n), slots=() if name == "crossing" else n)
            for name, n in sizes.items()
        )
    )
    arenas = allocate(announced, CUDA, pinned_pages=True)
    ring, experts = arenas["pinned_ring"].data_ptr(), arenas["host_experts"].data_ptr()
    gc.collect()
    assert runtime.locked == {
        ring: 2 * slot,
        ring + 2 * slot: slot,
        arenas["crossing"].data_ptr(): 11 * MIB,
        experts: 2 * slot,
        experts + 2 * slot: 3 * MIB,
        experts + 2 * slot + 3 * MIB: slot,
    }
    del arenas
    gc.collect()
    assert not runtime.locked


def test_a_slot_larger_than_a_piece_is_a_piece(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "LOCKED_AT_ONCE", MIB)
    region = page_locked(6 * MIB, CUDA, slots=(3 * MIB, 3 * MIB))
    gc.collect()
    assert list(runtime.locked.values()) == [3 * MIB, 3 * MIB]
    del region


def test_a_refusal_in_the_middle_unlocks_what_was_locked(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "LOCKED_AT_ONCE", 2 * MIB)
    assert arena.locks_in_place(CUDA)
    gc.collect()
    runtime.room = 5 * MIB
    experts = ArenaSize(purpose="host_experts", tier="host", bytes=9 * MIB, slots=(MIB,) * 9)
    with pytest.raises(PinningError, match=r"9.0MiB of host memory for host_experts .*error 2 after 4.0MiB") as refused:
        allocate(Footprint(arenas=(experts,)), CUDA, pinned_pages=True)
    assert not runtime.locked and runtime.cleared == 1
    assert (refused.value.purpose, refused.value.tier, refused.value.needed_bytes) == ("host_experts", "host", 9 * MIB)


def test_where_nothing_can_be_locked_torch_pins(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.room = 0
    pinned: list[int] = []
    empty = torch.empty

    def played(size: int, *, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        if pin_memory:
            pinned.append(size)
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: empty(1).fill_(0.0))
    assert not arena.locks_in_place(CUDA)
    monkeypatch.setattr(torch, "empty", played)
    region = arena.page_locked(MIB, CUDA)
    assert region.numel() == MIB and region.data_ptr() % 4096 == 0
    assert pinned == [MIB + 4096]
    assert not arena.locks_in_place(torch.device("xpu"))


@pytest.mark.gpu
def test_a_real_device_knows_what_is_locked() -> None:
    """Copies from it do not make the launching thread wait, and hold what they should."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    region = arena.page_locked(64 * MIB, device)
    assert region.is_pinned() or not arena.locks_in_place(device)
    region.copy_(torch.arange(64 * MIB, dtype=torch.int32).to(torch.uint8))
    present = region.to(device, non_blocking=True)
    torch.accelerator.synchronize()
    assert torch.equal(present.cpu(), region)
