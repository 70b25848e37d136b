"""Answers that must match: thirty grammars in one batch of random draws, and what is refused before."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from moelight.core.errors import InputError
from moelight.core.policy import Policy
from moelight.core.request import Completion, Request, SamplingParams, StructuredOutputs
from moelight.engine import grammars as trials
from moelight.engine.constraints import Constraint, Constraints, bits_of
from moelight.engine.engine import Engine
from moelight.engine.tokenizer import Tokenizer
from tests.cases import thorough
from tests.engine.test_tokenizer import byte_level, sentence_piece_like
from tests.engines import Tiny

DEMO = Path(__file__).resolve().parents[2] / "moelight" / "demo"
Fits = Callable[[Any], bool]
Answer = Callable[..., Completion]


def value(random: Random, depth: int) -> tuple[dict[str, Any], Fits]:
    """A random schema of bounded texts, and whether a value fits it."""
    match random.choice(
        ["text", "integer", "flag", "enum", "list", "object"] if depth else ["text", "integer", "flag"]
    ):
        case "text":
            maximum = random.randint(1, 6)
            return {
                "type": "string",
                "maxLength": maximum,
            }, lambda result: isinstance(result, str) and len(result) <= maximum
        case "integer":
            low = random.randint(-20, 20)
            return (
                {"type": "integer", "minimum": low, "maximum": low + 30},
                lambda result: isinstance(result, int) and low <= result <= low + 30,
            )
        case "flag":
            return {"type": "boolean"}, lambda result: isinstance(result, bool)
        case "enum":
            known_names = random.sample(["red", "green", 7, None, "a b"], 3)
            return {"enum": known_names}, lambda result: result in known_names
        case "list":
            inner, fits = value(random, depth - 1)
            return (
                {"type": "array", "items": inner, "minItems": 1, "maxItems": 2},
                lambda result: isinstance(result, list) and 1 <= len(result) <= 2 and all(map(fits, result)),
            )
        case _:
            names = random.sample(["name", "n", "ok", "of_what"], random.randint(1, 2))
            parts = {name: value(random, depth - 1) for name in names}
            schema = {
                "type": "object",
                "properties": {name: part for name, (part, _) in parts.items()},
                "required": names,
                "additionalProperties": False,
            }
            return (
                schema,
                lambda result: (
                    isinstance(result, dict)
                    and set(result) == set(names)
                    and all(fits(result[name]) for name, (_, fits) in parts.items())
                ),
            )


def grammars() -> list[tuple[StructuredOutputs, Fits]]:
    """Thirty: each with what its answer's text must pass."""
    made: list[tuple[StructuredOutputs, Fits]] = []
    for seed in range(20):
        schema, fits = value(Random(seed), 2)
        inputs = json.dumps(schema) if seed % 2 else schema
        made.append((StructuredOutputs(json=inputs), lambda text, fits=fits: fits(json.loads(text))))
    for regex in ("[0-9]{3}-[0-9]{4}", "(yes|no)!", "[a-c]{2,5}x", r"\(\d{1,4}(,\d{1,3}){0,2}\)", "a?b?c"):
        made.append((StructuredOutputs(regex=regex), lambda text, regex=regex: re.fullmatch(regex, text) is not None))
    for choice in (["red", "green", "blue"], ["a", "ab", "abc"], ['say "x"']):
        made.append((StructuredOutputs(choice=choice), lambda text, choice=choice: text in choice))
    sums = 'start: one ("+" one)~1..3\none: /[1-9]/ | "(" one ")"'
    made.append((StructuredOutputs(grammar=sums), lambda text: eval(text, {"__builtins__": {}}) > 0))  # noqa: S307
    made.append((StructuredOutputs(json_object=True), lambda text: isinstance(json.loads(text), dict)))
    return made


