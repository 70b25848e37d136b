"""What was measured of each architecture of GGUF files: ``gguf_tested.json``, which ``make gguf`` writes
(tests/engine/gguf_architectures.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

TABLE = Path(__file__).with_name("gguf_tested.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchitectureTest:
    """One architecture, and how its tiny files did.

    Attributes:
        name: ``general.architecture``; in brackets, another config of it.
        model_type: of the family that computes it.
        equal: of ``tokens`` greedy tokens from a float32 file of llama.cpp's converter, those that are transformers'.
        kinds: by kind of file (``Q4_K_M``), which llama.cpp's quantiser wrote, of as many greedy tokens those that are
            the same as from its unpacked values, as ``24 of 24``, or the reason if it was refused.
        reason: of a refused architecture.
    """

    name: str
    model_type: str
    equal: int = 0
    tokens: int = 0
    kinds: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""


def read_tests(path: Path = TABLE) -> tuple[ArchitectureTest, ...]:
    """All tests, by name."""
    return tuple(ArchitectureTest(**entry) for entry in json.loads(path.read_text(encoding="utf-8")))


def write_tests(tests: Mapping[str, ArchitectureTest], path: Path = TABLE) -> None:
    """Write ``tests``, by name; raises OSError."""
    lines = (json.dumps({key: value for key, value in asdict(tests[name]).items() if value}) for name in sorted(tests))
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
