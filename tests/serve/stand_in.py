"""Stands in for ``moelight generate``: ``stand_in.py INPUT OUTPUT ERRORS STATUS`` answers batch lines without a model.

Rows that are there already are kept, torn ones cut off, and at the end a journal says how many there are, as the real
job does. What a line asks for in its ``user`` field, it does: ``refuse`` makes an error row, ``slow`` takes its time,
``crash`` ends the process as a full memory would, ``panic`` as an exception that nobody catches, ``reject`` refuses the
job, ``skip`` leaves the row out and goes on, ``mule`` ignores interrupts from there on, ``full`` finds the disk full as
long as there is a file ``full`` beside ``began.log``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it is started without site-packages
from moelight.batch.append import ByteRange
from moelight.batch.store import JobRecord, RowSet, RowStore

SLOW_S = 0.1
USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}


def answer(line: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": f"to {line['custom_id']}", "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    base = {"id": "c-1", "object": "chat.completion", "created": 1, "model": "demo", "choices": [choice]}
    body = {**base, "usage": USAGE}
    if line["body"].get("user") == "refuse":
        body = {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": "refused"}}
    code = 200 if "usage" in body else 400
    response = {"status_code": code, "request_id": "r-1", "body": body}
    return {"id": "batch_req_1", "custom_id": line["custom_id"], "response": response, "error": None}


def rows_in(path: Path) -> set[str]:
    if not path.exists():
        return set()
    full = path.read_bytes()
    full = full[: full.rfind(b"\n") + 1]
    path.write_bytes(full)
    return {json.loads(line)["custom_id"] for line in full.splitlines()}


def write_journal(path: Path, total: int, files: dict[str, Path], rows: dict[str, set[str]]) -> None:
    """The journal of a job that is complete, with what a server reads of it."""
    store = RowStore(path, shown=path)
    store.begin(JobRecord(layout={}, facts={}))
    ends = {name: file.stat().st_size for name, file in files.items() if file.exists()}
    counts = {"completed": len(rows["output"]), "failed": len(rows["errors"])}
    done = RowSet()
    for number in range(sum(counts.values())):
        done.add(number)
    extents = {name: ByteRange(start=0, end=end, crc=0) for name, end in ends.items()}
    answered = len(rows["output"])
    totals = {"prompt_tokens": 3 * answered, "completion_tokens": answered, "cached_tokens": max(0, answered - 1)}
    totals["reasoning_tokens"] = max(0, answered - 2)
    store.commit(
        {**counts, "stage": "complete", "total": total, "totals": totals}, parts=done.changed_parts(), extents=extents
    )
    store.close()


def main(source: Path, output: Path, errors: Path, status: Path) -> int:
    lines = [json.loads(line) for line in source.read_bytes().splitlines() if line.strip()]
    done, refused = rows_in(output), rows_in(errors)
    with (output.parents[2] / "began.log").open("a", errors="backslashreplace") as began:
        began.write(f"{os.getpid()} {output.parent.name}\n")
    for line in lines:
        wish, name = line["body"].get("user"), line["custom_id"]
        if name in done | refused:
            continue
        if wish == "reject":
            print("moelight: error: this job is refused", file=sys.stderr)
            return 2
        if wish == "panic":
            raise BaseException("retry-limit-in-match over")
        if wish == "skip":
            continue
        if wish == "full" and (output.parents[2] / "full").exists():
            print("moelight: error: output x: cannot be written (no space left on device); mend", file=sys.stderr)
            return 74
        if wish == "mule":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            time.sleep(60)
        if wish == "slow":
            time.sleep(SLOW_S)
        if wish == "crash":
            output.open("ab").write(b'{"torn":')
            os.kill(os.getpid(), signal.SIGKILL)
        row = answer(line)
        kind, path = (refused, errors) if wish == "refuse" else (done, output)
        with path.open("ab") as file:
            file.write(json.dumps(row).encode() + b"\n")
        kind.add(name)
        counts = {"total": len(lines), "completed": len(done), "failed": len(refused)}
        partial = status.with_suffix(".partial")
        partial.write_text(json.dumps({"request_counts": counts}))
        partial.replace(status)
    files, rows = {"output": output, "errors": errors}, {"output": done, "errors": refused}
    write_journal(output.with_name(f"{output.name}.journal"), len(lines), files, rows)
    return 1 if refused else 0


if __name__ == "__main__":
    try:
        sys.exit(main(*map(Path, sys.argv[1:])))
    except KeyboardInterrupt:
        sys.exit(130)