@pytest.mark.parametrize("device", ["cpu", "twin"])
def test_answers_match_thirty_grammars_in_one_batch(device: str) -> None:
    wanted = grammars()
    policy = Policy(model="demo", batch_size=16, micro_batch_size=8, ffn_device="gpu" if device == "twin" else "cpu")
    hows = [
        SamplingParams(max_tokens=400, temperature=1.0, seed=n, structured_outputs=outputs)
        for n, (outputs, _) in enumerate(wanted)
    ]
    plain = SamplingParams(max_tokens=12, temperature=1.0, seed=1, ignore_eos=True)
    with Engine(policy, device=device) as engine:
        for n, how in enumerate(hows):
            engine.check(Request(index=n, token_ids=(5,), sampling=how))
        result = engine.generate(["tell me: "] * 32, [*hows, plain, plain])
    for (outputs, fits), item in zip(wanted, result, strict=False):
        ended = (item.finish_reason, item.stop_reason)
        if outputs.json_object and item.finish_reason == "length":
            continue  # any object, by a model that knows none, may be long
        assert ended == ("stop", None), (outputs, item)
        assert fits(item.text), (outputs, item.text)
    assert [item.completion_tokens for item in result[30:]] == [12, 12]


@pytest.fixture(scope="module")
def answer() -> Iterator[Answer]:
    """``answer(sampling, **structured_outputs)`` of the bundled model."""
    with Engine(Policy(model="demo", batch_size=2), device="cpu") as engine:

        def generate(how: dict[str, Any], **outputs: Any) -> Completion:
            inputs = {"max_tokens": 30, "temperature": 1.0, "seed": 2, **how}
            return engine.generate(["x"], SamplingParams(structured_outputs=StructuredOutputs(**outputs), **inputs))[0]

        yield generate


def test_an_answer_cut_short_says_so(answer: Answer) -> None:
    result = answer({"max_tokens": 4}, regex="[a-z]{20}")
    assert (len(result.text), result.finish_reason) == (4, "length")


def test_the_grammar_outranks_what_would_leave_no_token(answer: Answer) -> None:
    """Neither a least number of tokens nor a bias makes an answer that does not match."""
    eos_is_likely = {"logit_bias": {1: 100.0}}
    assert answer(eos_is_likely, regex="[a-z]{5}").completion_tokens == 5
    assert answer({"min_tokens": 20, **eos_is_likely}, regex="[a-z]{2,9}").completion_tokens == 9
    assert answer({"ignore_eos": True}, choice=["yes", "no"]).text in ("yes", "no")
    assert answer({"stop_token_ids": [90, 91], "min_tokens": 3}, regex="[vw]{4}").completion_tokens <= 4


def test_allowed_tokens_within_a_grammar(answer: Answer) -> None:
    a, b = demo_ids("ab")
    result = answer({"allowed_token_ids": [a, b]}, regex="[a-z]{8}")
    assert result.finish_reason == "stop" and set(result.text) <= {"a", "b"}
    result = answer({"allowed_token_ids": [a, b]}, regex="[ab]{3}c")
    assert (result.finish_reason, len(result.text)) == ("error", 3)
    assert "allowed_token_ids" in str(result.stop_reason)


def test_bad_words_leave_the_grammar_its_last_token(answer: Answer) -> None:
    a, b, c = demo_ids("abc")
    among = {"allowed_token_ids": [a, b, c], "bad_words": ["ab", "c"]}
    result = answer(among, regex="[abc]{12}")
    assert result.completion_tokens == 12 and set(result.text) <= {"a", "b"} and "ab" not in result.text
    assert answer(among, regex="bab").text == "bab"


def demo_ids(text: str) -> list[int]:
    return Tokenizer.from_dir(DEMO).encode(text, add_special_tokens=False)


def test_a_pattern_and_a_length_both_hold(answer: Answer) -> None:
    schema = json.dumps({"type": "string", "pattern": "^[a-z]+-[0-9]+$", "maxLength": 7})
    for seed in range(3):
        text = answer({"temperature": 1.5, "seed": seed}, json=schema).text
        assert re.fullmatch("[a-z]+-[0-9]+", json.loads(text)) and len(json.loads(text)) <= 7


