"""What a model thinks is never its answer, however its family marks it and wherever tokens and passes cut the marks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcli.models.channels import Channels, ends
from kvcli.models.text import StopStrings
from tests.small_tokenizers import CHAT, demo, marked

HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
START = "<|start|>assistant"
MISTRAL, COHERE = ("[THINK]", "[/THINK]"), ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>")
GEMMA, APERTUS = ("<|channel>", "<channel|>"), ("<|inner_prefix|>", "<|inner_suffix|>")
LIKE = "a <thin> [THIN] x<y [1] He is. </thinker> <rethink> Here is my"
# control tokens, what the prompt ends with, the answer as it is written, its text, what was thought
FAMILIES = {
    "qwen": ((), "", "<think>\nHm.\n</think>\n\nYes.", "Yes.", "Hm."),
    "deepseek": ((), "<think>\n", "Hm.\n</think>\n\nYes.", "Yes.", "Hm."),
    "seed": ((), "", "<seed:think>Hm.</seed:think>Yes.", "Yes.", "Hm."),
    "minimax": ((), "<mm:think>", "Hm.</mm:think>Yes.", "Yes.", "Hm."),
    "exaone": ((), "<thought>\n", "Hm.</thought>\nYes.", "Yes.", "Hm."),
    "hunyuan": ((), "", "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>", "Yes.\n", "Hm."),
    "ernie": ((), "", "<think>\nHm.\n</think>\n\n<response>\nYes.</response>", "Yes.", "Hm."),
    "kimi": ((), "", "◁think▷Hm.◁/think▷Yes.", "Yes.", "Hm."),
    "granite": ((), "", "Here is my thought process:\n\nHm.\n\nHere is my response:\n\nYes.", "Yes.", "Hm."),
    "openthinker": ((), "", "<|begin_of_thought|>\nHm.\n<|end_of_thought|>\n\nYes.", "Yes.", "Hm."),
    "magistral": (MISTRAL, "", "[THINK]Hm.[/THINK]Yes.", "Yes.", "Hm."),
    "magistral in letters": ((), "", "[THINK]Hm.[/THINK]Yes.", "Yes.", "Hm."),
    "cohere": (COHERE, "", "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.", "Yes.", "Hm."),
    "apertus": (APERTUS, "", "<|inner_prefix|>Hm.<|inner_suffix|>Yes.", "Yes.", "Hm."),
    "gemma": (GEMMA, "model\n", "<|channel>thought\nHm.<channel|>Yes.", "Yes.", "Hm."),
    "gemma, begun": (GEMMA, "<|channel>thought\n", "Hm.<channel|>Yes.", "Yes.", "Hm."),
    "gemma, closed": (GEMMA, "<|channel>thought\n<channel|>", "Yes.", "Yes.", ""),
    "gemma, no label": (GEMMA, "", "<|channel>Hm, so.<channel|>Yes.", "Yes.", "Hm, so."),
    "harmony": (
        HARMONY,
        START,
        f"<|channel|>analysis<|message|>Hm.<|end|>{START}<|channel|>final<|message|>Yes.",
        "Yes.",
        "Hm.",
    ),
    "harmony, three": (
        HARMONY,
        START,
        f"<|channel|>analysis<|message|>Hm.<|end|>{START}<|channel|>commentary to=a.b <|constrain|>json<|message|>{{}}"
        f"<|end|>{START}<|channel|>final<|message|>Yes.",
        "Yes.",
        "Hm.\n{}",
    ),
    "harmony, short": (HARMONY, START, "analysis<|message|>Hm.<|end|><|start|>assistantfinalYes.", "Yes.", "Hm."),
    "harmony, begun": (HARMONY, f"{START}<|channel|>analysis<|message|>", "Hm.<|end|>", "", "Hm."),
    "harmony, no channel": (HARMONY, START, "<|message|>Yes.", "Yes.", ""),
    "behind a word": ((), "", "Okay <think>Hm.</think> Yes.", "Okay \nYes.", "Hm."),
    "between points": ((), "", "- A.<think>Hm.</think>- B.<think>So.</think>- C.", "- A.\n- B.\n- C.", "Hm.\nSo."),
    "without an end": ((), "", "<think>Hm. Perhaps", "", "Hm. Perhaps"),
    "without a beginning": ((), "", "Hm.\n</think>\n\nYes.", "Yes.", "Hm."),
    "closed by the prompt": ((), "<think>\n\n</think>\n\n", "Yes.", "Yes.", ""),
    "quoted": ((), "", "The tag `<think>` ends with `</think>`.", "The tag `<think>` ends with `</think>`.", ""),
    "in code": ((), "", "```\n<think>\n</think>\n```\n", "```\n<think>\n</think>\n```\n", ""),
    "opened in a thought": ((), "", "<think>a <think> b</think>Yes.", "Yes.", "a <think> b"),
    "like marks": ((), "", LIKE, LIKE, ""),
    "another control token": (("<|sep|>",), "", "Hm<|sep|>Yes. <|sep|> No.", "Hm\nYes.  No.", ""),
}  # fmt: skip


def said(name, sizes=(1,), added=(), stops=None):
    """(text, thinking), and the same joined of the pieces."""
    special, prompt, answer, *_ = FAMILIES[name]
    tokenizer = marked(special, added)
    channels = Channels(tokenizer, tokenizer.encode(f"Q {prompt}"), stops)
    pieces = [piece for token in tokenizer.encode(answer) for piece in channels.push(token)] + channels.finish()
    streamed = ["".join(text for is_thought, text in pieces if is_thought == kind) for kind in (False, True)]
    return (channels.text, channels.thinking.strip()), streamed


@pytest.mark.parametrize("name", FAMILIES)
def test_each_channel_is_what_it_is(name):
    (text, thinking), streamed = said(name)
    assert (text, thinking) == FAMILIES[name][-2:]
    if name != "without a beginning":
        assert [streamed[0], streamed[1].strip()] == [text, thinking]


@pytest.mark.parametrize("name", ["qwen", "seed", "behind a word", "between points", "kimi", "magistral in letters"])
def test_marks_that_are_tokens_and_text_do_the_same(name):
    marks = ("<think>", "</think>", "<seed:think>", "</seed:think>", "◁think▷", "◁/think▷", "[THINK]", "[/THINK]")
    assert said(name, added=marks)[0] == FAMILIES[name][-2:]


def test_what_nothing_began_is_streamed_on_a_line_of_its_own():
    assert said("without a beginning")[1][0] == "Hm.\n\nYes."


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["<think>", "</think>", "[THINK]", "a", " ", "\n", "<", "Here is my response:", "`"])))
def test_nothing_is_lost_and_pieces_are_the_whole(parts):
    tokenizer, answer = marked(), "".join(parts)
    channels = Channels(tokenizer)
    pieces = [p for token in tokenizer.encode(answer) for p in channels.push(token)] + channels.finish()
    letters = [c for c in "".join(text for _, text in pieces) if c == "a"]
    assert len(letters) == answer.count("a")
    assert "".join(text for is_thought, text in pieces if not is_thought).endswith(channels.text)


def test_text_of_ordinary_answers_is_not_held_back():
    tokenizer = marked()
    channels = Channels(tokenizer)
    assert [channels.push(token) for token in tokenizer.encode("Is 1<2? ")] == [
        [(False, "I")], [(False, "s")], [(False, " ")], [(False, "1")], [], [], [(False, "<2?")], [(False, " ")],
    ]  # fmt: skip


def test_a_stop_string_ends_the_text_and_no_thought():
    (text, thinking), _ = said("qwen", stops=StopStrings(["es", "Hm"]))
    assert (text, thinking) == ("Y", "Hm.")


def test_an_answer_held_to_a_form_is_text():
    tokenizer = marked()
    channels = Channels(tokenizer, tokenizer.encode("<think>"), is_split=False)
    pieces = [p for token in tokenizer.encode('{"a": "<think>"}') for p in channels.push(token)] + channels.finish()
    assert (channels.text, channels.thinking) == ('{"a": "<think>"}', "") == ("".join(t for _, t in pieces), "")


# --- what ends it


def test_the_template_and_the_tokenizer_are_asked_for_ends():
    behind = CHAT.replace("<|end|>", "{{ '<bye>' if m.role == 'assistant' else '<|x|>' }}")
    tokenizer = marked(("<|x|>", "<bye>", "<|im_end|>"), template=behind)
    assert {tokenizer.decode([i]) for i in ends(tokenizer, 1000)[0]} == {"<bye>", "<|im_end|>"}
    assert ends(tokenizer, 5) == (frozenset(), ())
    assert ends(demo(), 300)[0] == {demo().eos_token_id}


def test_marks_of_a_template_that_are_no_tokens_end_by_their_letters():
    assert ends(marked(), 1000) == (frozenset(), ("<|end|>",))
    assert ends(marked(template=CHAT.replace("<|end|>", "\n")), 1000) == (frozenset(), ("<|user|>",))


def test_the_end_of_a_channel_ends_no_answer():
    template = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}" + START
    found, strings = ends(marked(HARMONY, template=template), 1000)
    assert {marked(HARMONY, template=template).decode([i]) for i in found} == {"<|return|>", "<|call|>"}
    assert strings == ()
    phi = marked(("<|end|>", "<|user|>", "<|assistant|>"))
    assert {phi.decode([i]) for i in ends(phi, 1000)[0]} == {"<|end|>"}


@pytest.mark.parametrize("template", [None, "{{ nothing.at.all }}", "{{ messages[-1]['content'] }}"])
def test_a_template_that_is_no_good_says_nothing(template):
    assert ends(marked(("<|im_end|>", "<|x|>"), template=template), 1000)[0] == {256}


OPENED = ("<|open|>", "<|close|>", "<|sep|>", "<|end|>", "<|begin|>", "<|content|>")
OWN = {  # marks that only a template tells: what begins a thought, what ends it, the answer as it is written
    "of several tokens": (
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|><|open|>response<|sep|>",
        "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|>",
    ),
    "of letters, begun": ("", "\n[BEGIN FINAL RESPONSE]\n", "Hm.\n[BEGIN FINAL RESPONSE]\nYes."),
    "a turn": ("<|think|>", "<|end|><|begin|>it<|content|>", "<|think|>Hm.<|end|><|begin|>it<|content|>Yes.<|end|>"),
}


@pytest.mark.parametrize("name", OWN)
def test_marks_of_a_template_split_as_well(name):
    begin, end, answer = OWN[name]
    tokenizer = marked(OPENED)
    channels = Channels(tokenizer, tokenizer.encode("Q "), begin=begin, end=end)
    pieces = [p for token in tokenizer.encode(answer) for p in channels.push(token)] + channels.finish()
    assert "".join(text for is_thought, text in pieces if is_thought).strip() == channels.thinking.strip() == "Hm."
    assert channels.text.removesuffix("response") == "Yes."
