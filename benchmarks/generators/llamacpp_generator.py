"""llama.cpp as a contestant, through its own ``llama-batched-bench``, on a GGUF file made of the checkpoint.

That program is started at every turn, loads (which is not counted), and feeds random ids, not ours and not what it
chose itself: its tokens cannot be compared, and all else can. A prompt's step gives the first new token, so it is asked
for one token less. ``options``: ``bench`` (the program), ``gguf`` (the file), ``ubatch`` (most tokens in one step),
``unified`` (one cache for all sequences, else each one's is a multiple of 256 tokens), ``repack`` (false: weights stay
in the mapped file; some types are otherwise copied in another order, which a limit of memory may not have room for).
"""

from __future__ import annotations

import json
import resource
import subprocess

from common import Facts, Generate, Ids, Task, serve


def load(task: Task) -> Generate:
    """Nothing is loaded before its turn comes."""
    prompt, new = len(task.prompts[0]), task.new_tokens[0]

    def generate(count: int) -> tuple[Ids, Facts]:
        context = count * (prompt + new)
        sizes = {"-c": context, "-npp": prompt, "-ntg": new - 1, "-npl": count, "-t": task.threads, "-tb": task.threads}
        step = task.options.get("ubatch", 512)
        command = [task.options["bench"], "-m", task.options["gguf"], "-b", max(2048, step), "-ub", step]
        command += [item for pair in sizes.items() for item in pair]
        command += ["-kvu"] if task.options.get("unified") else []
        command += [] if task.options.get("repack", True) else ["--no-repack"]
        done = subprocess.run(
            [*map(str, command), "--output-format", "jsonl"], check=True, stdout=subprocess.PIPE, text=True
        )
        return [], figures(done.stdout) | {"peak_rss_bytes": _peak_rss_bytes()}

    return generate


def figures(text: str) -> Facts:
    """Seconds of the prompts, of decoding and of both, out of what the program printed."""
    row = next(json.loads(line) for line in text.splitlines() if line.startswith("{"))
    return {"seconds": row["t"], "first_s": row["t_pp"], "decode_s": row["t_tg"]}


def _peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


if __name__ == "__main__":
    serve(load, warms=False)
