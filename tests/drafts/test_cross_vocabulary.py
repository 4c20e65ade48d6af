"""A model that drafts in a vocabulary of its own: the text in its ids, and its drafts in those of the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

import pytest

from kvcli.drafts.draft_models import cross_vocabulary
from kvcli.drafts.draft_models.cross_vocabulary import CrossVocabularyModel, RetokenizedText
from kvcli.drafts.draft_models.separate_model import SeparateDraftModel
from kvcli.engine.engine import run_to_end
from kvcli.models.retokenizer import TokenMapping
from kvcli.models.text import decode
from tests import families, make, small_tokenizers

NAMES = ["byte-level", "byte fallback", "metaspace"]
PAIRS = [(a, b) for a in NAMES for b in NAMES if a != b]
TEXT = " Hello world, the harbour of Gannau was closed.\nTwo ferries, café 😀 and all, wait.  It is Hello world again."


def pair(target: str, draft: str) -> tuple[Any, Any, TokenMapping]:
    words, its = (small_tokenizers.KINDS[name]() for name in (target, draft))
    return words, its, TokenMapping(words, its)


def ids_of(words: Any, text: str = TEXT) -> list[int]:
    return list(words.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_kept_in_step_it_is_what_a_fresh_reading_would_be(target: str, draft: str) -> None:
    words, its, spelling = pair(target, draft)
    random, ids = Random(7), [*ids_of(words, 2 * TEXT), words.eos_token_id, *ids_of(words, 2 * TEXT)]
    text, at = RetokenizedText(spelling), 0
    while at < len(ids):
        n = random.choice([1, 1, 2, 5, 40])
        if random.random() < 0.2:  # an undo
            at = random.randrange(at + 1)
            text.start(ids[: at + n])
        else:
            text.extend(ids[at : at + n])
        at += n
        fresh = RetokenizedText(spelling)
        fresh.start(ids[:at])
        assert text.its == fresh.its
        assert text.is_torn == fresh.is_torn
    left = [i for i in text.its if i not in spelling.draft.special]
    if "metaspace" not in (target, draft):  # which has no bytes
        said = decode(words, [i for i in ids if i not in spelling.target.special])
        assert decode(its, left).strip() == said.strip()


def test_it_is_spelled_as_the_tokenizer_spells_it() -> None:
    words, its, spelling = pair("byte fallback", "byte-level")
    text, ids = RetokenizedText(spelling), ids_of(words, 9 * TEXT)
    for at in range(len(ids)):
        text.extend(ids[at : at + 1])
    assert len(text._cuts) > 5
    assert text.its == its.encode(9 * TEXT, add_special_tokens=False)


def test_within_a_character_it_is_torn() -> None:
    words, its, spelling = pair("byte fallback", "byte-level")
    text, seen = RetokenizedText(spelling), []
    for token in ids_of(words, "a 😀 b"):
        text.extend([token])
        seen.append((decode(its, text.its), text.is_torn))
    assert ("a ", True) in seen
    assert seen[-1] == ("a 😀 b", False)


def test_marks_are_those_of_the_same_name_or_office_or_none() -> None:
    words, its, spelling = pair("byte fallback", "byte-level")
    end, eos, bos = words.convert_tokens_to_ids(["<|end|>", "</s>", "<s>"])
    assert spelling.marks[end] == its.convert_tokens_to_ids("<|end|>") == spelling.marks[eos] == its.eos_token_id
    assert spelling.marks[bos] == its.bos_token_id
    assert spelling.marks[words.unk_token_id] is None
    assert spelling.marks_back[its.eos_token_id] in (end, eos)


class Oracle:
    """Says what comes next in a text of its own ids, and what it was told of it."""

    usage = list
    n_uncovered = 1 << 20
    name, limit, max_depth = "oracle", 1 << 20, 1 << 20

    def __init__(self, truth: Sequence[int]) -> None:
        self.truth, self.text, self.passes, self.n = list(truth), list[int](), 0, 0

    def start(self, ids: Sequence[int]) -> None:
        self.text = list(ids)

    def extend(self, new: Sequence[int]) -> None:
        self.text += new

    def newest(self, n: int) -> list[int]:
        return self.text[-n:]

    def catch_up(self, want: int = 1, most: float = math.inf) -> Iterator[Any]:
        self.n = len(self.text)
        yield from ()
        return [self.said(self.n - want + 1 + i) for i in range(want)]

    def continue_from(self, ids: Sequence[int], parents: Sequence[int]) -> Iterator[Any]:
        assert parents == [self.n - len(self.text) - 1]
        self.n, self.passes = self.n + 1, self.passes + 1
        yield from ()
        return [self.said(self.n)]

    def said(self, at: int) -> list[float]:
        return [float(self.truth[at]) if at < len(self.truth) else 3.0, 2.0, 9.0, 1.0]


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_who_knows_the_text_drafts_it_in_the_other_vocabulary(target: str, draft: str) -> None:
    words, _, spelling = pair(target, draft)
    ids = ids_of(words, 8 * TEXT.replace("😀", "").replace("é", "e"))
    whole = RetokenizedText(spelling)
    whole.start(ids)
    oracle = Oracle(whole.its)
    guesser, at, right, asked = CrossVocabularyModel(oracle, spelling), 9, 0, 0  # type: ignore[arg-type]
    guesser.start(ids[:at])
    while at + 4 < len(ids):
        (row,) = run_to_end(guesser.catch_up())
        guesses: list[int] = []
        while row and len(guesses) < 4:
            guesses.append(int(row[0]))
            (row,) = run_to_end(guesser.continue_from(guesses[-1:], [len(guesses) - 2]))
        took = next((i for i, guess in enumerate(guesses) if guess != ids[at + i]), len(guesses))
        right, asked = right + took, asked + max(1, min(took + 1, len(guesses)))
        guesser.extend(ids[at : at + took + 1])
        at += took + 1
        assert guesser.length == at
    assert right / asked > 0.75


def test_a_look_is_about_places_where_tokens_of_both_end() -> None:
    words, its, spelling = pair("byte-level", "byte fallback")
    ids = ids_of(words)
    whole = RetokenizedText(spelling)
    whole.start(ids)
    guesser = CrossVocabularyModel(Oracle(whole.its), spelling)  # type: ignore[arg-type]
    guesser.start(ids[:-5])
    newest = guesser.newest(16)
    found = run_to_end(guesser.catch_up(len(newest), most=len(newest)))
    said = [(int(row[0]), newest[i + 1]) for i, row in enumerate(found[:-1]) if row]
    assert len(found) == len(newest)
    assert len(said) > 4
    assert any(guess == token for guess, token in said)
    text = guesser._text
    ends = text.ends(len(newest), n_its := len(text.its))
    assert len(ends) > 4
    assert text.ends(3, n_its) == [at for at in ends if at[0] > guesser.length - 3] != []
    assert text.ends(len(newest), 9) == [at for at in ends if at[1] > n_its - 9] != []
    for end, its_end in ends:
        assert decode(words, ids[:end]).strip() == decode(its, whole.its[:its_end]).strip()


@pytest.mark.parametrize("known", ["the prompt", "nothing"])
def test_a_look_takes_no_more_rows_than_it_is_about_nor_any_that_were_read(known: str) -> None:
    """Both spell alike, so what it says of the text is what who drafts would say of it alone."""
    model, words, its = make.model(), small_tokenizers.letters(97, 1), small_tokenizers.letters(97, 1)
    spelling = TokenMapping(words, its)
    ids = spelling.target.ids(decode(words, families.prompt(150)))[:56]
    alone, beside = SeparateDraftModel(model), SeparateDraftModel(model)
    guesser = CrossVocabularyModel(beside, spelling)
    for each in (alone, guesser):
        each.start(ids[:50])
        if known == "the prompt":
            run_to_end(each.prefill())
        for at in range(50, 56):
            each.extend(ids[at : at + 1])
    assert beside._text == alone._text == ids
    for each in (alone, beside):
        each.fed, each._feed = [], partial(counted, each, each._feed)  # type: ignore[attr-defined, method-assign]
    want, found = (run_to_end(each.catch_up(5, most=5)) for each in (alone, guesser))
    assert alone.fed == beside.fed == [5]  # type: ignore[attr-defined]
    for row, named in zip(want, found, strict=True):
        assert int(named[0]) == int(row[0])


def counted(of: Any, feed: Any, ids: Sequence[int], want: int = 0) -> Any:
    of.fed.append(len(ids))
    return feed(ids, want)


class Says(Oracle):
    """Says one thing behind the text and another behind drafts, whatever these are."""

    def __init__(self, first: Sequence[int], then: Sequence[int] = (), room: int = 1 << 20) -> None:
        super().__init__([])
        self.first, self.then, self.max_depth = first, then or first, room

    def said(self, at: int) -> list[float]:
        ids = self.first if self.n == len(self.text) else self.then[min(self.n - len(self.text), len(self.then)) - 1 :]
        return [*map(float, ids), *(9.0 - rank for rank in range(len(ids)))]


def named(
    says: Says, text: str = "Hello", kind: str = "byte-level"
) -> tuple[list[float], CrossVocabularyModel, TokenMapping]:
    """What it names behind a text."""
    words, _, spelling = pair(kind, "byte fallback")
    guesser = CrossVocabularyModel(says, spelling)  # type: ignore[arg-type]
    guesser.start(ids_of(words, text))
    (row,) = run_to_end(guesser.catch_up())
    return row, guesser, spelling


ITS = small_tokenizers.byte_fallback().convert_tokens_to_ids
FACE = [ITS(f"<0x{byte:02X}>") for byte in "😀".encode()]


def test_a_few_candidates_are_spelled_the_best_of_several_that_are_one_draft() -> None:
    letters = [ITS(letter) for letter in "ABCDEFGHIJ"]
    row, _, spelling = named(Says(letters))
    assert row == [*(float(spelling.target.ids(letter)[0]) for letter in "ABCDEFGH"), *range(9, 1, -1)]
    row, _, _ = named(Says([ITS("A"), ITS("B"), ITS("<0x41>")]))
    assert row[2:] == [9.0, 8.0]


def test_a_character_is_named_once_it_is_whole() -> None:
    says = Says(FACE[:1], FACE[1:])
    row, _, spelling = named(says)
    assert int(row[0]) == spelling.target.ids("😀")[0]
    assert says.passes == 3


@pytest.mark.parametrize(("room", "passes"), [(1 << 20, 4), (2, 2), (0, 0)])
def test_what_never_becomes_one_is_given_up_and_so_is_what_has_no_room(room: int, passes: int) -> None:
    says = Says(FACE[:1], room=room)
    row, _, _ = named(says)
    assert (row, says.passes) == ([], passes)


def test_behind_half_a_character_and_behind_nothing_it_says_nothing() -> None:
    words, _, spelling = pair("byte fallback", "byte-level")
    guesser = CrossVocabularyModel(Says([20]), spelling)  # type: ignore[arg-type]
    guesser.start(ids_of(words, "a 😀")[:-1])
    assert run_to_end(guesser.catch_up()) == [[]]
    guesser.start([words.unk_token_id])
    assert run_to_end(guesser.catch_up()) == [[]]
    assert run_to_end(guesser.catch_up(3, most=3)) == [[], [], []]


def test_a_mark_of_its_own_is_the_other_ones() -> None:
    end = ITS("<|end|>")
    row, guesser, spelling = named(Says([end]))
    assert int(row[0]) == spelling.marks_back[end]
    assert guesser._spelled((ITS("A"), end)) == (*guesser._spelled((ITS("A"),)), spelling.marks_back[end])


def test_a_part_of_a_word_is_not_named_again_until_the_word_is_whole() -> None:
    _, _, spelling = pair("byte-level", "byte fallback")
    letters = "abcdefghijklmnopqrstuvwxyz"
    a, b = next((a, b) for a in letters for b in letters if len(spelling.target.ids(a + b)) == 1)
    says = Says([ITS(a)], [ITS(b)])
    row, guesser, _ = named(says)
    assert int(row[0]) == spelling.target.ids(a)[0]
    assert run_to_end(guesser.continue_from([int(row[0])], [-1])) == [[]], "both together are another token"
    (row,) = run_to_end(guesser.catch_up())
    assert int(row[0]) == spelling.target.ids(a + b)[0]


def test_spelled_candidates_are_remembered_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_vocabulary, "KEPT", 3)
    _, guesser, _ = named(Says([ITS(letter) for letter in "ABCDEFGH"]))
    assert 0 < len(guesser._known) <= 3


def test_of_what_stands_before_a_cut_nothing_is_asked() -> None:
    words, _, spelling = pair("byte-level", "byte fallback")
    guesser = CrossVocabularyModel(Oracle([]), spelling)  # type: ignore[arg-type]
    guesser.start(ids := ids_of(words, 9 * TEXT))
    assert guesser._text.at[0] > 0
    assert guesser.newest(1 << 20) == ids[guesser._text.at[0] :]
    assert guesser.newest(3) == ids[-3:]


def test_where_its_kv_cache_is_spelled_otherwise_it_knows() -> None:
    words, its, spelling = pair("byte fallback", "byte-level")
    says = Says([20])
    guesser, ids = CrossVocabularyModel(says, spelling), ids_of(words, "Hello world, the harbour was closed.")  # type: ignore[arg-type]
    guesser.start(ids[:4])
    for at in range(4, len(ids)):
        guesser.extend(ids[at : at + 1])
        assert says.text == guesser._text.its
    assert says.text == its.encode("Hello world, the harbour was closed.", add_special_tokens=False)


def respelled(words: Any, spelling: TokenMapping, text: str) -> list[int]:
    found = RetokenizedText(spelling)
    found.start(ids_of(words, text))
    return found.its


def test_the_first_word_and_a_text_without_words_are_spelled_as_they_are_alone() -> None:
    words, its, spelling = pair("byte-level", "byte fallback")
    assert respelled(words, spelling, "Hello world") == its.encode("Hello world", add_special_tokens=False)
    words, its, spelling = pair("byte fallback", "byte-level")
    faces = "a" + 40 * "😀"  # no cut stands within one
    assert respelled(words, spelling, faces) == its.encode(faces, add_special_tokens=False)


def test_two_marks_that_are_one_to_it_are_one() -> None:
    words, _, spelling = pair("byte fallback", "byte-level")
    text, (end, eos) = RetokenizedText(spelling), words.convert_tokens_to_ids(["<|end|>", "</s>"])
    text.start([*ids_of(words, "Hello"), end, eos])
    assert text.its.count(spelling.marks[end]) == 1  # type: ignore[arg-type]


def test_an_undo_takes_back_the_cuts_that_were_made_with_an_eye_on_what_is_gone() -> None:
    words, _, spelling = pair("byte-level", "byte fallback")
    ids = ids_of(words, 6 * TEXT)
    text = RetokenizedText(spelling)
    for at in (50, 60, 71, 72, 100, 119, 121):
        text.start(ids)
        text.start(ids[:at])
        fresh = RetokenizedText(spelling)
        fresh.start(ids[:at])
        assert (text.its, text._cuts) == (fresh.its, fresh._cuts)
