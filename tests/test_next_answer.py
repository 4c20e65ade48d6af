"""A second answer of one session: what happened behind the first one's end, or to its KV cache, changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

import kvcli
from kvcli.api import Turn
from kvcli.chat import turn as turn_module
from kvcli.chat.model import Model
from kvcli.chat.text_session import TextSession
from kvcli.engine.sequence import session as session_module
from kvcli.kv.out_of_memory import CacheFull

EVICTS: dict[str, Any] = {"policy.compression_interval": 8, "prefill.chunk": 64}  # soon, and what it evicts is gone
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "top_logprobs": 0}


@cache
def demo() -> Model:
    return kvcli.load("demo", "exact")


def question(start: int) -> list[int]:
    """A text that a drafter can guess."""
    part = kvcli.read_document("demo:report").text[start : start + 220]
    return demo().encode(f"{part}\nRepeat: {part[:120]}")


def first(text: TextSession, start: int) -> list[int]:
    """Ask the first question, whose answer ends at a stop string; the second question."""
    ids = question(start)
    turn = text.generate(ids, max_new_tokens=40, stop=" the", **GREEDY)
    assert turn.finish == "stop"
    return [*ids, *turn.ids, *demo().encode(" Again: ")]


def second(text: TextSession, ids: list[int]) -> Turn:
    return text.generate(ids, max_new_tokens=5, **GREEDY)


@pytest.mark.parametrize("start", [333, 777, 2923])
def test_the_next_answer_does_not_know_what_a_draft_added_behind_a_stop_string(start: int) -> None:
    with demo().open("kvzip", EVICTS) as drafted, demo().open("kvzip", EVICTS | {"spec.method": "off"}) as plain:
        ids = first(drafted, start)
        assert ids == first(plain, start)
        points = [text.session.committed // 8 for text in (drafted, plain)]
        assert points[0] > points[1], "an eviction behind the end of the answer"
        assert second(drafted, ids).scores == second(plain, ids).scores


@pytest.mark.parametrize("phase", ["reading", "answering"])
def test_a_kv_cache_that_is_lost_in_the_next_answer_is_computed_again_from_the_first(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = EVICTS | {"spec.method": "off"}
    with demo().open("kvzip", changes) as alone:
        want = second(alone, first(alone, 333))
    with demo().open("kvzip", changes) as lacking:
        ids = first(lacking, 333)
        left, commit = [1 if phase == "reading" else 3], session_module.commit

        def fails_once(*args: Any) -> None:
            left[0] -= 1
            if not left[0]:
                raise CacheFull("injected")
            commit(*args)

        def loses(session: Any) -> bool:
            raise CacheFull("what was stored cannot be repaired")

        def has_freed(_: TextSession) -> Iterator[Any]:
            return True
            yield

        monkeypatch.setattr(session_module, "commit", fails_once)
        monkeypatch.setattr(turn_module, "repair_session", loses)
        monkeypatch.setattr(demo().engine, "free_memory", has_freed)
        run = lacking.answer(ids, max_new_tokens=5, **GREEDY)
        found = kvcli.generate_together(run)[0].result()
        assert left[0] < 0
    assert (found.ids, found.scores) == (want.ids, want.scores)


def test_a_restored_sequence_does_not_take_another_ones_prefills_for_its_own() -> None:
    with demo().open("exact", {"spec.method": "off"}) as text, demo().open("exact", {"spec.method": "off"}) as other:
        first(text, 333)
        other.generate(question(777), max_new_tokens=2, **GREEDY)
        text.session.answer_end, state = 3, other.session.state()
        text.session.restore(state, 5)
        assert (text.session.prefills, text.session.answer_end) == ([], None)
        assert text.session.start_answer([*text.session.ids, 7], text.session.sampler) == other.session.committed
