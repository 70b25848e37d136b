"""What the HTTP door refuses: strangers, other names, what is too long, broken forms, slow senders."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest

from moelight.core.errors import ConfigError
from moelight.serve.auth import make_token, read_token
from moelight.serve.server import base_url, listen
from tests.serve.standing import MAX_FILE_BYTES, SLOW_SENDER_S, Standing, line, lines, stand_in, standing


def error_of(answer: httpx.Response) -> dict[str, object]:
    assert answer.status_code >= 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert error["type"] == ("server_error" if answer.status_code >= 500 else "invalid_request_error")
    return dict(error)


def stored(server: Standing) -> list[str]:
    return sorted(os.listdir(server.data / "files"))


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic x", "bearer", "Bearer \u00e9"])
@pytest.mark.parametrize(("method", "path"), [("GET", "/files"), ("POST", "/nowhere")])
def test_no_token_no_answer(server: Standing, header: str | None, method: str, path: str) -> None:
    asked = server.http.build_request(method, path)
    del asked.headers["Authorization"]
    if header is not None:
        asked.headers = httpx.Headers([*asked.headers.raw, (b"Authorization", header.encode("latin-1"))])
    answer = server.http.send(asked)
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert error_of(answer)["code"] == "invalid_api_key"


def test_health_needs_no_token_but_a_name_of_ours(server: Standing) -> None:
    health = server.url.replace("/v1", "/health")
    assert server.http.get(health, headers={"Authorization": ""}).json() == {"status": "ok"}
    for name in ("evil.example", "127.0.0.1.evil.example:80", "[", ""):
        for path in ("/health", "/v1/files"):
            answer = server.http.get(server.url.replace("/v1", path), headers={"Host": name})
            assert (answer.status_code, error_of(answer)["code"]) == (403, "invalid_host")
    assert server.http.get("/files", headers={"Host": "LocalHost:1"}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "unknown_url"),
        ("GET", "/files/", 404, "unknown_url"),
        ("PUT", "/files", 405, "method_not_allowed"),
        ("GET", "/files/..%2f..%2ftoken", 404, "unknown_url"),
        ("GET", "/files/..", 404, "unknown_url"),
        ("GET", "/files/token/content", 404, "not_found"),
        ("GET", "/files/%00", 404, "not_found"),
        ("GET", "/batches/' OR 1=1", 404, "not_found"),
        ("POST", "/batches/x/cancel", 404, "not_found"),
        ("GET", "/files?order=up", 400, "invalid_request"),
        ("GET", "/files?limit=1e3", 400, "invalid_request"),
    ],
)
def test_what_is_not_there(server: Standing, method: str, path: str, status: int, code: str) -> None:
    answer = server.http.request(method, path)
    assert (answer.status_code, error_of(answer)["code"]) == (status, code)


GOOD = {"input_file_id": "file-0", "endpoint": "/v1/chat/completions", "completion_window": "24h"}


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"", 400, None),
        (b"{", 400, None),
        (b"\xff", 400, None),
        (b"[" * 100_000, 400, None),
        (b"{}", 400, "input_file_id"),
        ({**GOOD, "endpoint": "/v1/responses"}, 400, "endpoint"),
        ({**GOOD, "endpoint": 3}, 400, "endpoint"),
        ({**GOOD, "completion_window": "soon"}, 400, "completion_window"),
        ({**GOOD, "completion": "24h"}, 400, "completion"),
        ({**GOOD, "metadata": {"a": 1}}, 400, "metadata"),
        ({**GOOD, "metadata": {f"{n}": "" for n in range(17)}}, 400, "metadata"),
        ({**GOOD, "output_expires_after": {"anchor": "created_at"}}, 400, "output_expires_after"),
        (GOOD, 400, "input_file_id"),
        (b" " * (1 << 20) + b"{}", 413, None),
    ],
)
def test_what_is_no_batch(server: Standing, body: object, status: int, param: str | None) -> None:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    before = server.http.get("/batches").content
    answer = server.http.post("/batches", content=sent)
    assert answer.status_code == status
    assert error_of(answer)["param"] == param
    assert server.http.get("/batches").content == before


def form(*parts: tuple[str, bytes], end: bytes = b"--B--\r\n") -> bytes:
    return b"".join(b"--B\r\n" + head.encode() + b"\r\n\r\n" + body + b"\r\n" for head, body in parts) + end


FILE = 'Content-Disposition: form-data; name="file"; filename="a.jsonl"'
FORM = "multipart/form-data"
PURPOSE = ('Content-Disposition: form-data; name="purpose"', b"batch")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"nothing of a form", 400),
        (form(PURPOSE), 400),
        (form((FILE, b"x")), 400),
        (form((FILE, b""), PURPOSE), 400),
        (form((FILE, b"x"), PURPOSE, end=b""), 400),
        (form((FILE, b"x"), (FILE, b"y"), PURPOSE), 400),
        (form((FILE, b"x"), PURPOSE, PURPOSE), 400),
        (form((FILE.replace("; filename=", "; x="), b"x"), PURPOSE), 400),
        (form(("Content-Type: text/plain", b"x"), PURPOSE), 400),
        (form((FILE, b"x"), (PURPOSE[0], b"fine-tune")), 400),
        (form((FILE, b"x"), PURPOSE, (PURPOSE[0].replace("purpose", "expires_after[seconds]"), b"3600")), 400),
        (form((FILE, b"x"), PURPOSE, (PURPOSE[0].replace("purpose", "pupose"), b"")), 400),
        (form((FILE, b"x"), (PURPOSE[0], b"b" * 5000)), 400),
        (form(*[(PURPOSE[0].replace("purpose", f"p{n}"), b"") for n in range(20)]), 400),
        (form(("X: " + "y" * 100_000, b"x"), PURPOSE), 400),
        (form((FILE, b"x" * (MAX_FILE_BYTES + 1)), PURPOSE), 413),
    ],
)
def test_a_hostile_form_leaves_nothing(server: Standing, body: bytes, status: int) -> None:
    before = stored(server)
    kind = {"Content-Type": "multipart/form-data; boundary=B"}
    pieces = (body[n : n + 997] for n in range(0, len(body), 997))
    answer = server.http.post("/files", content=pieces, headers=kind)
    assert answer.status_code == status
    error_of(answer)
    assert stored(server) == before


@pytest.mark.parametrize(
    "kind", ["", "application/json", "multipart/form-data", f"multipart/form-data; boundary={'b' * 999}"]
)
def test_no_form_at_all(server: Standing, kind: str) -> None:
    before = stored(server)
    answer = server.http.post("/files", content=b"x", headers={"Content-Type": kind})
    assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_form")
    assert stored(server) == before


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("/root/.ssh/id", "id"),
        ("C:\\windows\\a.jsonl", "a.jsonl"),
        ("..", ".."),
        ("\u202ename\u0007", "\ufffdname\ufffd"),
        ("x" * 300, "x" * 255),
    ],
)
def test_names_are_only_text(server: Standing, name: str, shown: str) -> None:
    body = form((FILE.replace("a.jsonl", name.replace("\\", "\\\\")), b"x"), PURPOSE)
    kind = {"Content-Type": "multipart/form-data; boundary=B"}
    file = server.http.post("/files", content=body, headers=kind).json()
    assert file["filename"] == shown
    assert file["id"] in stored(server)
    present = server.http.get(f"/files/{file['id']}/content")
    assert present.content == b"x" and name not in present.headers["content-disposition"]


@pytest.mark.parametrize("token", [True, False])
def test_a_refused_long_body_is_told_so(server: Standing, token: bool) -> None:
    """The refusal comes before the body was read, and the sender still reads it instead of a reset connection."""
    headers = {"Content-Type": "multipart/form-data; boundary=B", **({} if token else {"Authorization": "Bearer x"})}
    answer = server.http.post("/files", content=form((FILE, b"x" * 5_000_000), PURPOSE), headers=headers)
    assert answer.status_code == (413 if token else 401)
    assert answer.headers["connection"] == "close"
    error_of(answer)


def test_a_sender_that_goes_away_leaves_nothing(server: Standing) -> None:
    before = stored(server)
    port = httpx.URL(server.url).port
    with socket.create_connection(("127.0.0.1", port or 0)) as raw:
        head = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {server.token}\r\n"
        kind = "Content-Type: multipart/form-data; boundary=B\r\nContent-Length: 100000\r\n\r\n"
        raw.sendall((head + kind).encode() + form((FILE, b"x" * 1000), end=b""))
        while stored(server) == before:
            time.sleep(0.01)
    while stored(server) != before:
        time.sleep(0.01)
    assert server.http.get("/files").status_code == 200


def test_slow_senders_are_not_waited_for(server: Standing) -> None:
    """Nothing, half a head, half a second head, half a body: each is let go, the last with a word."""
    head = f"Host: localhost\r\nAuthorization: Bearer {server.token}\r\n"
    kind = "Content-Type: multipart/form-data; boundary=B\r\nContent-Length: 100000\r\n\r\n"
    sent = ("", "GET / HTT", f"GET /health HTTP/1.1\r\n{head}\r\n", f"POST /v1/files HTTP/1.1\r\n{head}{kind}--B")
    before, begin = stored(server), time.monotonic()
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", httpx.URL(server.url).port or 0)
        slow = [stack.enter_context(socket.create_connection(address, timeout=200)) for _ in sent]
        for connection, text in zip(slow, sent, strict=True):
            connection.sendall(text.encode())
        assert slow[2].recv(4096).startswith(b"HTTP/1.1 200")
        slow[2].sendall(b"GET /h")
        message = [all_of(connection) for connection in slow]
    assert time.monotonic() - begin > SLOW_SENDER_S / 2
    assert b"" not in message[3:] and message[3].startswith(b"HTTP/1.1 408")
    assert b"".join(message[:3]).rpartition(b"\r\n")[2] in (b"", b'{"status":"ok"}')
    assert stored(server) == before


STRANGERS = {
    "silent": b"",
    "half a head": b"GET /v1/files HTT",
    "refused": b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
    "health": b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
}


def test_strangers_keep_nobody_out(tmp_path: Path) -> None:
    """More connections than there may be, none of which the server would let go of by itself while the test runs."""
    with standing(tmp_path / "data", slow_s=600.0) as server:
        address = ("127.0.0.1", httpx.URL(server.url).port or 0)
        for kind, sent in STRANGERS.items():
            with contextlib.ExitStack() as stack:
                assert server.http.get("/files").status_code == 200  # one that is kept, and has brought the token
                for _ in range(700):
                    stranger = stack.enter_context(socket.create_connection(address, timeout=200))
                    stranger.sendall(sent)
                for _ in range(3):
                    assert server.http.get("/files").status_code == 200, kind
                    headers = dict(server.http.headers)
                    assert httpx.get(f"{server.url}/files", headers=headers).status_code == 200, kind
                assert httpx.get(f"{server.url}/files").status_code == 401, kind
        server.end(signal.SIGKILL)


def test_what_is_no_http_is_told_so(server: Standing) -> None:
    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0), timeout=200) as raw:
        raw.sendall(b"no HTTP at all\r\n\r\n")
        head, _, body = all_of(raw).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and b"content-type: application/json" in head.lower()
    assert json.loads(body)["error"]["code"] == "invalid_http"


def all_of(connection: socket.socket) -> bytes:
    message = b""
    with contextlib.suppress(ConnectionResetError):
        while more := connection.recv(4096):
            message += more
    return message


def test_a_full_disk_is_said(server: Standing, tmp_path: Path) -> None:
    import errno

    from starlette.testclient import TestClient

    from moelight.serve.app import Api, make_app
    from moelight.serve.http import Upload
    from moelight.serve.jobs import JobRunner
    from moelight.serve.store import DataDirectory
    from moelight.serve.worker import Worker

    data = DataDirectory(tmp_path / "data")
    worker = Worker(data, JobRunner(stand_in, say=print))
    app = make_app(Api(data, worker, model="m", max_file_bytes=1000), token="t" * 20, hosts=None)
    client = TestClient(app, headers={"Authorization": "Bearer " + "t" * 20}, raise_server_exceptions=False)

    def full(self: Upload) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Upload, "finish", full)
        answer = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", b"x")})
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "insufficient_storage")
    assert os.listdir(data.files) == []
    data.close()


def test_only_loopback_unless_asked() -> None:
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ConfigError, match="--allow-remote"):
            listen(host, 0, allow_remote=False)
    with pytest.raises(ConfigError, match="no such address"):
        listen("no.such.host.invalid", 0, allow_remote=True)
    with listen("127.0.0.1", 0, allow_remote=False) as taken:
        assert base_url(taken) == f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(ConfigError, match="name another --port"):
            listen("127.0.0.1", taken.getsockname()[1], allow_remote=False)
    with listen("0.0.0.0", 0, allow_remote=True):
        pass


def test_token_files(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(ConfigError, match="no such file"):
        read_token(path)
    make_token(path)
    token = read_token(path)
    make_token(path)
    assert read_token(path) == token and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"chmod 600"):
        read_token(path)
    for bad in ("", "short", "two words of a token", "t" * 20 + "\nX: y"):
        path.write_text(bad)
        path.chmod(0o600)
        with pytest.raises(ConfigError, match="a token is"):
            read_token(path)


def test_lines_are_those_of_the_format() -> None:
    assert json.loads(lines(1)) == line("r0")
