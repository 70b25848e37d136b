"""What a hostile chat template may not do: leave its sandbox, change a row, or take more than its time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from moelight.core.confined import ConfinedProcess
from moelight.core.errors import InputError
from moelight.engine import chat, sandbox
from moelight.engine.chat import ChatTemplate, Conversation

MESSAGES = [{"role": "user", "content": "x"}]
ESCAPES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "by filter": "{{ '' | attr('__class__') }}",
    "by item": "{{ ''['__class__'] }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals of a helper": "{{ strftime_now.__globals__['datetime'] }}",
    "globals of cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "self": "{{ self.__init__.__globals__ }}",
    "namespace": "{{ namespace.__init__.__globals__ }}",
    "format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "format by reference": "{% set f = '{0.__class__}'.format %}{{ f('') }}",
    "format by filter": "{{ ['{0.__class__}'] | map('format', '') | list }}",
    "namespace attribute": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.__class__ }}",
    "namespace at birth": "{{ namespace(__html__=raise_exception) }}",
    "import": "{% import 'os' as os %}",
    "include": "{% include '/etc/passwd' %}",
    "change a message": "{{ messages.append({}) }}",
    "change a key": "{{ messages[0].update({'role': 'root'}) }}",
    "by map": "{{ [''] | map(attribute='__class__') | list }}",
    "by a path": "{{ [''] | map(attribute='__class__.__mro__') | list }}",
    "by sorting": "{{ [''] | sort(attribute='__class__') | groupby('__class__') | list }}",
    "by selecting": "{{ [cycler] | selectattr('__init__') | list }}",
    "attr by map": "{{ [''] | map('attr', '__class__') | list }}",
    "format over an index": "{{ '{0[__class__]}'.format('') }}",
    "format of a method": "{{ '{0.format.__globals__}'.format('') }}",
    "format in format": "{{ '{0:{1.__class__}}'.format('', '') }}",
    "format as a value": "{{ [''.format] | map(attribute='__self__') | list }}",
    "context of the template": "{{ self._TemplateReference__context }}",
    "environment of a macro": "{% macro f() %}{% endmacro %}{{ f._environment }}{{ f._func.__globals__ }}",
    "undefined": "{{ nothing._undefined_exception }}{{ nothing.__init__.__globals__ }}",
    "joiner": "{{ joiner.__init__.__globals__ }}{{ joiner('').__class__ }}",
    "loop": "{% for x in [1] %}{{ loop._iterator }}{{ loop.__class__ }}{% endfor %}",
    "caller": "{% macro f() %}{{ caller.__init__.__globals__ }}{% endmacro %}{% call f() %}{% endcall %}",
    "dict and its class": "{{ dict.mro() }}{{ dict.__base__ }}",
    "change a message by its class": "{{ dict.update(messages[0], {'role': 'root'}) }}",
    "change a message by an operator": "{% set m = messages[0] %}{% set m.role = 'root' %}",
    "the private filters": "{{ '' | _weigh | _tick }}{{ [raise_exception] | _concat }}",
    "namespace from pairs": "{% set ns = namespace([('__class__', 1)]) %}{{ ns.__class__ }}",
    "unbound": "{{ cycler.next }}{{ namespace.__setitem__ }}",
    "import of a message": "{% import messages[0].content as x %}",
    "extends": "{% extends '/etc/passwd' %}",
    "from import": "{% from 'os' import system %}{{ system('id') }}",
    "generator frame": "{{ (messages | map('upper')).gi_frame.f_back }}",
}


@pytest.mark.parametrize("kind", ESCAPES)
def test_a_template_cannot_leave_its_sandbox(kind: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    try:
        text = ChatTemplate(ESCAPES[kind], special_tokens={}).render(messages)
    except InputError:
        text = ""
    for secret in ("<class", "<module", "uid=", "root", "frame", "<built-in"):
        assert secret not in text
    assert messages == [{"role": "user", "content": "x"}]


CALLED = {
    "{{ ' a '.strip() }}": "a",
    "{% set f = ' a '.strip %}{{ f() }}": "a",
    "{% for k, v in messages[0].items() %}{{ k }}{{ v }}{% endfor %}": "roleusercontentx",
    "{{ messages[0].get('role') | default('') }}": "user",
    "{% if ''.strip %}a{% endif %}{% if messages[0].items is defined %}b{% endif %}": "ab",
    "{{ messages[0].items is string }}{{ messages[0].items is mapping }}": "FalseFalse",
    "{{ 'user' in messages | map(attribute='role') }}": "True",
    "{{ dict(messages[0] | items).role }}": "user",
    "{{ messages | map(attribute='role') | join }}": "user",
    "{{ '{} {!r}'.format('a', 'b') }}{{ '%s' % 1 }}": "a 'b'1",
    "{{ [1, none, true, 'a', {'b': 2.5}] }}": "[1, None, True, 'a', {'b': 2.5}]",
    "{{ range(3) }}{{ messages[0].keys() | list }}": "range(0, 3)['role', 'content']",
    "{% macro f(g) %}{{ g() }}{% endmacro %}{% macro h() %}a{% endmacro %}{{ f(h) }}{{ nothing }}": "a",
}


@pytest.mark.parametrize("source", CALLED)
def test_methods_are_called_and_values_written(source: str) -> None:
    assert ChatTemplate(source, special_tokens={}).render(MESSAGES) == CALLED[source]


GROW = {
    "plus": "ns.x + ns.x",
    "join": "[ns.x, ns.x] | join",
    "replace": "ns.x.replace('a', 'aaaaaaaaaaaa')",
    "percent": "'%s%s' % (ns.x, ns.x)",
    "format": "'{0}{0}'.format(ns.x)",
    "format map": "'{x}{x}'.format_map({'x': ns.x})",
    "indent": "(ns.x | indent(9999, blank=true)) | replace(' ', '\\n')",
    "list": "[ns.x] * 2 | list",
}
BOMBS = {
    **{
        f"growing by {name}": "{% set ns = namespace(x='a\\n') %}{% for i in range(60) %}{% set ns.x = "
        + step
        + " %}{% endfor %}{{ ns.x | string }}"
        for name, step in GROW.items()
    },
    "repeat": "{{ 'a' * 10**10 }}",
    "power": "{% set ns = namespace(x=2) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "power of a power": "{{ 10 ** (10 ** 8) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "zfill": "{{ '1'.zfill(10**9) }}",
    "center": "{{ 'a' | center(9999999999) }}",
    "percent width": "{{ '%9999999999d' % 1 }}",
    "percent precision": "{{ '%.999999999f' | format(1) }}",
    "format width": "{{ '{:>9999999999}'.format(1) }}",
    "expandtabs": "{{ '\\t'.expandtabs(10**9) }}",
    "to_bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "batches kept": "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}"
    "{% set ns.x = [ns.x, [1] | batch(9999, 'x') | list] %}{% endfor %}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "round": "{{ 1.5 | round(10**9, 'floor') }}",
    "json indent": "{{ [[[1]]] | tojson(indent=10**9) }}",
    "json separators": "{{ range(9999) | list | tojson(separators=('x' * 9999, ':')) }}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    "range": "{{ range(10**12) }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over filters": "{% for a in range(99999) %}{{ range(99999) | select | reject | first }}{% endfor %}",
    "loops over sums": "{% for a in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "a long text often": "{% for a in range(99999) %}" + "x" * 9000 + "{% endfor %}",
    "long lists often": "{% set ns = namespace(x=[]) %}{% for a in range(99999) %}{% set ns.x = [ns.x, ["
    + "[]," * 3000
    + "]] %}{% endfor %}",
    "macros that fork": "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(80) }}",
    "macros without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a loop in itself": "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "search": "{% set s = 'a' * 1000000 %}{% for i in range(99999) %}{{ 'b' in s }}{% endfor %}",
    "pieces": "{% set s = 'a' * 1000000 %}{% for i in range(99999) %}{% set t = s[1:] %}{% endfor %}",
    "flattened": "{{ ([[1, 2, 3] * 100] * 9999) | sum(start=[]) | length }}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep loops": "{% for a in [1] %}" * 25 + "{% endfor %}" * 25,
    "a long complaint": "{{ raise_exception('x ' * 100000) }}",
}
NEST = "{% set ns = namespace(t=1) %}{% for i in range(9000) %}{% set ns.t = STEP %}{% endfor %}"
DEEP = {
    "hash": ("(ns.t,)", "{{ {ns.t: 1} }}"),
    "hash for uniqueness": ("(ns.t,)", "{{ [ns.t] | unique | list }}"),
    "text": ("[ns.t]", "{{ ns.t }}"),
    "equality": ("[ns.t]", "{{ ns.t == [ns.t] }}"),
    "json": ("{'a': ns.t}", "{{ ns.t | tojson }}"),
}


@pytest.fixture(scope="module")
def burst() -> dict[str, Any]:
    """What became of every bomb, in a process of its own: the complaints, and KiB of memory of the largest child."""
    code = (
        "import json, resource\n"
        "from moelight.engine import chat\n"
        "from moelight.core.confined import ConfinedProcess\n"
        "from moelight.core.errors import InputError\n"
        "from tests.engine.test_template_security import BOMBS, MESSAGES\n"
        "chat._RENDERER = ConfinedProcess('moelight.engine.sandbox:renderer', cpu_s=0.05, memory_bytes=64 << 20)\n"
        "seen = {}\n"
        "for kind, source in BOMBS.items():\n"
        "    try: seen[kind] = 'it said ' + chat.ChatTemplate(source, special_tokens={}).render(MESSAGES)[:80]\n"
        "    except InputError as refusal: seen[kind] = f'{refusal.code}: {refusal}'\n"
        "chat._RENDERER.close()\n"
        "print(json.dumps({'most': resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, 'seen': seen}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_is_refused(kind: str, burst: dict[str, Any]) -> None:
    told = burst["seen"][kind]
    assert told.startswith("chat_template: the chat template fails: ")
    assert "\n" not in told and len(told) < 400 and "MemoryError" not in told


def test_no_bomb_takes_more_than_its_memory(burst: dict[str, Any]) -> None:
    assert burst["most"] < (64 + 100) * 1024


def test_the_next_conversation_is_rendered_after_a_bomb(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = ConfinedProcess("moelight.engine.sandbox:renderer", cpu_s=0.1, memory_bytes=256 << 20)
    monkeypatch.setattr(chat, "_RENDERER", renderer)
    template = ChatTemplate(
        "{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}a", special_tokens={}
    )
    for _ in range(2):
        with pytest.raises(InputError, match="s of processor time"):
            template.render(Conversation(messages=MESSAGES, template_kwargs={"n": 99999}))
        assert template.render(Conversation(messages=MESSAGES, template_kwargs={"n": 1})) == "a"
    renderer.close()


@pytest.mark.parametrize("kind", DEEP)
def test_values_nested_beyond_pythons_stack_are_refused(kind: str) -> None:
    step, use = DEEP[kind]
    with pytest.raises(InputError) as refusal:
        ChatTemplate(NEST.replace("STEP", step) + use, special_tokens={}).render(MESSAGES)
    assert refusal.value.code == "chat_template" and "\n" not in str(refusal.value)


def test_a_template_that_does_not_compile_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    parse = sandbox.Sandbox.parse
    monkeypatch.setattr(sandbox.Sandbox, "parse", lambda self, text: (compiled.append(text), parse(self, text))[1])
    render = sandbox.renderer(None)
    told = [render(["key", "{% for %}", {"messages": MESSAGES}]) for _ in range(3)]
    assert len(compiled) == 1
    assert told[0] is not None and told[0][0] is None and told[0] == told[1] == told[2]


def test_objects_among_the_kwargs_are_out_of_reach() -> None:
    conversation = Conversation(messages=MESSAGES, template_kwargs={"given": subprocess.run})
    with pytest.raises(InputError, match="must be JSON"):
        ChatTemplate("{{ given('id') }}", special_tokens={}).render(conversation)
