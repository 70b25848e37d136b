"""The official client against a server whose jobs are stand-ins: every state of a batch, and pages of them."""

from __future__ import annotations

import time
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.serve.standing import Standing, lines


def test_upload_batch_poll_download(server: Standing) -> None:
    client = server.client
    sent = lines(3) + lines(1, "refuse").replace(b"r0", b"bad")
    file = server.upload(sent)
    assert (file.bytes, file.filename, file.purpose, file.status) == (len(sent), "in.jsonl", "batch", "processed")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"who": "me"}
    )
    assert batch.status == "validating" and batch.expires_at == batch.created_at + 24 * 3600
    done = server.finished(batch)
    assert (done.status, done.errors, done.metadata) == ("completed", None, {"who": "me"})
    assert done.request_counts.model_dump() == {"completed": 3, "failed": 1, "total": 4}
    usage = done.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (9, 3, 12)
    assert usage.input_tokens_details.cached_tokens == 2
    assert usage.output_tokens_details.reasoning_tokens == 1
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at <= time.time()
    rows = server.rows(done.output_file_id)
    assert [row["custom_id"] for row in rows] == ["r0", "r1", "r2"]
    for row in rows:
        assert ChatCompletion.model_validate(row["response"]["body"], strict=True).choices[0].message.content
    (refused,) = server.rows(done.error_file_id)
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("bad", 400)
    made = client.files.retrieve(done.output_file_id)
    assert made.purpose == "batch_output" and made.bytes == len(client.files.content(made.id).content)
    assert client.files.content(file.id).content == sent


def test_two_wait_for_one_another_and_counts_grow(server: Standing) -> None:
    first, second = server.begin(lines(4, "slow")), server.begin(lines(1))
    midway = server.until(first, lambda now: now.request_counts.completed > 0)
    assert midway.status == "in_progress" and midway.request_counts.total == 4
    assert server.client.batches.retrieve(second.id).status == "validating"
    with pytest.raises(openai.BadRequestError, match="is being read by batch_"):
        server.client.files.delete(first.input_file_id)
    done = [server.finished(item) for item in (first, second)]
    assert [item.status for item in done] == ["completed", "completed"]
    assert done[0].completed_at <= done[1].in_progress_at
    assert server.client.files.delete(first.input_file_id).deleted


def test_cancel_keeps_what_is_done(server: Standing) -> None:
    working, waiting = server.begin(lines(50, "slow")), server.begin(lines(1))
    gone = server.client.batches.cancel(waiting.id)
    assert gone.status == "cancelled" and gone.cancelled_at and gone.output_file_id is None
    server.until(working, lambda now: now.request_counts.completed > 0)
    assert server.client.batches.cancel(working.id).status == "cancelling"
    ended = server.finished(working)
    assert ended.status == "cancelled" and 0 < ended.request_counts.completed < 50
    assert len(server.rows(ended.output_file_id)) == ended.request_counts.completed
    assert server.client.batches.cancel(working.id).status == "cancelled"


def test_one_that_will_not_leave_is_made_to(server: Standing) -> None:
    batch = server.begin(lines(1) + lines(2, "mule").replace(b'"r', b'"m'))
    server.until(batch, lambda now: now.request_counts.completed == 1)
    server.client.batches.cancel(batch.id)
    assert server.finished(batch).status == "cancelled"


@pytest.mark.parametrize(
    ("sent", "code", "line"),
    [
        (b"\n \n", "empty_file", None),
        (lines(1) + lines(1, url="/v1/embeddings"), "mismatched_endpoint", 2),
        (lines(1) + lines(1, "reject").replace(b"r0", b"r1"), "job_refused", None),
        (lines(1) + lines(1, "crash").replace(b"r0", b"r1"), "worker_failed", None),
    ],
)
def test_a_batch_that_cannot_be_says_why(server: Standing, sent: bytes, code: str, line: int | None) -> None:
    failed = server.finished(server.begin(sent))
    assert failed.status == "failed" and failed.failed_at
    (reason,) = failed.errors.data
    assert (reason.code, reason.line) == (code, line) and reason.message
    if failed.output_file_id:  # what was done before is offered, without the line that the kill tore
        assert [row["custom_id"] for row in server.rows(failed.output_file_id)] == ["r0"]
    assert bool(failed.output_file_id) == (code in {"job_refused", "worker_failed"})


