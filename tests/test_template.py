"""Chats are rendered as transformers renders them, and a stranger's template can neither hang nor fill a machine."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from kvcli import worker_process
from kvcli.errors import BadInput, BadModel, ExitStatus, UsageError
from kvcli.models import template
from kvcli.models.source import find
from kvcli.models.template import Chats
from kvcli.models.text import render_text
from kvcli.models.tokenizer import load_tokenizer
from tests.chat_templates import HEAVY, REFUSED, WELL_KNOWN
from tests.small_tokenizers import CHAT, DROPS_SYSTEM, KINDS, NO_SYSTEM, byte_fallback, demo

TALKS = {
    "question": [{"role": "user", "content": "Hello"}],
    "turns": [
        {"role": "system", "content": ' Be "brief",\n<b>user</b>. '},
        {"role": "user", "content": "  wie tief? 水 \U0001f600\n"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n972 metres. "},
        {"role": "user", "content": "\ufdd0<|end|>\ufdd1 {{ 7 * 7 }} {% raw %}\u2028\x00"},
    ],
    "odd": [{"role": "assistant", "content": ""}, {"role": "tool", "content": "\ud800"}],
    "nothing": [{"role": "user", "content": ""}],
}
OURS = {"chat": CHAT, "no system": NO_SYSTEM, "drops system": DROPS_SYSTEM}


@pytest.fixture(scope="module")
def chats() -> Iterator[Chats]:
    tokenizer = copy.copy(byte_fallback())
    yield Chats(tokenizer)
    del tokenizer  # which lives that long


def theirs(tokenizer: Any, talk: list[dict[str, str]]) -> str:
    """What transformers makes of it, or the kind of its error."""
    try:
        return PreTrainedTokenizerBase.apply_chat_template(tokenizer, talk, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"broken: {type(error).__name__}"


def ours(chats: Chats, talk: list[dict[str, str]]) -> str:
    try:
        return chats(talk, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        return f"refused: {error}"
    except BadModel as error:
        return f"broken: {error.lines[0].partition(':')[0]}"


@pytest.mark.parametrize("name", [*WELL_KNOWN, *OURS])
def test_a_chat_is_rendered_as_transformers_renders_it(chats, name):
    chats._tokenizer.chat_template = (WELL_KNOWN | OURS)[name]
    found = {talk: ours(chats, turns) for talk, turns in TALKS.items()}
    assert found == {talk: theirs(chats._tokenizer, turns) for talk, turns in TALKS.items()}
    assert not found["question"].startswith(("refused", "broken"))


@pytest.mark.parametrize("kind", KINDS)
def test_so_it_is_with_every_kind_of_tokenizer(kind):
    tokenizer = KINDS[kind]()
    assert ours(Chats(tokenizer), TALKS["turns"]) == theirs(tokenizer, TALKS["turns"])


@pytest.mark.parametrize("name", REFUSED)
def test_what_transformers_refuses_is_refused(chats, name):
    chats._tokenizer.chat_template = REFUSED[name]
    left, right = theirs(chats._tokenizer, TALKS["question"]), ours(chats, TALKS["question"])
    assert left.startswith(("refused", "broken"))
    if left.startswith("refused") and right.startswith("refused"):
        assert left == right
    assert right.startswith(("refused", "broken"))


@pytest.mark.parametrize("name", ["zero", "slice", "itself", "deep", "include", "syntax"])
def test_a_broken_template_is_the_models_fault(chats, name):
    chats._tokenizer.chat_template = REFUSED[name]
    with pytest.raises(BadModel) as caught:
        render_text(_with(chats), TALKS["question"])
    assert (caught.value.code, caught.value.exit) == ("bad_template", ExitStatus.BAD_MODEL)


@pytest.mark.parametrize("name", ["its own words", "unknown"])
def test_a_template_that_refuses_says_why(chats, name):
    chats._tokenizer.chat_template = REFUSED[name]
    with pytest.raises(BadInput, match=r"no such role|is undefined") as caught:
        render_text(_with(chats), TALKS["question"])
    assert caught.value.code == "chat_template"


@pytest.mark.parametrize("name", HEAVY)
def test_a_template_is_bounded_in_time_and_memory(chats, name, monkeypatch):
    monkeypatch.setattr(template, "SECONDS", 1.0)
    chats._tokenizer.chat_template = HEAVY[name]
    with pytest.raises(BadModel) as caught:
        chats(TALKS["question"], **template.ASKED)
    assert (caught.value.code, caught.value.exit) == ("template_too_heavy", ExitStatus.BAD_MODEL)
    chats._tokenizer.chat_template = CHAT
    assert ours(chats, TALKS["question"]) == "<|user|>Hello<|end|><|assistant|>"  # and it goes on


def test_an_answer_is_bounded(chats, monkeypatch):
    monkeypatch.setattr(template, "OUTPUT", 1 << 16)
    monkeypatch.setattr(template, "ROOM", 1 << 10)
    small = Chats(chats._tokenizer)
    small._tokenizer.chat_template = "{{ 'x' * 100000 }}"
    with pytest.raises(BadModel, match="cannot be used") as caught:
        small(TALKS["question"], **template.ASKED)
    assert "without end" in caught.value.lines[0]


def test_a_conversation_larger_than_the_process_was_sized_for(chats, monkeypatch):
    monkeypatch.setattr(template, "ROOM", 1000)
    monkeypatch.setattr(template, "OUTPUT", 1000)  # so that its size is what lets the answer through
    small = Chats(chats._tokenizer)
    small._tokenizer.chat_template = CHAT
    for size in (10, 5_000, 3_000_000, 10):
        talk = [{"role": "user", "content": "\u6c34" * size}]
        assert ours(small, talk) == f"<|user|>{talk[0]['content']}<|end|><|assistant|>"


def test_one_process_serves_a_conversation_and_is_replaced_when_it_dies(chats):
    chats._tokenizer.chat_template = CHAT
    pids = []
    for _ in range(3):
        ours(chats, TALKS["turns"])
        pids.append(chats._standby._process._process.pid)
    assert len({*pids}) == 1
    psutil.Process(pids[0]).kill()
    assert ours(chats, TALKS["question"]) == theirs(chats._tokenizer, TALKS["question"])


def test_an_interrupted_question_is_not_answered_to_the_next(chats, monkeypatch):
    chats._tokenizer.chat_template = CHAT
    ours(chats, TALKS["question"])

    def interrupted(process, *asked):
        next(real(process, *asked))
        raise KeyboardInterrupt
        yield

    real = worker_process.WorkerProcess.ask
    with monkeypatch.context() as patch:
        patch.setattr(worker_process.WorkerProcess, "ask", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ours(chats, TALKS["turns"])
    assert ours(chats, TALKS["nothing"]) == theirs(chats._tokenizer, TALKS["nothing"])


def test_a_template_may_not_be_chosen(chats):
    chats._tokenizer.chat_template = {"tool_use": CHAT, "rag": CHAT}
    assert ours(chats, TALKS["question"]).startswith("broken: This model has multiple chat templates")
    chats._tokenizer.chat_template = {"default": CHAT, "tool_use": "no"}
    assert ours(chats, TALKS["question"]) == theirs(chats._tokenizer, TALKS["question"])


@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"text": 1}', b'{"a": 1, "b": 2}'])
def test_a_process_that_was_taken_over_cannot_confuse_its_parent(chats, monkeypatch, answer):
    monkeypatch.setattr(worker_process.Standby, "_answer", lambda *_: answer)
    with pytest.raises(BadModel):
        chats(TALKS["question"], **template.ASKED)


LEAVES = """{{ m.content }}
{{ m.role | tojson }}
{{ messages | length }}
{% set x = 1 %}
{{ x }}
{{ f(1) }}
{{ f }}
{{- bos_token -}}
{{ loop.index }}
{% break %}
{% if loop.first %}{% continue %}{% endif %}
{{ m.content.split()[0] }}
{{ namespace(a=1).a }}
{{ dict(a=x) }}
{{ [1, 2][5] }}
{{ 1 % 0 }}
{{ range(5) | batch(2) | list }}
{{ m.items() | list }}
{# note #}
{{ m.update(a=1) }}
{{ messages.__len__() }}
{{ cycler("a", "b").next() }}
{% include "a" %}
{{ self.c() }}
{{ caller() }}
{{ raise_exception(x) }}
{% endfor %}
{{ messages | selectattr("role", "eq", "user") | map(attribute="content") | join("-") }}""".split("\n")
LEAVES += ["", "a", "\n", "  \n", "\t"]  # the last are what blocks take away around them
ROUND = """{% for m in messages %}@{% endfor %}
{%- for m in messages if m.role == "user" -%}@{%- else -%}b{%- endfor -%}
{% if m %}@{% elif x %}c{% else %}d{% endif %}
{% generation %}@{% endgeneration %}
{% macro f(a, b=2) %}@{% endmacro %}
{% call f() %}@{% endcall %}
{% filter upper %}@{% endfilter %}
{% with x = 2 %}@{% endwith %}
{% set x %}@{% endset %}
{% raw %}@{% endraw %}
{% block c %}@{% endblock %}""".split("\n")
TEMPLATES = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: (
        st.lists(inner, max_size=4).map("".join) | st.builds(str.replace, st.sampled_from(ROUND), st.just("@"), inner)
    ),
    max_leaves=20,
)


@pytest.mark.parametrize("examples", [60, pytest.param(4000, marks=pytest.mark.slow)])
def test_any_template_is_rendered_as_transformers_renders_it(chats, examples):
    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(source=TEMPLATES)
    def check(source: str) -> None:
        chats._tokenizer.chat_template = source
        left, right = theirs(chats._tokenizer, TALKS["turns"]), ours(chats, TALKS["turns"])
        if left.startswith(("refused", "broken")):
            assert right.startswith(("refused", "broken"))
        else:
            assert right == left

    check()


# --- a tokenizer that was loaded


@pytest.fixture(scope="module")
def loaded() -> Any:
    return load_tokenizer(find("demo", offline=True), False)


def test_a_loaded_tokenizer_renders_in_a_process_that_is_shut_in(loaded):
    assert render_text(loaded, TALKS["turns"][:2]) == render_text(demo(), TALKS["turns"][:2])
    status = Path(f"/proc/{loaded.apply_chat_template._standby._process._process.pid}/status").read_text()
    assert "NoNewPrivs:\t1" in status


def test_its_process_goes_with_it():
    tokenizer = load_tokenizer(find("demo", offline=True), False)
    process = tokenizer.apply_chat_template._standby._process._process
    del tokenizer
    assert process.returncode is not None


@pytest.mark.parametrize("options", [{}, {"tokenize": True}, {"tokenize": False}, template.ASKED | {"padding": 1}])
def test_no_option_brings_a_template_into_this_process(loaded, options):
    with pytest.raises(UsageError, match="only returns the text"):
        loaded.apply_chat_template(TALKS["question"], **options)


def test_variables_reach_a_template_and_its_layout(loaded):
    other = copy.deepcopy(loaded)
    other.chat_template = "{{ messages[0].content }}{{ tools or '' }}{{ mode if mode is defined else '' }}"
    assert render_text(other, TALKS["question"], mode="<off>") == ("Hello<off>", True)
    assert render_text(other, TALKS["question"], tools=["a"]) == ("Hello['a']", True)
    assert render_text(other, TALKS["question"]) == ("Hello", True)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_a_copy_renders_in_a_process_of_its_own(loaded, copied):
    other = copied(loaded)
    assert other.apply_chat_template._tokenizer is other
    other.chat_template = "changed {{ messages[0].content }}"
    assert render_text(other, TALKS["question"]) == ("changed Hello", True)
    assert render_text(loaded, TALKS["question"])[0] != "changed Hello"


def _with(chats: Chats) -> Any:
    chats._tokenizer.apply_chat_template = chats
    return chats._tokenizer
