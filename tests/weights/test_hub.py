"""A model fetched from a hub that runs in the test: what is asked for, what a lost connection and a refusal do."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, file_download

from moelight.batch.model_names import ModelNames
from moelight.core.errors import CheckpointError
from moelight.weights.source import resolve_model

SHA = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "mixtral"}',
    "tokenizer.json": b'{"version": "1.0"}',
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "model-00001-of-00002.safetensors": bytes(range(256)) * 4096,
    "model.safetensors.index.json": b"{}",
    "pytorch_model.bin": b"a pickle",
    "run.py": b"code",
    "consolidated.00.pth": b"a pickle",
}
STATUS = {
    "owner/gated": (403, "GatedRepo"),
    "owner/private": (401, "RepoNotFound"),
    "owner/none": (404, "RepoNotFound"),
}
GGUF_FILES = {
    "README.md": b"",
    "config.json": b"{}",
    "mmproj-F16.gguf": b"encoder",
    "Q8_0/model-Q8_0-00001-of-00002.gguf": b"first",
    "Q8_0/model-Q8_0-00002-of-00002.gguf": b"second",
    "model-Q4_K_M.gguf": b"small",
}
ONE_GGUF = {name: GGUF_FILES[name] for name in ("README.md", "mmproj-F16.gguf", "model-Q4_K_M.gguf")}
REPOSITORIES = {"owner/several": GGUF_FILES, "owner/single": ONE_GGUF}


class Hub(ThreadingHTTPServer):
    """``asked``: what was fetched, with the first byte of it. ``cut`` names a file whose first answers break off."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked: list[tuple[str, int]] = []
        self.cut: dict[str, int] = {}


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0].strip("/")
        name = "/".join(path.removeprefix("api/models/").split("/")[:2])
        if name in STATUS:
            status, code = STATUS[name]
            self._send(status, b"{}", {"X-Error-Code": code})
        elif "/revision/none" in path:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif "/tree/" in path:
            tree = [
                {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for file, data in REPOSITORIES.get(name, FILES).items()
            ]
            self._send(200, json.dumps(tree).encode())
        elif path.startswith("api/models/"):
            siblings = [{"rfilename": file} for file in REPOSITORIES.get(name, FILES)]
            self._send(200, json.dumps({"id": name, "sha": SHA, "siblings": siblings}).encode())
        elif f"/resolve/{SHA}/" in path:
            self._send_file(REPOSITORIES.get(name, FILES), path.split(f"/resolve/{SHA}/")[1])
        else:
            self._send(404, b"{}")

    def _send_file(self, files: dict[str, bytes], file: str) -> None:
        data = files[file]
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if self.command == "GET":
            self.server.asked.append((file, start))
        sent = data[start:]
        if self.command == "GET" and self.server.cut.get(file, 0) > 0:
            self.server.cut[file] -= 1
            sent = sent[: len(sent) // 2]
            self.close_connection = True
        self._send(206 if start else 200, sent, headers, length=len(data) - start)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, length: int | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 65536)
        monkeypatch.setattr(file_download.time, "sleep", lambda _: None)
        yield server
        server.shutdown()
        thread.join()


def test_only_the_needed_files_are_fetched_once_and_quietly(hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    directory = resolve_model("owner/there")
    fetched = {file for file, _ in hub.asked}
    assert fetched == FILES.keys() - {"pytorch_model.bin", "run.py", "consolidated.00.pth"}
    assert all((directory / file).read_bytes() == FILES[file] for file in fetched)
    assert capfd.readouterr() == ("", "")
    hub.asked.clear()
    assert resolve_model(f"owner/there@{SHA}") == resolve_model("owner/there@main") == directory
    assert hub.asked == []


def test_a_lost_connection_goes_on_where_it_broke(hub: Hub) -> None:
    shard = "model-00001-of-00002.safetensors"
    hub.cut[shard] = 2
    directory = resolve_model("owner/there")
    starts = [start for file, start in hub.asked if file == shard]
    assert starts[0] == 0 and len(starts) == 3 and 0 < starts[1] < starts[2]
    assert (directory / shard).read_bytes() == FILES[shard]


def test_a_second_run_fetches_only_what_the_first_did_not_finish(hub: Hub) -> None:
    shard = "model-00001-of-00002.safetensors"
    hub.cut[shard] = 1000  # more often than the hub's client tries
    with pytest.raises(CheckpointError, match="complete files are kept"):
        resolve_model("owner/there")
    done = {file for file, _ in hub.asked} - {shard}
    hub.cut.clear()
    hub.asked.clear()
    resolve_model("owner/there")
    assert {file for file, _ in hub.asked}.isdisjoint(done - {shard})


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("owner/gated", "accept its terms at http.*owner/gated.*HF_TOKEN"),
        ("owner/private", "check the spelling.*HF_TOKEN"),
        ("owner/none", "check the spelling"),
        ("owner/there@none", "no such revision"),
    ],
)
def test_a_refusal_says_what_to_do_on_one_line(model: str, told: str, hub: Hub) -> None:
    with pytest.raises(CheckpointError, match=told) as refusal:
        resolve_model(model)
    assert model in str(refusal.value) and "\n" not in str(refusal.value)
    assert hub.asked == []


