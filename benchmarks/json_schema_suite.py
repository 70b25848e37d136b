"""The official JSON Schema test suite through structured outputs: how many groups of tests are served, by constraint
or by validation, and whether anything invalid is accepted.

    python benchmarks/json_schema_suite.py --suite JSON-Schema-Test-Suite [--optional] [--draft draft2020-12]

The suite is at https://github.com/json-schema-org/JSON-Schema-Test-Suite. An instance is accepted if every byte of it
is allowed by the masks of its schema's constraint, and the finished text is valid for the validator. Refused groups
have no verdicts. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from runner.run import run
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from moelight.core.errors import InputError
from moelight.core.request import StructuredOutputs
from moelight.engine.constraints import Constraints
from moelight.engine.tokenizer import Tokenizer

COLUMNS = (
    "groups", "by constraint", "by validation", "refused", "valid", "accepted", "invalid", "rejected by constraint",
    "rejected by validation", "wrongly accepted",
)  # fmt: skip


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose tokens are single bytes."""
    letters = sorted(ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)} | {"<end>": len(letters)}
    fast = FastTokenizer(BPE(vocabulary, []))
    fast.pre_tokenizer, fast.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    fast.add_special_tokens(["<end>"])
    with tempfile.TemporaryDirectory() as directory:
        fast.save(str(Path(directory) / "tokenizer.json"))
        (Path(directory) / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
        (Path(directory) / "config.json").write_text(json.dumps({"eos_token_id": len(letters)}))
        return Tokenizer.from_dir(Path(directory))


class Judge:
    """The verdict of structured outputs on texts."""

    def __init__(self) -> None:
        self._tokenizer = byte_tokenizer()
        self.constraints = Constraints(self._tokenizer, 257)

    def constrained(self, outputs: StructuredOutputs, text: str) -> bool:
        """True if the constraint of ``outputs`` allows ``text``, and an end behind it."""
        constraint = self.constraints.open(outputs)
        for token in self._tokenizer.encode(text):
            if constraint.complete or (mask := constraint.allowed()) is None:
                return False
            if not int(mask[token // 32]) >> token % 32 & 1:
                return False
            constraint.go_on(token)
        return constraint.accepts

    def count(self, group: dict[str, object], counts: Counter[str]) -> str | None:
        """Add the verdicts of a group of tests to ``counts``; returns why it is refused, if it is."""
        outputs = StructuredOutputs(json=json.dumps(group["schema"]))
        counts["groups"] += 1
        try:
            notes = self.constraints.check(outputs)
        except InputError as error:
            counts["refused"] += 1
            return str(error)
        validated = any("is checked in finished answers" in note for note in notes)
        counts["by validation" if validated else "by constraint"] += 1
        for test in group["tests"]:  # type: ignore[attr-defined]
            text = json.dumps(test["data"], ensure_ascii=False)
            allowed = self.constrained(outputs, text)
            accepted = allowed and self.constraints.mismatch(outputs, text) is None
            counts["valid" if test["valid"] else "invalid"] += 1
            if test["valid"]:
                counts["accepted"] += accepted
            elif accepted:
                counts["wrongly accepted"] += 1
            else:
                counts["rejected by validation" if allowed else "rejected by constraint"] += 1
        return None


def files(suite: Path, draft: str, *, optional: bool) -> Iterator[tuple[str, Path]]:
    root = suite / "tests" / draft
    for path in sorted(root.glob("optional/**/*.json" if optional else "*.json")):
        yield str(path.relative_to(root)).removesuffix(".json"), path


def main() -> None:
    run("json_schema_suite", __doc__, _options, _measure, threads=False)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", type=Path, required=True, help="a checkout of the suite")
    parser.add_argument("--draft", default="draft2020-12", help="the folder of one draft (default: draft2020-12)")
    parser.add_argument("--optional", action="store_true", help="the optional tests instead of the required ones")
    parser.add_argument("--refusals", action="store_true", help="also print why each refused group is refused")


def _measure(options: argparse.Namespace) -> dict[str, int]:
    judge, total = Judge(), Counter[str]()
    print(f"| file | {' | '.join(COLUMNS)} |\n|---|{'--:|' * len(COLUMNS)}")
    refusals: list[str] = []
    for name, path in files(options.suite, options.draft, optional=options.optional):
        counts = Counter[str]()
        groups = json.loads(path.read_text(encoding="utf-8"))
        reasons = [(group["description"], judge.count(group, counts)) for group in groups]
        refusals += [f"{name}: {group}: {reason}" for group, reason in reasons if reason is not None]
        print(f"| {name} | {' | '.join(str(counts[column]) for column in COLUMNS)} |")
        total += counts
    print(f"| all | {' | '.join(str(total[column]) for column in COLUMNS)} |")
    if options.refusals:
        print(*refusals, sep="\n")
    judge.constraints.close()
    return {column: total[column] for column in COLUMNS}


if __name__ == "__main__":
    main()
