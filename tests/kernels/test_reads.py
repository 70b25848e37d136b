"""Reads from files: every offset, length and alignment, many at once, and every fault told to somebody."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelight.kernels import native
from moelight.kernels.reads import FileReader, ReadPart
from tests.fuzz import fuzz
from tests.process import descriptors

MIB = 1 << 20
SIZE = 3 * MIB + 1234
CONTENT = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
FUZZ = fuzz(60)
NATIVE = pytest.param("native", marks=pytest.mark.skipif(not native.available(), reason="the extension is not built"))
SHM = Path("/dev/shm")


@pytest.fixture(params=[NATIVE, "python"])
def reads(request, monkeypatch):
    """Who reads during the test."""
    if request.param == "python":
        monkeypatch.setattr(native, "extension", lambda: None)
    return request.param


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("reads") / "content.bin"
    path.write_bytes(CONTENT.numpy().tobytes())
    return path


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """The same bytes where nothing can be read directly."""
    if not SHM.is_dir():
        pytest.skip("there is no /dev/shm")
    with tempfile.NamedTemporaryFile(dir=SHM, prefix="moelight-test-") as made:
        made.write(CONTENT.numpy().tobytes())
        made.flush()
        yield Path(made.name)


def memory(length: int, shift: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """All of some memory, and ``length`` bytes of it that begin ``shift`` bytes after a page does."""
    full = torch.full((length + shift + 2 * 4096,), 7, dtype=torch.uint8)
    start = -full.data_ptr() % 4096 + shift
    return full, full[start : start + length]


def check(reader: FileReader, file: Path, offset: int, length: int, shift: int) -> None:
    full, dest = memory(length, shift)
    start = dest.data_ptr() - full.data_ptr()
    reader.submit([ReadPart(file, offset, dest)]).wait()
    assert torch.equal(dest, CONTENT[offset : offset + length])
    assert (full[:start] == 7).all()
    assert (full[start + length :] == 7).all()


RANGES = st.integers(0, SIZE).flatmap(lambda offset: st.tuples(st.just(offset), st.integers(0, SIZE - offset)))


@FUZZ
@given(where=RANGES, shift=st.integers(0, 4095), agree=st.booleans(), depth=st.integers(1, 5), chunk=st.integers(1, 80))
def test_any_range_into_any_address(reads, file, where, shift, agree, depth, chunk):
    offset, length = where
    with FileReader([file], depth=depth, chunk_bytes=4096 * chunk) as reader:
        check(reader, file, offset, length, offset % 4096 if agree else shift)


def test_edges(reads, file):
    for length in [0, 1, 504, 512, 4096, 65536, MIB, 2 * MIB + 3]:
        for offset in [0, 8, 511, 512, 4096, 5000]:
            with FileReader([file], depth=2, chunk_bytes=65536) as reader:
                check(reader, file, offset, length, offset % 4096)
                check(reader, file, offset, length, 64)


@pytest.mark.parametrize("direct", [False, True])
def test_where_the_file_system_refuses(reads, in_memory, direct):
    with FileReader([in_memory], chunk_bytes=65536, direct=direct) as reader:
        check(reader, in_memory, 5, 2 * MIB, 64)
        check(reader, in_memory, SIZE - 10, 10, 0)


def test_a_file_that_stops_being_served_directly_is_read_all_the_same(file):
    if not native.available():
        pytest.skip("the extension is not built")
    with FileReader([file], chunk_bytes=65536, direct=False) as reader:
        descriptor = next(descriptor for descriptor, target in descriptors().items() if target == file)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
        check(reader, file, 5, 2 * MIB, 64)
        assert not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT


def test_only_ragged_ends_are_copied_where_addresses_agree(file):
    if not native.available():
        pytest.skip("the extension is not built")
    with FileReader([file]) as reader:
        if not reader.direct(file):
            pytest.skip("the file system has no direct reads")
        check(reader, file, 4096 * 3 + 200, MIB, 200)
        counts = reader.counts()
        assert counts.bytes == MIB
        assert counts.copied_bytes < 2 * 4096
        assert counts.reads == 1


def test_many_requests_of_many_parts(reads, file, tmp_path):
    other = tmp_path / "other.bin"
    other.write_bytes(CONTENT.flip(0).numpy().tobytes())
    contents = {file: CONTENT, other: CONTENT.flip(0)}
    with FileReader([file, other], depth=8, chunk_bytes=32768) as reader:
        running = []
        for k in range(120):
            parts = [
                ReadPart(path, 977 * k + 13 * n, memory(60_000 + k, 64 * n)[1])
                for n, path in enumerate((file, other, file))
            ]
            running.append((reader.submit(parts), parts))
        for ticket, parts in reversed(running):
            ticket.wait()
            assert ticket.done()
            for path, offset, dest, _ in parts:
                assert torch.equal(dest, contents[path][offset : offset + len(dest)])
        assert reader.counts().bytes == sum(len(dest) for _, parts in running for _, _, dest, _ in parts)


def test_threads_may_submit_at_once(reads, file):
    wrong: list[int] = []

    def work(seed: int) -> None:
        for k in range(40):
            offset = (seed * 7919 + k * 104_729) % MIB
            _, dest = memory(50_000, seed)
            reader.submit([ReadPart(file, offset, dest)]).wait()
            if not torch.equal(dest, CONTENT[offset : offset + 50_000]):
                wrong.append(offset)

    with FileReader([file], chunk_bytes=8192) as reader:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.parametrize(("offset", "length"), [(SIZE - 100, 101), (SIZE, 1), (SIZE + 9000, 70_000), (0, SIZE + 4096)])
def test_beyond_the_end(reads, file, offset, length):
    with FileReader([file], chunk_bytes=65536) as reader:
        ticket = reader.submit([ReadPart(file, offset, memory(length, offset % 512)[1])])
        with pytest.raises(
            OSError, match=rf"the file ends early, at byte {max(SIZE, offset // 4096 * 4096)}|at byte"
        ) as caught:
            ticket.wait()
        assert caught.value.filename == str(file)
        assert caught.value.errno == errno.EIO
        with pytest.raises(OSError, match="ends early"):
            ticket.wait()
        check(reader, file, 0, 1000, 0)


def test_a_file_cut_after_it_was_opened(reads, tmp_path):
    path = tmp_path / "cut.bin"
    path.write_bytes(bytes(MIB))
    with FileReader([path], chunk_bytes=65536) as reader:
        os.truncate(path, 300_000)
        with pytest.raises(OSError, match="ends early, at byte 300000"):
            reader.submit([ReadPart(path, 0, memory(MIB)[1])]).wait()


def test_a_reading_error_names_byte_and_file(reads, tmp_path):
    # /proc/self/mem is a regular file whose first page cannot be read.
    path = Path("/proc/self/mem")
    with FileReader([path]) as reader:
        with pytest.raises(OSError, match=r"Input/output error, at byte 0") as caught:
            reader.submit([ReadPart(path, 0, memory(4096)[1])]).wait()
        assert caught.value.filename == str(path)


def test_missing_file_and_directory(reads, file, tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        FileReader([file, tmp_path / "missing"])
    assert caught.value.filename == str(tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        FileReader([tmp_path])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="seek"):
        FileReader([tmp_path / "pipe"])


def test_closing_waits_for_what_is_in_flight(reads, file):
    reader = FileReader([file], depth=2, chunk_bytes=4096)
    parts = [ReadPart(file, k * 100_000, memory(100_000)[1]) for k in range(20)]
    tickets = [reader.submit([part]) for part in parts]
    reader.close()
    assert all(ticket.done() for ticket in tickets)
    for ticket, (_, offset, dest, _) in zip(tickets, parts, strict=True):
        ticket.wait()
        assert torch.equal(dest, CONTENT[offset : offset + 100_000])
    with pytest.raises(ValueError, match=r"^reader: is closed"):
        reader.submit(parts)


def test_an_error_that_nobody_asked_for_is_told_at_the_end(reads, file):
    reader = FileReader([file])
    reader.submit([ReadPart(file, SIZE, memory(5)[1])])
    with pytest.raises(OSError, match="ends early"):
        reader.close()


def test_another_error_is_not_hidden_by_the_end(reads, file):
    with pytest.raises(ZeroDivisionError), FileReader([file]) as reader:
        reader.submit([ReadPart(file, SIZE, memory(5)[1])])
        raise ZeroDivisionError


def test_memory_outlives_a_dropped_ticket(reads, file):
    with FileReader([file], depth=1, chunk_bytes=4096) as reader:
        for _ in range(50):
            reader.submit([ReadPart(file, 8, torch.empty(200_000, dtype=torch.uint8))])
        gc.collect()


def test_busy_time_and_bytes_are_counted(reads, file):
    with FileReader([file], chunk_bytes=65536) as reader:
        assert reader.counts().busy_s == 0
        check(reader, file, 0, MIB, 0)
        counts = reader.counts()
        assert counts.bytes == MIB
        assert counts.reads == 16
        assert counts.busy_s > 0
        assert reader.counts().busy_s == counts.busy_s


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_is_refused_and_ends(file):
    """Whoever reads, and while reads are on their way at the end of the program."""
    code = f"""
