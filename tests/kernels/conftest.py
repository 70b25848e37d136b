"""Every instruction set that runs on this processor, and the torch twin where the extension is missing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moelight.kernels import native
from moelight.kernels.gpu import serving

ISAS = tuple(native.extension().isa_available()) if native.available() else ()
SERVERS = ("server", "lanes", "isa")  # fixtures that choose one
_OF_OTHERS = 12
EVERY_SERVER = "MOELIGHT_EVERY_SERVER"  # of `tests/with_extension.py`


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All cases run on what serves by itself here; of those on other instruction sets, and by torch, one in twelve
    does, and in CI every other one. Of another build of the extension (`tests/with_extension.py`), all do."""
    if EVERY_SERVER in os.environ:
        return
    usual = native.isa() or "torch"
    counts = Counter[tuple[str, str]]()
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        server = next((str(params[name]) for name in SERVERS if name in params), usual)
        if server != usual and Path(__file__).parent in item.path.parents:
            case = item.nodeid.partition("[")[0], server
            if counts[case] % _OF_OTHERS:
                item.add_marker(pytest.mark.exhaustive if counts[case] % 2 else pytest.mark.thorough)
            counts[case] += 1


@pytest.fixture(params=[*ISAS, "torch"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Who serves the faces of `attention.py` during the test."""
    if request.param == "torch":
        monkeypatch.setattr(native, "extension", lambda: None)
        yield "torch"
        return
    native.extension().set_isa(request.param)
    yield request.param
    native.extension().set_isa("auto")


@pytest.fixture(params=[*ISAS[-1:], "torch"])
def checker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who checks arguments: the extension, before it looks at the instruction set, or the reference implementation."""
    if request.param == "torch":
        monkeypatch.setattr(native, "extension", lambda: None)
    return str(request.param)


@pytest.fixture(params=ISAS or [pytest.param("none", marks=pytest.mark.skip(reason="the extension is not built"))])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """An instruction set of the extension, in force during the test."""
    native.extension().set_isa(request.param)
    yield request.param
    native.extension().set_isa("auto")


@pytest.fixture(params=["interpreted", "torch", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Where the tensors of a test lie; who serves them is certain."""
    if request.param == "torch":
        monkeypatch.setattr(serving, "triton_available", lambda: False)
        yield torch.device("cpu")
        return
    if not serving.triton_available():
        pytest.skip(serving.triton_reason())
    if serving.interpreting() != (request.param == "interpreted"):
        pytest.skip(
            "triton was imported to interpret its kernels"
            if serving.interpreting()
            else "triton compiles here: interpreted in a process of its own"
        )
    result = (
        torch.device("cpu") if request.param == "interpreted" else torch.device("cuda", torch.cuda.current_device())
    )
    assert serving.serves(result, torch.float16)[0]
    yield result
