"""A model's answer, by its files: what of it is a thought, what ends it, and what is not kept of its settings."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

import kvcli
from kvcli.api import Text, Thought
from tests.fakes import Machine
from tests.parrot import parrot
from tests.small_tokenizers import CHAT

THINKS = ("[THINK]", "[/THINK]", "<|end|>")
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
HEADED = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant"
FAMILIES = {
    "control": (["[THINK]", "Hm. ", "[/THINK]", "Yes.", "<|end|>"], THINKS, CHAT),
    "begun": (["Hm. ", "[/THINK]", "Yes.", "<|end|>"], THINKS, f"{CHAT}[THINK]\n"),
    "text": (["<think>", "Hm. ", "</think>", "\n", "Yes.", "<|end|>"], ("<|end|>",), CHAT),
    "channels": (
        ["<|channel|>", "analysis", "<|message|>", "Hm. ", "<|end|>", "<|start|>", "final", "Yes.", "<|return|>"],
        HARMONY,
        HEADED,
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("profile", ["exact", "ngram"])
def test_a_thought_is_no_part_of_an_answer(tmp_path: Path, name: str, profile: str):
    says, special, template = FAMILIES[name]
    parrot(tmp_path, says, special=special, template=template)
    with kvcli.load(str(tmp_path), profile=profile) as model:
        chat = model.chat()
        events = list(chat.stream("2+2?", max_new_tokens=12))
        assert "".join(e.text for e in events if isinstance(e, Text)) == "Yes."
        assert "".join(e.text for e in events if isinstance(e, Thought)).strip() == "Hm."
        assert (chat.messages[-1].text, chat.messages[-1].thinking, chat.messages[-1].finish) == ("Yes.", "Hm.", "stop")
        turn = chat.send("And?", max_new_tokens=12)
        assert (turn.text, turn.thinking) == ("Yes.", "Hm.")
        assert "Hm." not in chat.rendered(chat.messages).text
    assert gc.get_freeze_count() == 0  # the process is the caller's


def test_a_thought_is_no_point_of_a_summary(tmp_path: Path):
    says = ["[THINK]", "- A draft.", "[/THINK]", "- The pump leaks.", "<|end|>"]
    parrot(tmp_path / "m", says, special=THINKS)
    (tmp_path / "a.md").write_text("The pump leaks. " * 40)
    done = Machine(tmp_path)("summarize", "a.md", "-m", str(tmp_path / "m"), "--cite", "none", "--json")
    document = json.loads(done.out)
    assert [point["text"] for point in document["points"]] == ["The pump leaks."]
    assert document["turns"][0]["turn"]["thinking"] == "- A draft."


# --- what ends it

CHATML = CHAT.replace("<|end|>", "<|im_end|>")
ENDS = {
    "known by its name": (("<|im_end|>", "<|endoftext|>"), CHATML, {}),
    "by the template alone": (("<bye>", "<|endoftext|>"), CHAT.replace("<|end|>", " <bye>\n"), {}),
    "letters of the template": ((), CHAT, {}),
    "a string of the settings": ((), None, {"stop_strings": ["###"]}),
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("eos", [[], [5]])
def test_an_answer_ends_where_any_of_its_files_says_so(tmp_path: Path, name: str, eos: list[int]):
    special, template, generation = ENDS[name]
    end = special[:1] or (["<|", "end|>"] if template else ["##", "# "])
    parrot(tmp_path, ["Hello ", "there.", *end], special=special, template=template, eos=eos, generation=generation)
    with kvcli.load(str(tmp_path)) as model:
        turn = model.generate("hi?", max_new_tokens=9)
        assert (turn.text, turn.finish) == ("Hello there.", "stop")
        whole = model.generate("hi?", max_new_tokens=9, ignore_eos=True)
        assert len(whole.ids) == 9


# --- what is said of it


def test_settings_and_adapters_that_are_not_kept_are_said(tmp_path: Path):
    asked = {"suppress_tokens": [7], "bad_words_ids": [[7]], "no_repeat_ngram_size": 2, "num_beams": 1, "min_length": 0}
    parrot(tmp_path, ["Yes.", "<|end|>"], special=("<|end|>",), generation=asked)
    (tmp_path / "adapter_config.json").write_text("{}")
    with kvcli.load(str(tmp_path)) as model:
        said = [note for note in model.info.notes if "generation_config" in note]
        assert said == ["ignored in generation_config.json: suppress_tokens, bad_words_ids, no_repeat_ngram_size"]
        assert any("adapter" in note for note in model.info.notes)
        assert model.generate("hi", max_new_tokens=4).text == "Yes."
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps({"num_beams": 1, "suppress_tokens": []}))
    with kvcli.load(str(tmp_path)) as model:
        assert not [note for note in model.info.notes if "adapter" in note or "generation_config" in note]