def test_an_answer_that_no_token_goes_on_with_is_an_error(answer: Answer) -> None:
    """The demo's vocabulary has no é, which is found only where it is needed."""
    result = answer({"logprobs": 0}, regex="abé")
    assert (result.text, result.finish_reason) == ("ab", "error")
    assert "no token" in str(result.stop_reason)
    assert len(result.logprobs or ()) == 2


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        ({"json": {"type": "objekt"}}, "objekt"),
        ({"json": "{"}, "not JSON"),
        ({"json": "[1]"}, ""),
        ({"json": {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}, "required": ["a"]}}, ""),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, ""),
        ({"grammar": "start: x"}, "unknown name"),
        ({"choice": ["é"]}, "no token"),
    ],
    ids=str,
)
def test_what_cannot_be_compiled_is_refused_before_it_runs(outputs: dict[str, Any], says: str) -> None:
    constraints = Constraints(Tokenizer.from_dir(DEMO), 98)
    for _ in range(2):  # also when it is known
        with pytest.raises(InputError) as refusal:
            constraints.check(StructuredOutputs(**outputs))
        assert refusal.value.code == "invalid_structured_output"
        assert says in str(refusal.value)
        assert "\n" not in str(refusal.value)
        assert len(str(refusal.value)) < 400


def chained(kind: str, count: int) -> dict[str, Any]:
    """A grammar of so many definitions, each of which is the next one."""
    names = range(count)
    match kind:
        case "$refs":
            chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in names}
            return {"json": {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{count}": {"type": "integer"}}}}
        case "rules":
            return {"grammar": "\n".join(["start: r0", *(f"r{n}: r{n + 1}" for n in names), f'r{count}: "a"'])}
        case _:
            return {"grammar": "\n".join(["start: T0", *(f"T{n}: T{n + 1}" for n in names), f'T{count}: "a"'])}


@pytest.mark.parametrize("kind", thorough(["$refs", "rules", "terminals"], but=["rules"]))
def test_a_grammar_that_is_too_deep_ends_a_process_of_its_own(kind: str) -> None:
    """Compiled in this one, 30,000 would end it by a segmentation fault."""
    constraints = Constraints(Tokenizer.from_dir(DEMO), 98)
    constraints.check(StructuredOutputs(**chained(kind, 1000)))
    for _ in range(2):  # also when it is known
        with pytest.raises(InputError, match="chained or nested too deeply") as refusal:
            constraints.check(StructuredOutputs(**chained(kind, 30_000)))
        assert refusal.value.code == "invalid_structured_output"
    constraints.check(StructuredOutputs(regex="[a-z]"))
    constraints.close()


def properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(count)}}


@pytest.mark.parametrize(
    ("limit", "least", "says"),
    [("TRIED_S", 0.02, "s of processor time"), ("TRIED_BYTES", 12 << 20, "too large (compiling it takes more than")],
)
def test_a_grammar_that_takes_too_much_is_refused(
    limit: str, least: float, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, limit, least)
    constraints = Constraints(Tokenizer.from_dir(DEMO), 98)
    with pytest.raises(InputError) as refusal:
        constraints.check(StructuredOutputs(json=properties(2000)))
    assert says in str(refusal.value)
    constraints.check(StructuredOutputs(regex="[a-z]"))
    constraints.close()


def test_grammars_are_tried_in_one_process_which_anything_may_end() -> None:
    words = trials.Vocabulary(tokens=[b"a", b"b", b""], special_token_ids=[2], ends=[2], encode=lambda _: [])
    trial = trials.GrammarTrial(words)
    assert trial.compile("regex", "a+").reason is None
    first = trial.process._process
    assert first is not None
    assert trial.compile("regex", "b+").reason is None and trial.process._process is first
    assert "unclosed group" in (trial.compile("regex", "(a").reason or "") and trial.process._process is first
    first.kill()
    assert trial.compile("regex", "ab").reason is None and trial.process._process is not first
    trial.process.close()
    trial.process.close()
    assert trial.compile("regex", "ba").reason is None
    trial.process.close()


def masks(tokenizer: Tokenizer, constraint: Constraint) -> Iterator[list[int]]:
    """The tokens that may come next, along every way there is."""
    allowed = constraint.allowed()
    result = [] if allowed is None else bits_of(allowed)
    yield result
    for token in result:
        if token not in tokenizer.eos_token_ids:
            further = Constraint(constraint._matcher.deep_copy(), constraint._special)
            further.go_on(token)
            if not further.complete:
                yield from masks(tokenizer, further)


