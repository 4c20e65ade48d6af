"""A text that goes round in a loop is recognised; one that only repeats itself, as texts do, is not."""

from __future__ import annotations

import inspect
import random

import pytest

import kvcli
from kvcli.demo import report_path
from kvcli.engine.sequence.state import LONGEST, ROUNDS, Repetition, RepetitionDetector
from kvcli.settings.schema import Sample
from tests import small_tokenizers

LEAST = Sample().stop_loops


def heard(ids, least=LEAST, read=()):
    """(tokens heard, loop) at the first loop, else None."""
    loops = RepetitionDetector(least, read)
    for n, token in enumerate(ids, 1):
        if (loop := loops.push(token)) is not None:
            return n, loop
    return None


def slowly(ids, least):
    """The same by definition: the shortest text whose end is a cycle."""
    for n in range(1, len(ids) + 1):
        for period in range(1, LONGEST + 1):
            length = max(least, ROUNDS * period)
            if n >= length and all(ids[i] == ids[i - period] for i in range(n - length + period, n)):
                return n, period
    return None


@pytest.mark.parametrize("period", [1, 2, 7, 64, 101, LONGEST])
def test_a_cycle_is_found_once_it_fills_the_end(period):
    before, length = list(range(1000, 1037)), max(LEAST, ROUNDS * period)
    text = before + [i % period for i in range(length)]
    assert heard(text) == (37 + length, Repetition(period, length))
    assert heard(text[:-1]) is None
    assert heard([*text[:-1], 9999]) is None


def test_a_cycle_longer_than_the_longest_is_none():
    assert heard([i % (LONGEST + 1) for i in range(5000)]) is None


def test_never_means_never():
    assert heard([5] * 5000, least=0) is None


def test_as_the_definition_says_on_texts_of_few_tokens():
    draw = random.Random(11)
    found = 0
    for _ in range(40):
        ids = list[int]()
        while len(ids) < 120:
            ids += [draw.randrange(2) for _ in range(draw.randrange(1, 5))] * draw.choice([1, 2, 5])
        wanted, got = slowly(ids, 24), heard(ids, 24)
        assert (got[0], got[1].period) == wanted if got else wanted is None
        found += wanted is not None
    assert 5 < found < 35, "texts of both kinds"


def test_a_copy_of_what_was_read_is_no_loop_until_it_goes_on_longer():
    zeros = [1, 0] * 300
    assert heard(zeros, read=[9, *zeros, 9]) is None
    assert heard([*zeros, 1, 0], read=[9, *zeros, 9]) == (601, Repetition(2, 601))
    assert heard([2, 0] * 300, read=zeros) is not None


# --- texts that people want

REFRAIN = "Row, row, row your boat, gently down the stream.\nMerrily, merrily, merrily, merrily, life is but a dream.\n"
LEGITIMATE = {
    "table": "| depot | stock |\n" + "| - | - |\n" * 24,
    "zeros": "stock = [" + "0, " * 100 + "0]",
    "matrix": ("[" + "0, " * 7 + "0],\n") * 8,
    "rule": "Title\n" + "-" * 200 + "\nText\n" + "=" * 200,
    "dots": "".join(f"Chapter {i} {'. ' * 40}{i * 7}\n" for i in range(1, 30)),
    "refrain": "".join(f"Verse {i}: the river {word}.\n{REFRAIN}" for i, word in enumerate("abcdefgh")),
    "lines": "The pump is shut.\n" * 12,
    "count": "".join(f"{i}, " for i in range(1, 400)),
    "rows": "".join(f"| well {i} | 0 | 0 | 0 | no |\n" for i in range(60)),
    "code": inspect.getsource(random),
    "report": report_path().read_text(encoding="utf-8"),
}


@pytest.mark.parametrize("name", LEGITIMATE)
def test_what_repeats_itself_as_texts_do_is_no_loop(name):
    ids = small_tokenizers.demo().encode(LEGITIMATE[name], add_special_tokens=False)  # short tokens: the harder case
    assert len(ids) > 50
    assert heard(ids) is None


# --- in an answer

PROMPT = "Once upon a time there was a pump"


def demo(profile, **sample):
    drafting = {} if profile == "exact" else {"spec.adaptive": False}
    set_ = {"load.dtype": "fp32", **drafting, **{f"sample.{key}": value for key, value in sample.items()}}
    return kvcli.load("demo", profile=profile, set=set_)


def test_an_answer_ends_at_the_same_token_however_it_was_drafted():
    whole = demo("exact", stop_loops=0).generate(PROMPT, max_new_tokens=400)
    assert (whole.finish, len(whole.ids)) == ("length", 400)
    plain = demo("exact", stop_loops=101).generate(PROMPT, max_new_tokens=400)
    assert (plain.finish, plain.loop) == ("loop", Repetition(14, 101))
    assert plain.ids == whole.ids[: len(plain.ids)]
    assert whole.text.startswith(plain.text)
    for profile in ("ngram", "lookahead"):
        drafted = demo(profile, stop_loops=101).generate(PROMPT, max_new_tokens=400)
        assert drafted.stats.accepted_tokens > 0
        assert (drafted.ids, drafted.text, drafted.finish) == (plain.ids, plain.text, "loop")


def test_a_chat_goes_on_behind_a_loop():
    chat = demo("ngram", stop_loops=101).chat()
    turn = chat.send(PROMPT, max_new_tokens=400)
    assert turn.finish == chat.messages[-1].finish == "loop"
    after = chat.send("What is it?", max_new_tokens=8)
    assert after.stats.cached >= turn.stats.prompt + len(turn.ids) - 2, "what the last pass guessed beyond is gone"
    assert after.finish == "stop" or len(after.ids) == 8


def test_who_asks_for_so_many_tokens_gets_them():
    turn = demo("ngram", stop_loops=101).generate(PROMPT, max_new_tokens=400, ignore_eos=True)
    assert (turn.finish, len(turn.ids)) == ("length", 400)
