"""A text whose beginning goes on in fewer slots, and the chat that outlives its window so."""

from __future__ import annotations

from bisect import bisect_right
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import kvcli
from kvcli.bench.workloads import facts_in
from kvcli.chat.conversation import Chat
from kvcli.chat.model import Model
from kvcli.chat.transcript import Message
from kvcli.demo.report import write_report
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.engine.hf.rope import rotaries
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.engine.sequence.state import SYSTEM, KindSpan
from kvcli.errors import BadConfig
from kvcli.kernels.rope import rotate, unrotate
from kvcli.kv.slots import Slots
from kvcli.methods.policies.compress_prefix import CondensedPrefix, compress_prefix, fits_repetition
from kvcli.prefix_cache.prefix_cache import PrefixCache
from kvcli.settings.profile import Profile
from tests import make

torch.set_num_threads(1)
N, END, MOST = 45, 30, 12
TEXT = [*range(7, 7 + N)]  # values tell tokens apart


@cache
def lm(name: str = "llama") -> LM:
    return make.model(name, torch.float64)


def session(ids: list[int], name: str = "llama") -> GenerationSession:
    model = lm(name)
    s = make.session(model, chunk=16)
    run_to_end(s.read(ids))
    return s


def record(s: GenerationSession) -> CondensedPrefix:
    found = s.find(CondensedPrefix)
    assert found is not None
    return found


def places(whole: Slots, part: Slots) -> torch.Tensor:
    """[K, n]: which slots of `whole` those of `part` were, by their values."""
    return torch.stack([(a.unsqueeze(1) == b).all(-1).int().argmax(1) for a, b in zip(part.v, whole.v, strict=True)])


def test_each_head_moves_what_it_keeps_and_turns_its_keys() -> None:
    s, ids = session(TEXT), TEXT
    model, before = s.lm, [Slots(*(t.clone() for t in (x.k, x.v, x.pos))) for x in map(s.cache.slots, range(3))]
    assert run_to_end(compress_prefix(s, END, MOST))
    assert (s.committed, s.condensed, s.approximations) == (MOST, MOST, {"forgotten"})
    assert s.ids[MOST] == ids[END], "the next to be read"
    chosen = []
    for layer, rotary in enumerate(rotaries(model)):
        now = s.cache.slots(layer)
        assert now.pos.tolist() == [list(range(MOST))] * now.pos.shape[0]
        old = places(before[layer], now)
        chosen += old.tolist()
        assert (old.diff(dim=1) > 0).all()
        assert old[:, :4].tolist() == [[0, 1, 2, 3]] * old.shape[0], "sinks stay where they are"
        assert (old < END).all()
        k = before[layer].k.gather(1, old.unsqueeze(-1).expand(-1, -1, now.k.shape[2]))
        assert rotary is not None
        torch.testing.assert_close(now.k, rotate(unrotate(k, old, rotary), now.pos, rotary))
    assert len(set(map(tuple, chosen))) > 1, "heads choose for themselves"
    run_to_end(s.prefill_chunk([*s.ids[:MOST], *ids[END:]]))
    assert s.committed == MOST + N - END - 1
    assert len(list(iterate_events(s.stream(5)))) == 5


def test_what_was_condensed_before_competes_by_what_it_was_worth() -> None:
    s = session(TEXT)
    assert run_to_end(compress_prefix(s, END, MOST))
    text = [*s.ids[:MOST], *[*range(7 + N, 30 + N)]]
    while run_to_end(s.prefill_chunk(text)):
        pass
    worth, before = dict(record(s).scores), [s.cache.slots(layer).v.clone() for layer in range(3)]
    assert run_to_end(compress_prefix(s, MOST + 20, MOST))
    for layer in range(3):
        now = s.cache.slots(layer)
        for head in range(now.v.shape[0]):
            kept = (now.v[head].unsqueeze(1) == before[layer][head, :MOST]).all(-1)  # [n, MOST]
            old, lost = worth[layer][head][kept.any(0)], worth[layer][head][~kept.any(0)]
            torch.testing.assert_close(record(s).scores[layer][head][kept.any(1)], old)
            assert not len(lost) or lost.max() <= record(s).scores[layer][head][:-1].min(), (
                "the newest stays in any case"
            )


