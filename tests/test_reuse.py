"""What is taken over behind an edit: which runs, turned how, and what is said of it."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest
import torch

import kvcli
from kvcli.engine.engine import run_to_end
from kvcli.engine.forward_request import Rows
from kvcli.engine.hf.rope import rotaries
from kvcli.kv.slots import Window
from kvcli.methods.reuse.pie import Pie
from kvcli.prefix_cache.matching_spans import MatchingSpan, find_matching_spans
from kvcli.settings.profile import Profile
from tests import families, make

LEAST = 16


def test_runs_behind_an_edit_are_found_where_they_lie():
    old = list(range(1000))
    new = [*old[:100], 5000, 5001, *old[110:400], *old[700:900], 7]
    assert list(find_matching_spans(old, new, 100, LEAST)) == [MatchingSpan(110, 102, 290), MatchingSpan(700, 392, 200)]


def test_what_is_shorter_than_the_least_is_no_run():
    old = list(range(100))
    assert list(find_matching_spans(old, [7, *old[50 : 50 + LEAST - 1], 7], 0, LEAST)) == []
    assert list(find_matching_spans(old, [7, *old[50 : 50 + LEAST], 7], 0, LEAST)) == [MatchingSpan(50, 1, LEAST)]
    assert list(find_matching_spans([], old, 0, LEAST)) == list(find_matching_spans(old, [], 0, LEAST)) == []


def test_runs_of_random_edits_are_equal_apart_and_rising():
    draw = Random(1)
    for _ in range(200):
        old = [draw.randrange(draw.choice((3, 50, 50_000))) for _ in range(draw.randrange(400))]
        new = list(old)
        for _ in range(draw.randrange(6)):
            a = draw.randrange(len(new) + 1)
            new[a : a + draw.randrange(60)] = [draw.randrange(50) for _ in range(draw.randrange(60))]
        start, end = draw.randrange(len(new) + 1), 0
        for run in find_matching_spans(old, new, start, LEAST):
            assert run.n >= LEAST
            assert run.new >= max(start, end)
            end = run.new + run.n
            assert old[run.old : run.old + run.n] == new[run.new : end]


@pytest.fixture(scope="module")
def model():
    with kvcli.load("demo", profile=pie(), set={"load.dtype": "fp32"}) as model:
        yield model


def pie(**changes):
    reuse = {"reuse": {"method": "pie", "min_span": LEAST}, "sample": {"max_new_tokens": 8}}
    return Profile.load("ngram").replace(exactness="approx", **{**reuse, **changes})


def ids_of(model, seed, n):
    draw = Random(seed)
    return [draw.randrange(10, model.lm.vocab) for _ in range(n)]


def test_keys_and_values_are_those_that_were_read_turned_to_where_they_stand_now(model):
    a, b, new = ids_of(model, 1, 300), ids_of(model, 2, 40), ids_of(model, 3, 17)
    with model.open() as text, model.open() as plain:
        text.generate([*a, *b, 11])
        before = [text.session.cache.slots(layer) for layer in range(model.lm.n_layers)]
        kept = [(s.k[:, 100:300].clone(), s.v[:, 100:300].clone()) for s in before]
        turn = text.generate([*a[:90], *new, *a[100:], 12], max_new_tokens=1)
        assert turn.stats.approx.startswith("approximate answer: profile ngram reuses KV of spans of 16 tokens or more")
        plain.with_profile(plain.profile.replace(reuse={"method": "none"}))
        shift = len(new) - 10
        for layer, (k, v) in enumerate(kept):
            s = text.session.cache.slots(layer)
            at = slice(100 + shift, 300 + shift)
            assert torch.equal(s.v[:, at], v)
            assert s.pos[0, at].tolist() == list(range(100 + shift, 300 + shift))
            assert not torch.allclose(s.k[:, at], k)
        # in the first layer nothing depends on what stands before: it is what reading would have given
        plain.generate([*a[:90], *new, *a[100:], 12], max_new_tokens=1)
        mine, read = text.session.cache.slots(0), plain.session.cache.slots(0)
        assert rotaries(model.lm)[0] is not None
        n = 90 + len(new) + 200
        assert torch.allclose(mine.k[:, :n], read.k[:, :n], atol=2e-5)
        assert torch.equal(mine.v[:, :n], read.v[:, :n])


def test_only_the_edit_is_read(model, monkeypatch):
    a, new = ids_of(model, 1, 600), ids_of(model, 3, 17)
    read = []

    def chain(ids, start):
        read.extend(range(start, start + len(ids)))
        return Rows.chain(ids, start)

    with model.open() as text:
        text.generate([*a, 11])
        monkeypatch.setattr("kvcli.engine.sequence.session.Rows", SimpleNamespace(chain=chain, build=Rows.build))
        text.generate([*a[:90], *new, *a[100:], 12], max_new_tokens=1)
    assert read == list(range(89, 90 + len(new)))


def test_a_prompt_that_goes_on_from_the_text_is_exact_and_says_nothing(model):
    a = ids_of(model, 1, 300)
    with model.open() as text:
        first = text.generate([*a, 11])
        more = text.generate([*a, 11, *first.ids, *ids_of(model, 5, 40)])
        assert not more.stats.approx


def test_rewound_before_what_was_taken_over_the_text_is_its_own_again(model):
    a = ids_of(model, 1, 300)
    with model.open() as text:
        text.generate([*a, 11])
        assert text.generate([*a[:90], 5, *a[100:], 12]).stats.approx
        assert text.generate([*a[:90], 5, *a[100:], 13]).stats.approx, "it is still there"
        assert not text.generate(a[:80]).stats.approx


def test_a_conversation_that_lost_its_beginning_is_not_read_again():
    changes = {"context": {"limit": 400, "reserve": 16, "on_overflow": "drop"}}
    with kvcli.load("demo", pie(**changes)) as model, model.open() as text:
        chat = kvcli.Chat(text, "Answer briefly.")
        said = []
        for i in range(25):
            turn = chat.send(f"What is the depth of well number {i}?")
            said.append((chat.visible_messages.left, turn.stats.approx != ""))
        changed = next(i for i, (left, _) in enumerate(said) if left)
        assert not any(approx for _, approx in said[:changed])
        assert said[changed][1]


@pytest.mark.parametrize(
    ("other", "key"),
    [
        ({"policy": {"name": "window"}}, "policy.name"),
        ({"prune": {"method": "lazy"}}, "prune.method"),
        ({"sparse": {"method": "minmax"}}, "sparse.method"),
        ({"exactness": "exact"}, "reuse.method"),
    ],
)
def test_what_it_cannot_rest_on_is_refused_by_name(other, key):
    with pytest.raises(kvcli.KvcliError) as error:
        pie().replace(**other)
    assert any(key in line for line in error.value.lines)


def test_at_memory_that_has_no_room_it_is_read(model, monkeypatch):
    a = ids_of(model, 1, 300)
    with model.open() as text:
        text.generate([*a, 11])
        monkeypatch.setattr("kvcli.methods.reuse.span_reuse._at", lambda *_: (_ for _ in ()).throw(MemoryError()))
        assert not text.generate([*a[:90], 5, *a[100:], 12]).stats.approx


@pytest.mark.parametrize("kv", [{"k_bits": 8, "v_bits": 8}, {"k_bits": 8, "v_bits": 4, "sinks": 4}])
def test_tiers_that_lie_in_another_order_give_the_tokens_that_were_meant(model, kv):
    a, new = ids_of(model, 1, 1500), ids_of(model, 3, 17)
    profile = pie(kv=kv, load={"dtype": "fp32"})
    with model.open(profile) as text, model.open(profile.replace(reuse={"method": "none"})) as plain:
        text.generate([*a, 11], max_new_tokens=1)
        edited = [*a[:90], *new, *a[100:], 12]
        assert text.generate(edited, max_new_tokens=1).stats.approx
        plain.generate(edited, max_new_tokens=1)
        mine, read = (
            text.session.cache.slots(0),
            plain.session.cache.slots(0),
        )  # the first layer knows of no other token
        for s, other in ((mine, read), (read, mine)):
            assert sorted(s.pos[0].tolist()) == sorted(other.pos[0].tolist()) == list(range(len(edited)))
        a_v, b_v = (s.v[:, s.pos[0].argsort()] for s in (mine, read))
        assert (a_v - b_v).abs().max() < (0.2 if kv["v_bits"] == 8 else 2.0) < b_v.abs().max()


def test_what_a_window_no_longer_holds_is_read():
    lm = make.model("gemma3", torch.float32, max_position_embeddings=4096)
    ids = families.prompt(1400)
    more = [*ids, 3, *ids[100:400], 5]
    windows = {i: Window(w) for i, w in enumerate(lm.windows) if w}
    assert windows
    one, plain = (
        make.session(lm, make.dense(lm, windows=windows), chunk=128, reusing=how) for how in (Pie(LEAST), None)
    )
    for session in (one, plain):
        run_to_end(session.read(ids))
        run_to_end(session.read(more[len(ids) :]))
    for layer in range(lm.n_layers):
        assert torch.equal(one.cache.slots(layer).pos, plain.cache.slots(layer).pos)


def test_what_was_saved_for_a_prompt_that_was_given_up_serves_no_other(model, monkeypatch):
    a, b, c = ids_of(model, 1, 300), ids_of(model, 2, 20), ids_of(model, 4, 300)
    with model.open() as text:
        text.generate([*a, 11], max_new_tokens=1)
        text.generate([*b, *a, 12], max_new_tokens=1, cancel=lambda: True)
        monkeypatch.setattr(
            "kvcli.methods.reuse.span_reuse.find_matching_spans", lambda *_: (_ for _ in ()).throw(MemoryError())
        )
        assert not text.generate([*c, 13], max_new_tokens=1).stats.approx
