"""Thinking of models, by the templates that they are published with: what controls it, bounds it and ends it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvcli
from kvcli.api import Text, Thought
from kvcli.commands.common.flags import profile_flags
from kvcli.errors import BadConfig, BadModel, UsageError
from kvcli.models.grammar import Grammar
from kvcli.models.template import Chats
from kvcli.models.text import render_text
from kvcli.models.thinking import ThinkingFormat, thinking_format
from tests.chat_templates import HEAVY, LLAMA_3
from tests.parrot import parrot
from tests.small_tokenizers import CHAT, marked

TEMPLATES = Path(__file__).parent / "templates"
THINK = ("<think>", "</think>")
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
# modes, whether the model thinks by itself, what is added to its prompt to make it think, and the end of a thought
FORMATS = {
    "qwen3": ("on off", True, "<think>\n", "\n</think>\n\n"),
    "smollm3": ("on off", True, "<think>", "</think>\n"),
    "glm-4.7": ("on off", True, "", "</think>"),
    "deepseek-r1": ("on", True, "", "\n</think>\n\n"),
    "deepseek-v3.1": ("on off", False, "", "</think>"),
    "gpt-oss": (
        "on low medium high",
        True,
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
    "gemma-4": ("on off", False, "<|channel>thought\n", "<channel|>"),
    "granite-3.3": ("on off", False, "<think>", "\n</think>\n\n"),
    "ministral-3": ("on", True, "[THINK]", "[/THINK]"),
}


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


@pytest.fixture(scope="module")
def chats() -> Chats:
    tokenizer = copy.copy(marked())
    tokenizer.apply_chat_template = Chats(tokenizer)
    yield tokenizer.apply_chat_template
    del tokenizer


def of(chats: Any, source: str) -> tuple[Any, ThinkingFormat]:
    tokenizer = chats._tokenizer
    tokenizer.chat_template = source
    return tokenizer, thinking_format(tokenizer)


@pytest.mark.parametrize("name", FORMATS)
def test_a_template_shows_how_its_model_thinks(chats, name):
    tokenizer, found = of(chats, template(name))
    modes, is_usual, begin, end = FORMATS[name]
    assert (" ".join(found.modes), found.is_usual, found.end) == (modes, is_usual, end)
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why? "}]
    prompt, _ = render_text(tokenizer, asked, **found.variables("on"))
    assert found.opener(prompt) == begin
    if "off" in modes:
        prompt, closed = (render_text(tokenizer, asked[1:], **found.variables(mode))[0] for mode in ("on", "off"))
        assert closed != prompt
    assert [found.thinks(mode) for mode in ("auto", "on", "off")] == [is_usual, True, False]


@pytest.mark.parametrize("source", [LLAMA_3, CHAT, None, "{{ think.of.it }}", "{% if %}</think>"])
def test_a_template_without_thinking_has_no_modes(chats, source):
    _, found = of(chats, source)
    assert found == ThinkingFormat()
    assert found.variables("off") == {}
    with pytest.raises(BadConfig, match="has no thinking"):
        found.variables("on")


def test_a_template_that_takes_too_long_is_tried_once(chats, monkeypatch):
    monkeypatch.setattr("kvcli.models.template.SECONDS", 0.3)
    with pytest.raises(BadModel, match="chat template") as error:
        of(chats, "{% if think %}</think>" + HEAVY["loop"] + "{% endif %}" + HEAVY["loop"])
    assert error.value.code == "template_too_heavy"


@pytest.mark.parametrize(
    ("name", "mode", "says"),
    [("gpt-oss", "off", "--think low"), ("ministral-3", "off", "--think 256"), ("qwen3", "low", "--think off")],
)
def test_a_mode_that_a_template_lacks_is_refused(chats, name, mode, says):
    with pytest.raises(BadConfig, match="chat template") as error:
        of(chats, template(name))[1].variables(mode)
    assert error.value.code == "no_thinking"
    assert any(way.startswith(says) for way in error.value.try_)


# --- an answer

SAYS = {  # what begins a thought, in tokens, and what its model writes between it and the answer
    "qwen3": (["<think>"], ["</think>", "\n\n"]),
    "glm-4.7": ([], ["</think>"]),
    "gemma-4": (["<|channel>", "thought\n"], ["<channel|>"]),
    "ministral-3": (["[THINK]"], ["[/THINK]"]),
    "gpt-oss": (["<|channel|>", "analysis", "<|message|>"], []),  # the same word begins its thought and its answer
}
SPECIAL = ("<|im_end|>", "<|channel>", "<channel|>", "[THINK]", "[/THINK]", *HARMONY)
HMS = [f"Hm {i}. " for i in range(6)]


def loaded(folder: Path, name: str, answer: tuple[str, ...] = ("Yes.",), **settings: Any) -> Any:
    """Load a model that thinks six words in the manner of a template, and then answers."""
    begin, end = SAYS[name]
    stop = "<|return|>" if name == "gpt-oss" else "<|im_end|>"
    profile = settings.pop("profile", "exact")
    says = [*begin, *HMS, *end, *(answer if end else ()), stop]
    special = tuple(token for token in SPECIAL if token in (*says, *HARMONY[: 5 * (name == "gpt-oss")]))
    parrot(folder, says, special=special, template=template(name), variables={"enable_thinking": True})
    settings = {"thinking.mode": "on"} | {key.replace("_", ".", 1): value for key, value in settings.items()}
    return kvcli.load(str(folder), profile=profile, set=settings)


@pytest.mark.parametrize("name", SAYS)
def test_a_thought_ends_after_so_many_tokens_and_the_answer_is_not_shortened(tmp_path, name):
    begin, end = SAYS[name]
    answer = "Yes." if end else "".join(HMS)
    with loaded(tmp_path, name, profile="ngram", thinking_max_tokens=4) as model:
        events = list(model.chat().stream("2+2?", max_new_tokens=7))
        turn = events[-1].turn
        assert (turn.text, turn.finish) == (answer, "stop")
        assert turn.thinking == "".join(HMS[: 4 - len(begin)]).strip()
        assert "".join(e.text for e in events if isinstance(e, Text)) == answer
        assert "".join(e.text for e in events if isinstance(e, Thought)).strip() == turn.thinking
        n_end = len(model.tokenizer.encode(model.thinking_format().end, add_special_tokens=False))
        assert turn.stats.thinking == 4 + n_end
        assert turn.stats.thinking_seconds > 0
        assert (model.text_session.session.ids[-1], model.text_session.session.committed) == (
            turn.ids[-1],
            len(model.text_session.session.ids) - 1,
        )


@pytest.mark.parametrize("name", SAYS)
def test_a_schema_begins_behind_the_thought(tmp_path, name):
    """The model would answer "Yes.", and the schema allows no such answer."""
    pytest.importorskip("llguidance")
    with loaded(tmp_path, name, spec_method="ngram") as model:
        constraint = model.constraint(Grammar.of_schema({"enum": ["No."]}))
        # a line end makes the model of qwen3 begin a thought, also after the beginning that it is given
        for limit, n in ((0, 6), (4, 4 - (name == "qwen3"))):
            session = model.open(set={"thinking.max_tokens": limit})
            turn = kvcli.Chat(session).send("2+2?", max_new_tokens=12, constraint=constraint)
            assert (turn.text, turn.finish) == ('"No."', "stop")
            assert turn.thinking.removeprefix("<think>") == "".join(HMS[:n]).strip()
        if "off" in model.thinking_format().modes:
            session = model.open(set={"thinking.mode": "off"})
            turn = kvcli.Chat(session).send("2+2?", max_new_tokens=12, constraint=constraint)
            assert (turn.text, turn.thinking) == ('"No."', "")


def test_a_mode_that_a_prompt_drops_is_said(tmp_path):
    parrot(tmp_path, ["Yes.", "<|end|>"], special=("<|end|>",), template=template("granite-3.3"))
    with kvcli.load(str(tmp_path), set={"thinking.mode": "on"}) as model:
        chat = model.chat()
        chat.send("2+2?", max_new_tokens=3)
        assert chat.notes == []
        chat.system = "Be brief."
        chat.send("2+2?", max_new_tokens=3)
        assert ["no effect" in note for note in chat.notes] == [True]


def test_a_thought_leaves_room_for_the_answer(tmp_path):
    with loaded(tmp_path, "qwen3", context_limit=62) as model:
        turn = model.generate("2+2?", max_new_tokens=17)
        assert (turn.text, turn.finish, turn.thinking) == ("Yes.", "stop", "".join(HMS[:4]).strip())
        assert turn.stats.thinking == (model.limit - turn.stats.prompt) // 2


@pytest.mark.parametrize("set", [{}, {"policy.name": "h2o", "policy.budget": 80, "exactness": "approx"}])
def test_a_bounded_thought_is_the_same_with_any_drafter(tmp_path, set):
    """Of random weights: it runs in circles, so that passes with a draft would run over the end of the thought."""
    torch.manual_seed(3)
    tokenizer = marked(THINK, (), template("deepseek-r1"))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    sizes |= {"vocab_size": 288, "max_position_embeddings": 512, "initializer_range": 0.1}
    config = LlamaConfig(**sizes, eos_token_id=None, bos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    turns = {}
    for profile in ("exact", "ngram", "lookahead"):
        set = {**set, "load.dtype": "fp32", "thinking.max_tokens": 37, "sample.temperature": 0.0}
        with kvcli.load(str(tmp_path), profile=profile, set=set) as model:
            turns[profile] = model.chat().send("Why?", max_new_tokens=40)
            end = model.tokenizer.encode("\n</think>\n\n", add_special_tokens=False)
    assert turns["ngram"].stats.accepted_tokens > 0
    assert [turn.ids == turns["exact"].ids for turn in turns.values()] == [True] * 3
    assert list(turns["exact"].ids[37 : 37 + len(end)]) == end
    assert len(turns["exact"].ids) == 37 + len(end) + 40


def test_the_option_is_a_mode_or_a_number_of_tokens():
    assert profile_flags({"think": "low"}) == {"thinking.mode": ("low", "--think")}
    most = {"thinking.mode": ("on", "--think"), "thinking.max_tokens": (2048, "--think")}
    assert profile_flags({"think": "2k"}) == most
    with pytest.raises(UsageError, match="--think takes"):
        profile_flags({"think": "much"})