@pytest.mark.parametrize(
    ("model", "files"),
    [
        ("owner/several:Q4_K_M", ["model-Q4_K_M.gguf"]),
        ("owner/several:model-Q4_K_M.gguf", ["model-Q4_K_M.gguf"]),
        ("owner/several@main:q8_0", ["Q8_0/model-Q8_0-00001-of-00002.gguf", "Q8_0/model-Q8_0-00002-of-00002.gguf"]),
        ("owner/single", ["model-Q4_K_M.gguf"]),
    ],
)
def test_a_tag_fetches_one_gguf_file_with_all_its_parts(
    model: str, files: list[str], hub: Hub, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    path = resolve_model(model)
    assert sorted(file for file, _ in hub.asked) == files
    directory = path.parents[len(Path(files[0]).parts) - 1]
    assert path == directory / files[0] and all((directory / file).exists() for file in files)
    assert ModelNames.of(model).names >= {model, model.partition(":")[0]}
    request.getfixturevalue("no_network")
    assert resolve_model(model) == path
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model(model) == path
    with pytest.raises(CheckpointError, match=r"no GGUF model there is called 'Q5_K_M'.*Q"):
        resolve_model(f"{model.partition(':')[0]}:Q5_K_M")


def test_several_gguf_files_of_a_repository_are_listed(hub: Hub) -> None:
    with pytest.raises(CheckpointError, match=r"such as owner/several:Q8_0; there are Q8_0, Q4_K_M$"):
        resolve_model("owner/several")
    with pytest.raises(CheckpointError, match=r"no GGUF file of a model there"):
        resolve_model("owner/there:Q4_K_M")
    with pytest.raises(CheckpointError, match=r"check the spelling"):
        resolve_model("owner/none:Q4_K_M")
    assert [file for file, _ in hub.asked if file.endswith(".gguf")] == []


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    asked: list[Any] = []

    def refuse(*inputs: Any, **_: Any) -> None:
        asked.append(inputs)
        raise OSError("the network is out of reach")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return asked


def test_offline_takes_what_is_cached_and_else_names_the_variable(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    directory = resolve_model("owner/there")
    asked = request.getfixturevalue("no_network")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model("owner/there") == directory
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        resolve_model("owner/elsewhere")
    assert asked == []


def test_without_a_network_a_cached_model_still_runs(hub: Hub, request: pytest.FixtureRequest) -> None:
    directory = resolve_model("owner/there")
    request.getfixturevalue("no_network")
    assert resolve_model("owner/there") == directory
    with pytest.raises(CheckpointError, match="the Hugging Face hub did not provide it"):
        resolve_model("owner/elsewhere")


def test_a_local_path_touches_no_network(tmp_path: Path, no_network: list[Any]) -> None:
    (tmp_path / "here").mkdir()
    assert resolve_model(str(tmp_path / "here")) == tmp_path / "here"
    for model in (str(tmp_path / "gone"), "./owner/gone", "demo"):
        try:
            resolve_model(model)
        except CheckpointError as refusal:
            assert "no such directory" in str(refusal)
    assert no_network == []