def test_a_window_moves_as_it_is() -> None:
    s = session(TEXT, "gemma3")
    full = [i for i, window in enumerate(s.lm.windows) if window is None]
    sliding = [i for i in range(s.lm.n_layers) if i not in full]
    before = {
        i: Slots(s.cache.slots(i).k.clone(), s.cache.slots(i).v.clone(), s.cache.slots(i).pos.clone()) for i in sliding
    }
    assert run_to_end(compress_prefix(s, END, MOST))
    for i in sliding:
        now = s.cache.slots(i)
        assert int(now.pos[0, -1]) == MOST - 1
        old = places(before[i], now)
        assert (old - now.pos == END - MOST).all()
    assert len(list(iterate_events(s.stream(5)))) == 5


def test_within_it_nothing_can_be_taken_back_and_behind_it_all_can() -> None:
    s, ids = session(TEXT), TEXT
    run_to_end(compress_prefix(s, END, MOST))
    text = [*s.ids[:MOST], *ids[END:]]
    while run_to_end(s.prefill_chunk(text)):
        pass
    other = s.fork()
    assert s.start_answer(text[: MOST + 5], Sampler()) == MOST + 4
    assert s.condensed == MOST
    assert other.start_answer(text[: MOST - 2], Sampler()) == 0
    assert not other.condensed
    assert not other.approximations


def test_too_few_slots_change_nothing() -> None:
    s = session(TEXT)
    s.kind_spans = [KindSpan(0, 20, SYSTEM)]
    before = s.cache.slots(1).k.clone()
    assert not run_to_end(compress_prefix(s, END, MOST))
    assert s.committed == END
    assert torch.equal(s.cache.slots(1).k, before[:, :END])


# --- a chat


LIMIT, RESERVE = 1400, 24


@cache
def demo() -> Model:
    return kvcli.load("demo", "exact", set={"exactness": "approx", "load.verify": False, "load.device": "cpu"})


def chat_of(how: str) -> Chat:
    """Three windows long: of each question's report, far more facts than are asked for."""
    over = {"context.limit": LIMIT, "context.reserve": RESERVE, "context.on_overflow": how}
    return Chat(demo().open(set={**over, "sample.max_new_tokens": RESERVE}))


def told(chat: Chat, turns: int, seed: int = 3) -> list[tuple[str, str]]:
    """One fact of each report, which nobody asked for, and what it says."""
    rng, facts = Random(seed), list[tuple[str, str]]()
    while len(facts) < turns:
        report = write_report(rng, 280, fact_share=0.2).text
        if len(there := facts_in(report)) > 1:
            facts.append(there[-1])
            asked = f"{report}\n\nWhat is the {there[0][0]}?"
            assert chat.send(asked, max_new_tokens=2).stats.prompt <= LIMIT
    return facts


def right(chat: Chat, facts: list[tuple[str, str]]) -> int:
    """How many of them it still knows."""
    found = 0
    for of, value in facts:
        found += value in chat.send(f"What is the {of}?").text
        chat.undo()
    return found


def test_a_chat_three_windows_long_knows_more_than_one_that_drops() -> None:
    chats = {how: chat_of(how) for how in ("drop", "compress")}
    known = {}
    for how, chat in chats.items():
        facts = told(chat, 6)
        soon = right(chat, facts[:3])
        facts += told(chat, 8, seed=4)
        known[how] = soon, soon + right(chat, facts[:8])
    assert known["compress"][0] > known["drop"][0]
    assert known["compress"][1] > known["drop"][1]
    chat = chats["compress"]
    assert len(chat.messages) == 28
    assert not chat.visible_messages.left
    said = [note for note in chat.notes if "exceeds the context window" in note]
    assert len(said) > 2
    assert all(" tokens shrink to " in note for note in said)
    turn = chat.send("What is the depth of well Bethden?")
    assert turn.stats.approx
    assert turn.stats.cached > LIMIT // 2


def test_what_is_kept_serves_undo_retry_and_edit() -> None:
    """Whatever ends otherwise goes on behind the same condensed beginning; what was asked is read, the rest is not."""
    chat = chat_of("compress")
    told(chat, 7)
    n = chat.prompt_tokens.begins.ids
    assert n == chat.text_session.session.condensed > 0
    question = "What is the depth of well Bethden?"
    first = chat.send(question).text
    for again in ("retry", "edit", "undo"):
        if again == "undo":
            chat.undo()
            chat.send(question)
        else:
            list(chat.retry() if again == "retry" else chat.edit(question))
        assert chat.messages[-1].text == first
        assert chat.text_session.session.condensed == n
        assert chat.text_session.session.ids[:n] == list(chat.prompt_tokens.ids[:n])


