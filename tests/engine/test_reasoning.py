"""Reasoning: the format that a template names, how a prompt leaves it, and where it ends in an answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Inner

from moelight.core.request import ReasoningStart
from moelight.engine.chat import ChatTemplate, Conversation
from moelight.engine.reasoning import AnswerSplit, Thinking, find_format, reasoning_start
from moelight.engine.tokenizer import Tokenizer

SPECIAL = [
    "<|channel>",
    "<channel|>",
    "<|start|>",
    "<|end|>",
    "<|channel|>",
    "<|message|>",
    "<|return|>",
    "[THINK]",
    "[/THINK]",
]
PLAIN = ["<think>", "</think>"]
QWEN = (
    "{% for m in messages %}{{ m.role }}\n{{ m.content.split('</think>')[-1] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
R1 = (
    "{{ messages[-1].content.split('</think>')[-1] }}<assistant>"
    "{% if not plain %}<think>\n{% else %}</think>{% endif %}"
)
GPT_OSS = "{{ messages[-1].content }}{# <|channel|>analysis #}<|start|>assistant"
MISTRAL = "[THINK]{{ messages[-1].content }}[/THINK]"


def tokenizer(template: str, *, markers: bool = True) -> Tokenizer:
    """Bytes, and the markers as tokens if ``markers``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Inner(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if markers:
        inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
        inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    return Tokenizer(inner, template=ChatTemplate(template, special_tokens={}), eos_token_ids=frozenset(), named={})


def state(template: str, content: str = "hi", **values: object) -> ReasoningStart | None:
    words = tokenizer(template)
    conversation = Conversation(messages=[{"role": "user", "content": content}], template_kwargs=values)
    return reasoning_start(words, conversation, words.render(conversation))


@pytest.mark.parametrize(
    ("template", "format_name"),
    [(QWEN, "think"), (R1, "think"), (GPT_OSS, "harmony"), (MISTRAL, "mistral"), ("{{ messages }}", None)],
)
def test_the_format_that_a_template_names(template: str, format_name: str | None) -> None:
    assert find_format([template]) == format_name


def test_what_the_prompt_leaves_to_the_answer() -> None:
    think, harmony = "think", "harmony"
    assert state(QWEN) == ReasoningStart(format=think, state="undecided")
    assert state(QWEN, enable_thinking=False) == ReasoningStart(format=think, state="closed")
    assert state(R1) == ReasoningStart(format=think, state="open")
    assert state(R1, plain=True) == ReasoningStart(format=think, state="closed")
    assert state(QWEN, "what does <think> mean?") == ReasoningStart(format=think, state="undecided")
    assert state(GPT_OSS) == ReasoningStart(format=harmony, state="open")
    assert state("{{ messages[-1].content }}") is None


@pytest.mark.parametrize(
    ("content", "expected"), [("<think>so", "open"), ("<think>so</think>ab", "closed"), ("a", "closed")]
)
def test_a_message_that_is_continued(content: str, expected: str) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    conversation = Conversation(messages=messages, add_generation_prompt=False, continue_final_message=True)
    result = reasoning_start(tokenizer("{{ messages[-1].content }}</think>"), conversation, [1])
    assert result is not None and result.state == expected


def split(text: str, format_name: str, begins: str, **how: bool) -> tuple[str | None, str, int]:
    words = tokenizer("", markers=how.pop("markers", True))
    ids = words.encode(text)
    answer = AnswerSplit(ReasoningStart(format=format_name, state=begins), words, ids)
    shown = words.decode(ids, skip_special_tokens=not answer.special)
    return *answer(shown, skip_special_tokens=how.get("skip", True)), answer.reasoning_tokens


@pytest.mark.parametrize("markers", [True, False])
@pytest.mark.parametrize(
    ("text", "begins", "reasoning", "content"),
    [
        ("so</think>\n\nyes", "open", "so", "yes"),
        ("\nso é\n</think>yes</think>", "open", "so é", "yes</think>"),
        ("endless", "open", "endless", ""),
        ("<think>\nso\n</think>\n\nyes", "undecided", "so", "yes"),
        ("\n<think>so</think>yes", "undecided", "so", "yes"),
        ("<th", "undecided", None, "<th"),
        ("<thin air</think>", "undecided", None, "<thin air</think>"),
        ("yes <think>no</think>", "undecided", None, "yes <think>no</think>"),
        ("yes</think>", "closed", None, "yes</think>"),
    ],
)
def test_reasoning_and_content(text: str, begins: str, reasoning: str | None, content: str, markers: bool) -> None:
    assert split(text, "think", begins, markers=markers)[:2] == (reasoning, content)


def test_the_tokens_of_reasoning() -> None:
    assert split("so</think>\n\nyes", "think", "open")[2] == 3
    assert split("<think>so</think>yes", "think", "undecided")[2] == 4
    assert split("yes", "think", "undecided")[2] == 0
    assert split("so</think>yes", "think", "open", markers=False)[2] == 10


def test_reasoning_tokens_before_a_call() -> None:
    thought, call = "<|channel|>analysis<|message|>so<|end|><|start|>assistant", '<|message|>{"a": 1}<|call|>'
    marks = len(tokenizer("").encode(thought))
    for header in ("<|channel|>commentary to=functions.f <|constrain|>json", " to=functions.f<|channel|>commentary"):
        assert split(f"{thought}{header}{call}", "harmony", "open")[2] == marks + len(tokenizer("").encode(header)) + 1
    twice = thought + thought.replace("so", "and") + "<|channel|>final"
    count = len(tokenizer("").encode(f"{twice}<|message|>"))
    assert split(f"{twice}<|message|>yes", "harmony", "open")[2] == count
    assert split(f"{thought}<|channel|>final<|message|>yes", "harmony", "open", markers=False)[2] == len(
        f"{thought}<|channel|>final<|message|>"
    )
    assert split(thought, "harmony", "open")[2] == marks


def test_special_tokens_as_markers() -> None:
    assert split("[THINK]so[/THINK]yes<|end|>", "mistral", "undecided") == ("so", "yes", 4)
    assert split("[THINK]so[/THINK]yes<|end|>", "mistral", "undecided", skip=False)[1] == "yes<|end|>"
    assert find_format(["<|channel>thought {{ messages }}<channel|>"]) == "gemma"
    assert split("<|channel>thought\nso\n<channel|>yes", "gemma", "undecided")[:2] == ("so", "yes")
    assert split("yes<|end|>", "gemma", "undecided")[:2] == (None, "yes")


def test_harmony() -> None:
    thought = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
    assert split(f"{thought}<|channel|>final<|message|>yes<|return|>", "harmony", "open")[:2] == ("so", "yes")
    twice = f"{thought}<|channel|>analysis<|message|>and<|end|><|start|>assistant<|channel|>final<|message|>yes"
    assert split(twice, "harmony", "open")[:2] == ("so\nand", "yes")
    assert split("<|channel|>final<|message|>yes", "harmony", "open")[:2] == (None, "yes")
    assert split("<|channel|>analysis<|message|>so", "harmony", "open")[:2] == ("so", "")
    preamble = f"{thought}<|channel|>commentary<|message|>I look.<|end|>"
    assert split(preamble, "harmony", "open")[:2] == ("so", "I look.")
    assert split("<|channel|>ana", "harmony", "open")[:2] == (None, "")
    assert split("yes", "harmony", "closed")[:2] == (None, "yes")


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return tokenizer(QWEN)


def test_a_budget_closes_the_reasoning(words: Tokenizer) -> None:
    thinking = Thinking(ReasoningStart(format="think", state="open"), words, budget=2)
    end = words.encode("</think>")[0]
    assert thinking.next_end is None
    for token in words.encode("ab"):
        thinking.go_on(token)
    assert thinking.next_end == end
    assert thinking.go_on(end) and thinking.next_end is None and thinking.tokens == 3


def test_a_budget_of_nothing_in_letters() -> None:
    words = tokenizer(QWEN, markers=False)
    thinking, message = Thinking(ReasoningStart(format="think", state="open"), words, budget=0), []
    while (token := thinking.next_end) is not None:
        message.append(token)
        thinking.go_on(token)
    assert words.decode(message) == "</think>" and thinking.over


def test_demo_has_no_reasoning() -> None:
    demo = Tokenizer.from_dir(Path(__file__).resolve().parents[2] / "moelight" / "demo")
    assert reasoning_start(demo, [{"role": "user", "content": "hi"}], [1]) is None
