#!/usr/bin/env bash
# llguidance 1.9.1. One would expect that a schema and the same schema with its parts behind $refs compile alike. A oneOf
# of objects that differ in a constant property compiles where they are written in place; behind $refs, as pydantic writes
# its tagged unions, it is "not supported".
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q llguidance==1.9.1
"$folder/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version

import llguidance


class Bytes:
    is_tokenizer_wrapper = True
    bos_token_id, eos_token_id = None, 256
    tokens = [bytes([value]) for value in range(256)] + [b"<end>"]
    special_token_ids = [256]

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


tokenizer = llguidance.LLTokenizer(Bytes())


def error(schema):
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return llguidance.LLMatcher(tokenizer, grammar, log_level=0).get_error()


def tagged(tag):
    return {"type": "object", "properties": {"kind": {"const": tag}}, "required": ["kind"]}


inline = error({"oneOf": [tagged("a"), tagged("b")]})
referred = error(
    {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": {"A": tagged("a"), "B": tagged("b")}}
)
print("llguidance", version("llguidance"))
print("in place:", inline or "compiles")
print("behind $refs:", referred.splitlines()[0] if referred else "compiles")
raise SystemExit(bool(inline) or "oneOf constraints are not supported" not in referred)
PYTHON