def test_choices_are_what_a_grammar_of_them_would_be() -> None:
    tokenizer = Tokenizer.from_dir(DEMO)
    constraints = Constraints(tokenizer, 98)
    draw = Random(5)
    for _ in range(25):
        letters = draw.choice(["ab", "abc .", "()[]{}|?", "\\.+*^$", "a-z&#~", "\"'/"])
        texts = ["".join(draw.choices(letters, k=draw.randint(1, 4))) for _ in range(draw.randint(1, 9))]
        grammar = "start: " + " | ".join(json.dumps(text) for text in texts)
        ways = [
            list(masks(tokenizer, constraints.open(StructuredOutputs(**inputs))))
            for inputs in ({"choice": texts}, {"grammar": grammar})
        ]
        assert ways[0] == ways[1], texts
    constraints.close()


@pytest.mark.thorough
def test_of_very_many_choices_one_is_answered(answer: Answer) -> None:
    """The same one where the others are far behind."""
    many = [f"option {n:05d}" for n in range(10_000)]
    how = {"temperature": 0.0}
    result = answer(how, choice=many)
    assert (result.finish_reason, result.text in many) == ("stop", True)
    at = many.index(result.text)
    assert answer(how, choice=many[max(0, at - 20) : at + 20]).token_ids == result.token_ids


TOO_LARGE = "structured_outputs: it is too large for llguidance ("


@pytest.mark.parametrize(
    "outputs",
    thorough(
        [
            {"regex": "(a{1000}){1000}"},
            {"regex": "a{1000000000}"},
            {"choice": [f"option {n}" for n in range(150_000)]},
        ],
        but=[{"regex": "(a{1000}){1000}"}],
    ),
    ids=["repeated", "repeated at once", "choices"],
)
def test_what_is_too_large_for_the_library_is_called_so(outputs: dict[str, Any]) -> None:
    constraints = Constraints(Tokenizer.from_dir(DEMO), 98)
    with pytest.raises(InputError) as refusal:
        constraints.check(StructuredOutputs(**outputs))
    assert str(refusal.value).startswith(TOO_LARGE)
    constraints.close()


def test_an_answer_that_becomes_too_large_is_an_error(answer: Answer) -> None:
    result = answer({}, regex="[b-d]{3}(a{1000}){1000}")
    assert (len(result.text) >= 2, result.finish_reason) == (True, "error")
    assert str(result.stop_reason).startswith(TOO_LARGE)


def test_equal_specifications_are_compiled_once() -> None:
    constraints = Constraints(Tokenizer.from_dir(DEMO), 98)
    first = constraints.open(StructuredOutputs(regex="[0-9]{3}"))
    first.go_on(20)
    second = constraints.open(StructuredOutputs(regex="[0-9]{3}"))
    for _ in range(2):
        first.go_on(20)
    assert first.complete
    assert not second.complete
    assert constraints._structures.cache_info().misses == 1


@pytest.mark.parametrize("kind", [byte_level, sentence_piece_like])
def test_characters_of_several_tokens_and_padding_of_the_vocabulary(
    kind: Callable[[Path], Path], tmp_path: Path
) -> None:
    """Where the model's vocabulary is larger than the tokenizer's, what is beyond never comes."""
    tokenizer = Tokenizer.from_dir(kind(tmp_path))
    padded = tokenizer.vocab_size + 45
    constraint = Constraints(tokenizer, padded).open(StructuredOutputs(choice=["界🦊", "é"]))
    text = b""
    while not constraint.complete:
        allowed = constraint.allowed()
        assert allowed is not None
        tokens = [token for token in range(32 * len(allowed)) if int(allowed[token // 32]) >> token % 32 & 1]
        assert max(tokens) < tokenizer.vocab_size
        constraint.go_on(tokens[0])
        text += tokenizer.token_bytes(tokens[0])
    assert text.decode() in ("界🦊", "é")


def test_vocabulary_and_structure_are_checked_before_running(tiny: Tiny) -> None:
    with Engine(Policy(model=str(tiny("mixtral"))), device="cpu") as engine:
        for fields, code in [
            ({"logit_bias": {307: 1.0}}, "bad_token_id"),
            ({"stop_token_ids": [5, 400]}, "bad_token_id"),
            ({"structured_outputs": {"regex": "["}}, "invalid_structured_output"),
        ]:
            with pytest.raises(InputError) as refusal:
                engine.generate(["x", "y"], SamplingParams.from_dict(dict(fields)))
            assert refusal.value.code == code
            assert "prompt 0" in str(refusal.value)
        engine.generate(["x"], SamplingParams(logit_bias={306: 1.0}, stop_token_ids=[306], max_tokens=1))