def test_ids_that_stand_for_nothing_any_more_are_never_read() -> None:
    chat = chat_of("compress")
    told(chat, 7)
    stood = list(chat.prompt_tokens.ids[: chat.prompt_tokens.begins.ids])
    chat.text_session.close()
    assert chat.send("What is the depth of well Bethden?").stats.cached == 0
    assert chat.visible_messages.left
    assert "could not be compressed" in chat.notes[-1]
    assert not chat.prompt_tokens.begins.ids
    assert chat.text_session.session.ids[: len(stood)] != stood


def test_what_stands_for_more_goes_to_no_profile_that_promises_all_of_it() -> None:
    chat = chat_of("compress")
    told(chat, 7)
    text, n = chat.text_session, chat.text_session.session.condensed
    drop: dict[str, Any] = {"context": {"on_overflow": "drop"}}
    for changes in ({"exactness": "exact", **drop}, drop):
        other = text.with_profile(text.profile.replace(**changes))
        assert not other.take_cache(text)
        assert text.session.condensed == n > 0


def test_cancelled_while_it_is_made_smaller_nothing_has_happened() -> None:
    chat = chat_of("compress")
    told(chat, 5)
    before, notes = list(chat.messages), len(chat.notes)
    asked, report = 0, write_report(Random(9), 700, fact_share=0.2).text

    def cancel() -> bool:
        nonlocal asked
        asked += 1
        return True

    list(chat.stream(f"{report}\n\nWhat is the depth of well Bethden?", cancel=cancel))
    assert asked
    assert chat.messages == before
    assert not chat.visible_messages.left
    assert len(chat.notes) == notes


def test_where_the_model_has_no_room_to_judge_the_chat_goes_on_without() -> None:
    """A question that fills all the model takes: what repeats the text behind itself cannot, and says nothing."""
    limit = demo().lm.limit
    assert fits_repetition(limit, limit - 200)
    assert not fits_repetition(limit, limit - 40)
    over = {"context.limit": "auto", "context.reserve": 1024, "context.on_overflow": "compress"}
    chat = Chat(demo().open(set={**over, "sample.max_new_tokens": 4}))
    fills = (
        bisect_right(range(limit), limit - 4, key=lambda n: len(chat.rendered([Message("user", "well " * n)]).ids)) - 1
    )
    assert chat.send("well " * fills, max_new_tokens=4).stats.prompt > limit - 40
    chat.send("And the depth?", max_new_tokens=4)
    assert chat.visible_messages.left == 2
    assert "could not be compressed" in chat.notes[-1]


def test_the_context_by_message_says_what_is_in_fewer_slots() -> None:
    chat = chat_of("compress")
    told(chat, 7)
    rows = dict(chat.tokens())
    assert rows["template"] > 0
    assert rows["compressed start of the chat"] < 0
    assert sum(rows.values()) == len(chat.rendered(chat.messages).ids)


def test_it_is_kept_in_no_file(tmp_path: Path) -> None:
    chat = chat_of("compress")
    chat.text_session.model.prefix_cache = PrefixCache(tmp_path / "kv", 1 << 30, demo().lm, min_work=0)
    told(chat, 3)
    assert chat.text_session.keep().nbytes
    held = sorted(tmp_path.rglob("*"))
    told(chat, 4)
    assert chat.text_session.session.condensed
    assert not chat.text_session.keep().nbytes
    assert sorted(tmp_path.rglob("*")) == held


@pytest.mark.parametrize(
    ("other", "changes"),
    [
        ("exactness", {"exactness": "exact"}),
        ("policy.name", {"policy": {"name": "window"}}),
        ("prune.method", {"prune": {"method": "lazy"}}),
        ("reuse.method", {"reuse": {"method": "pie"}}),
        ("sparse.method", {"sparse": {"method": "sketch"}}),
        ("kv.k_bits", {"kv": {"k_bits": 8}}),
        ("memory.fallbacks", {"memory": {"fallbacks": ["kv.v_bits=4"]}}),
    ],
)
def test_it_is_refused_beside_what_lets_go_of_a_kv_cache(other: str, changes: dict[str, Any]) -> None:
    usual = {"exactness": "approx", "context": {"on_overflow": "compress"}}
    Profile.load("exact").replace(**usual)
    with pytest.raises(BadConfig) as refused:
        Profile.load("exact").replace(**{**usual, **changes})
    lines = " ".join(refused.value.lines)
    assert other in lines
    assert "context.on_overflow" in lines
