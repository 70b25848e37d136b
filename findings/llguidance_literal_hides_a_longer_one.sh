#!/usr/bin/env bash
# llguidance 1.9.1: in a Lark grammar, a literal is lost where a longer one goes on with the same letter.
#
# One would expect
#     start: "<a>" ("\n" "<a>")* "\n</a>"
# to accept "<a>\n<a>\n</a>": Lark's own Earley parser does, and so does the regular expression <a>(\n<a>)*\n</a>.
# llguidance takes each literal as a lexeme, and its lexer takes the longest one without going back: behind "\n" the "<"
# goes on with "\n</a>", so that a second "<a>" is refused, and no answer has two of them. Written with the line break
# behind each "<a>",
#     start: ("<a>" "\n")+ "</a>"
# the same texts are accepted.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q llguidance==1.9.1 lark==1.3.1
"$folder/venv/bin/python" - <<'END'
import re

import lark
import llguidance

TEXT = "<a>\n<a>\n</a>"
BETWEEN = 'start: "<a>" ("\\n" "<a>")* "\\n</a>"'
BEHIND = 'start: ("<a>" "\\n")+ "</a>"'


class Bytes:
    tokens = [*(bytes([value]) for value in range(256)), b"<end>"]
    special_token_ids = [256]
    eos_token_id, bos_token_id, is_tokenizer_wrapper = 256, None, True

    def __call__(self, text):
        return list(text.encode())


def accepted(grammar, text):
    """How many bytes of the text the grammar accepts."""
    tokenizer = llguidance.LLTokenizer(Bytes(), eos_token=256)
    matcher = llguidance.LLMatcher(tokenizer, llguidance.grammar_from("lark", grammar))
    return matcher.validate_tokens(list(text.encode()))


version = __import__("importlib.metadata").metadata.version
print("llguidance", version("llguidance"), "lark", version("lark"))
lark.Lark(BETWEEN, parser="earley", lexer="dynamic").parse(TEXT)
matched = bool(re.fullmatch(r"<a>(\n<a>)*\n</a>", TEXT))
print("lark's Earley parser accepts", repr(TEXT), "and so does the regular expression:", matched)
counts = {grammar: accepted(grammar, TEXT) for grammar in (BETWEEN, BEHIND)}
for grammar, count in counts.items():
    print(f"llguidance accepts {count} of {len(TEXT)} bytes by {grammar!r}")
if counts != {BETWEEN: 5, BEHIND: len(TEXT)}:
    raise SystemExit("it has changed")
END
