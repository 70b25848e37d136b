#!/usr/bin/env bash
# llguidance 1.9.1, jsonschema-rs 0.61.0. One would expect that a text which a JSON schema's grammar accepts is valid once
# it is parsed, and that numbers are accepted in the schema's own spelling. Instead a repeated name of an object counts
# twice: {"minProperties": 2} lets {"a": 1, "a": 2} through, which has one property; and an enum of 1.0 accepts the text 1
# alone, not 1.0.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q llguidance==1.9.1 jsonschema-rs==0.61.0
"$folder/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version

import jsonschema_rs
import llguidance


class Bytes:
    is_tokenizer_wrapper = True
    bos_token_id, eos_token_id = None, 256
    tokens = [bytes([value]) for value in range(256)] + [b"<end>"]
    special_token_ids = [256]

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


tokenizer = llguidance.LLTokenizer(Bytes())


def accepts(schema, text):
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


repeated, two = '{"a": 1, "a": 2}', {"minProperties": 2}
print("llguidance", version("llguidance"), "jsonschema-rs", version("jsonschema-rs"))
results = [
    ("minProperties 2, grammar accepts a repeated name", accepts(two, repeated), True),
    ("minProperties 2, validator accepts what is parsed", jsonschema_rs.is_valid(two, json.loads(repeated)), False),
    ("enum [1.0], grammar accepts 1", accepts({"enum": [1.0]}, "1"), True),
    ("enum [1.0], grammar accepts 1.0", accepts({"enum": [1.0]}, "1.0"), False),
    ("enum [1.0], validator accepts 1.0", jsonschema_rs.is_valid({"enum": [1.0]}, 1.0), True),
]
for name, result, expected in results:
    print(f"{name}: {result}")
raise SystemExit(any(result != expected for _, result, expected in results))
PYTHON
