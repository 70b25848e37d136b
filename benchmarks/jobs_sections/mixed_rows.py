"""Files of prompts as users write them, for jobs whose rows are compared."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_mixed_rows(path: Path, count: int, *, max_tokens: Sequence[int]) -> None:
    """JSON lines of ``max_tokens``, any of them: some that cannot be served, some sampled, some with several answers,
    some conversations."""
    draw = random.Random(3)
    with path.open("w") as file:
        for n in range(count):
            row: dict[str, Any] = {
                "custom_id": f"row-{n if n % 100 != 99 else 3}",
                "prompt": f"add {draw.randrange(999)} and {draw.randrange(99)} =",
                "max_tokens": draw.choice(max_tokens) if n % 17 != 5 else -1,
                "ignore_eos": True,
            }
            if n % 3 == 0:
                row.update(temperature=1.0, seed=n)
            if n % 40 == 7:
                row["n"] = 2
            if n % 25 == 0:
                row["messages"] = [{"role": "user", "content": row.pop("prompt")}]
            file.write("{broken\n" if n % 29 == 11 else json.dumps(row) + "\n")