def test_every_malformed_line_is_named_if_all_are(server: Standing) -> None:
    failed = server.finished(server.begin(b"no json\n\n\x1f\x8b\n[1]\n"))
    assert failed.status == "failed"
    assert [(fault.code, fault.line) for fault in failed.errors.data] == [("invalid_json_line", n) for n in (1, 3, 4)]
    assert failed.request_counts.model_dump() == {"completed": 0, "failed": 3, "total": 3}


def test_what_is_not_served_says_what_is(server: Standing) -> None:
    with pytest.raises(openai.NotFoundError, match="only batches are served: upload a file with POST /v1/files"):
        server.client.chat.completions.create(model="org/demo", messages=[{"role": "user", "content": "x"}])
    file = server.upload(lines(1))
    with pytest.raises(openai.BadRequestError, match="files do not expire here") as refused:
        server.client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            output_expires_after={"anchor": "created_at", "seconds": 3600},
        )
    assert refused.value.param == "output_expires_after"


def test_a_batch_of_embeddings_is_taken(server: Standing) -> None:
    sent = lines(2).replace(b"/v1/chat/completions", b"/v1/embeddings")
    done = server.finished(server.begin(sent, endpoint="/v1/embeddings"))
    assert (done.status, done.endpoint, done.request_counts.completed) == ("completed", "/v1/embeddings", 2)
    with pytest.raises(openai.BadRequestError, match=r"/v1/completions, /v1/embeddings are") as refused:
        server.begin(lines(1), endpoint="/v1/responses")
    assert refused.value.param == "endpoint"


def test_pages(server: Standing) -> None:
    made = [server.begin(lines(1)) for _ in range(3)]
    for batch in made:
        server.finished(batch)
    newest = [batch.id for batch in reversed(made)]
    page = server.client.batches.list(limit=2)
    assert [batch.id for batch in page.data] == newest[:2] and page.has_more
    assert [batch.id for batch in server.client.batches.list(limit=1, after=newest[1]).data] == newest[2:]
    every = [batch.id for batch in server.client.batches.list(limit=2)]
    assert every[:3] == newest and len(set(every)) == len(every)
    inputs = [batch.input_file_id for batch in made]
    outputs = [file.id for file in server.client.files.list(purpose="batch_output", limit=3)]
    assert outputs[:3] == [f"file-{batch_id.removeprefix('batch_')}-output" for batch_id in newest]
    assert [file.id for file in server.client.files.list(order="asc", after=inputs[1], purpose="batch")] == inputs[2:]
    for bad in ({"limit": 0}, {"limit": 101}, {"after": "batch_0"}):
        with pytest.raises(openai.BadRequestError) as refused:
            server.client.batches.list(**bad)  # type: ignore[arg-type]
        assert refused.value.param == next(iter(bad))


def test_files_come_and_go(server: Standing) -> None:
    file = server.upload(lines(1))
    assert server.client.files.retrieve(file.id) == file
    assert server.client.files.delete(file.id).deleted
    assert not list(server.data.rglob(file.id))
    for ask in (server.client.files.retrieve, server.client.files.content, server.client.files.delete):
        with pytest.raises(openai.NotFoundError) as missing:
            ask(file.id)
        assert missing.value.code == "not_found"


def test_models(server: Standing) -> None:
    assert [model.id for model in server.client.models.list()] == ["org/demo"]
    assert server.client.models.retrieve("org/demo").owned_by == "moelight"
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("gpt-9")


def test_what_is_on_disk_is_the_owners_alone(server: Standing) -> None:
    server.finished(server.begin(lines(1)))
    assert server.data.stat().st_mode & 0o777 == 0o700
    for path in server.data.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_the_token_is_made_and_named(server: Standing, tmp_path: Path) -> None:
    assert str(server.data / "token") in server.greeting
    assert len(server.token) >= 32