import os, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import torch
from moelight.kernels import native
from moelight.kernels.reads import FileReader, ReadPart
file = Path({str(file)!r})
dest = torch.empty({MIB}, dtype=torch.uint8)
part, left_open = ReadPart(file, 0, dest), []
for extension in (native.extension, lambda: None):
    native.extension = extension
    reader = FileReader([file])
    reader.submit([part]).wait()
    ticket = reader.submit([part])
    child = os.fork()
    if not child:
        for call in (lambda: reader.submit([part]), reader.counts):
            try:
                call()
            except RuntimeError:
                pass
            else:
                os._exit(3)
        reader.close()
        del reader, ticket
        own = FileReader([file])
        own.submit([part]).wait()
        sys.exit(7)
    ticket.wait()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    left_open += [reader, FileReader([file])]
    left_open[-1].submit([part] * 20)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, timeout=300, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def test_refusals_of_a_reader(reads, file):
    for name, arguments in [
        ("depth", {"depth": 0}),
        ("depth", {"depth": 65}),
        ("depth", {"depth": "2"}),
        ("chunk_bytes", {"chunk_bytes": 0}),
        ("chunk_bytes", {"chunk_bytes": 5000}),
        ("chunk_bytes", {"chunk_bytes": 1 << 40}),
        ("file", {"files": [3]}),
        ("file", {"files": ["a\0b"]}),
    ]:
        with pytest.raises(ValueError, match=f"^{name}: "):
            FileReader(**{"files": [file], **arguments})


def test_refusals_of_a_part(reads, file):
    for name, part in [
        ("parts", None),
        ("parts", 5),
        ("file", ("elsewhere", 0, torch.zeros(8, dtype=torch.uint8))),
        ("file", (None, 0, torch.zeros(8, dtype=torch.uint8))),
        ("offset", (..., -1, torch.zeros(8, dtype=torch.uint8))),
        ("offset", (..., 1 << 63, torch.zeros(8, dtype=torch.uint8))),
        ("offset", (..., 0.0, torch.zeros(8, dtype=torch.uint8))),
        ("dest", (..., 0, None)),
        ("dest", (..., 0, torch.zeros(8))),
        ("dest", (..., 0, torch.zeros(2, 4, dtype=torch.uint8))),
        ("dest", (..., 0, torch.zeros(16, dtype=torch.uint8)[::2])),
        ("dest", (..., 0, torch.zeros(8, dtype=torch.uint8, device="meta"))),
    ]:
        with FileReader([file]) as reader:
            parts = (
                []
                if part is None
                else [tuple(file if x is ... else x for x in part) if isinstance(part, tuple) else part]
            )
            with pytest.raises(ValueError, match=f"^{name}: "):
                reader.submit(parts)
