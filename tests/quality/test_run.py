"""The suite from end to end on the demo model: rows, controls, what a window loses, and going on after a stop."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvcli
from kvcli.bench.profile_side import plain
from kvcli.bench.side_factory import drawing
from kvcli.chat.model import Model
from kvcli.errors import BadConfig, BadInput, ContextOverflow, KvcliError, UsageError
from kvcli.models.catalog import code_hash
from kvcli.quality.agree import agreement
from kvcli.quality.answer import QualityJob, answers
from kvcli.quality.controls import full_profile, rows
from kvcli.quality.fingerprint import fingerprint
from kvcli.quality.partial import Answer, Key, Outcome, Partial
from kvcli.quality.prompt import Prompts, fitted
from kvcli.quality.prose import Prose
from kvcli.quality.run import run_quality
from kvcli.quality.sample import SampleSeed
from kvcli.quality.tasks import TASKS
from kvcli.render import quality as render
from kvcli.render.report import stacked, terminal_lines
from kvcli.render.terminal.terminal import text_width
from kvcli.schemas.quality import AgreementDocument, QualityRow
from kvcli.settings.profile import Profile
from tests import small_tokenizers

ONE = {"threads": 1}


@pytest.fixture(scope="module")
def model() -> Model:
    return kvcli.load("demo", profile="exact", set={"load.threads": 1, "load.dtype": "fp32", "load.verify": False})


@pytest.fixture(scope="module")
def lean(model: Model) -> Profile:
    """A profile with a window of 61 tokens."""
    policy = {"name": "window", "sinks": 4, "window": 57, "compression_interval": 32}
    return model.profile.replace(name="lean", exactness="approx", policy=policy)


def tiny(model: Model, profiles: list[Profile], **changes: Any) -> Any:
    given = {"lengths": [307], "n": 2, "tasks": ["niah_single"], **changes}
    return run_quality(model, profiles, **given)


def agreed(*given: Any, **more: Any) -> AgreementDocument:
    document = agreement(*given, **more)
    assert document is not None
    return document


def test_a_window_loses_needles_beyond_luck(model: Model, lean: Profile) -> None:
    document = tiny(model, [lean], n=6, tasks=["niah_single", "passkey", "late_questions"], lengths=[503]).document()
    full, ours, lot, age = document.rows
    assert [row.profile for row in document.rows] == ["exact", "lean", "random", "streaming"]
    assert [row.role for row in document.rows] == ["full", "profile", "control", "control"]
    assert full.mean > 0.9
    assert full.kept == 1
    assert full.difference is None
    for row in (ours, lot, age):
        assert row.difference is not None
        assert row.difference.low is not None
        assert row.difference.high is not None
        assert row.difference.low <= row.difference.mean <= row.difference.high < -0.2
        assert row.mcnemar is not None
        assert row.mcnemar.p < 0.01
    assert ours.kept == pytest.approx(lot.kept, abs=0.01)
    assert [t.mean for t in ours.tasks] == [t.mean for t in age.tasks]  # the same policy by another name
    assert _grid_ends(full) == (1, 1)
    assert _grid_ends(ours) == (0, 1)  # the needle at the end lies in the window, the one at the start does not
    assert [turn.turn for turn in ours.turns] == [1, 2, 3, 4, 5, 6]
    assert ours.turns[0].score > ours.turns[-1].score


def _grid_ends(row: QualityRow) -> tuple[float, float]:
    return row.passkey[0].score, row.passkey[-1].score


def test_the_question_is_out_of_sight_unless_asked_for(model: Model, lean: Profile) -> None:
    """Behind the question a window of one sentence holds the question and nothing of the text."""
    hidden = tiny(model, [lean]).document().rows[1]
    visible = tiny(model, [lean], query_visible=True).document()
    assert visible.args.query_visible
    assert visible.rows[0].mean == 1
    assert visible.rows[1].kept < hidden.kept


def test_conversations_and_single_questions_agree_on_the_full_cache(model: Model) -> None:
    """Before or behind the question, forked or read anew: with everything kept, nothing may depend on it."""
    tasks = ["mqar", "late_questions"]
    hidden = tiny(model, [], tasks=tasks, lengths=[503], n=1)
    visible = tiny(model, [], tasks=tasks, lengths=[503], n=1, query_visible=True)
    said = [[a.text for o in run.cells(0).values() for a in o.answers] for run in (hidden, visible)]
    assert said[0] == said[1]
    assert len(said[0]) == 10
    assert all(o.kept == 1 for run in (hidden, visible) for o in run.cells(0).values())


def test_what_repeats_the_full_cache_differs_in_nothing(model: Model) -> None:
    ngram = model.profile.replace(name="ngram", spec={"method": "ngram"})
    same = model.profile.replace(name="same")
    document = tiny(model, [same, ngram], tasks=["niah_single", "mqar"], n=2).document()
    assert [row.profile for row in document.rows] == ["exact", "ngram", "random", "streaming"]
    difference = document.rows[1].difference
    assert difference is not None
    assert (difference.mean, difference.low, difference.high) == (0, 0, 0)
    assert document.rows[1].mcnemar is not None
    assert document.rows[1].mcnemar.p == 1


def test_questions_about_one_context_do_not_see_each_other(model: Model, lean: Profile) -> None:
    """A question asked of a fork, after others, is answered as if it were the only one."""
    prompts = Prompts(model.tokenizer)
    context = fitted(TASKS["mqar"], SampleSeed("mqar", 1, 401, 0, Prose()), prompts)
    ids = prompts.context(context.text)
    under = model.with_profile(lean)
    together, _ = answers(under, prompts, _job(prompts, context, ids), is_visible=False)
    for i, question in enumerate(context.questions):
        alone, _ = answers(
            under, prompts, _job(prompts, replace(context, questions=(question,)), ids), is_visible=False
        )
        assert alone == [together[i]]


def _job(prompts: Prompts, context: Any, ids: list[int]) -> QualityJob:
    return QualityJob(TASKS["mqar"], context, ids, [prompts.question(q) for q in context.questions])


def test_a_stopped_run_goes_on_where_it_was(model: Model, lean: Profile, tmp_path: Path) -> None:
    path = tmp_path / "quality.jsonl"
    seen: list[int] = []
    stopped = tiny(model, [lean], partial=path, tell=lambda done, *_: seen.append(done), cancel=lambda: len(seen) > 5)
    assert not stopped.is_complete
    assert len(stopped.outcomes) == 1  # the second context lacks rows
    with pytest.raises(KvcliError) as found:
        replace(stopped, outcomes={}).document()
    assert found.value.code == "no_result"
    lines = path.read_text().splitlines()
    assert len(lines) == 6
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("\n".join(lines) + "\n" + lines[0][:40])  # as a crash leaves it
    whole = tiny(model, [lean], partial=path)
    after = path.read_text().splitlines()
    assert after[:7] == [*lines, lines[0][:40]]
    assert len(after) == 9
    assert whole.document() == tiny(model, [lean]).document()
    tiny(model, [lean], partial=path)
    assert path.read_text().splitlines() == after
    tiny(model, [lean], partial=path, seed=1)
    assert len(path.read_text().splitlines()) == 17


def test_keys_tell_profiles_texts_and_weights_apart(model: Model, lean: Profile, tmp_path: Path) -> None:
    path = tmp_path / "quality.jsonl"
    tiny(model, [lean], n=1, partial=path)
    tiny(model, [lean], n=1, partial=path, haystack="Gulls cried over the pier. Nobody came.")
    found = [json.loads(line)["key"] for line in path.read_text().splitlines()]
    assert len({json.dumps(key) for key in found}) == len(found) == 8
    assert len({key["profile"] for key in found}) >= 4
    assert len({key["model"] for key in found}) == 1
    changed = replace(model.info, revision="other")
    other = Model(model.lm, model.tokenizer, model.profile)
    assert fingerprint(other) == fingerprint(model)
    other.info = changed
    assert fingerprint(other) != fingerprint(model)


def test_answers_of_the_code_before_a_change_are_not_taken_for_those_behind_it(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "kvcli" / "quality" / "fingerprint.py"
    code.parent.mkdir(parents=True)
    code.write_text("x = 1")
    monkeypatch.setattr("kvcli.models.catalog.__file__", str(code))
    code_hash.cache_clear()
    before = fingerprint(model)
    assert fingerprint(model) == before
    code.write_text("x = 2")
    code_hash.cache_clear()
    assert fingerprint(model) != before
    monkeypatch.undo()
    code_hash.cache_clear()


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    for text in ("my notes", "my notes\n", '{"schema": "kvcli.turn/2"}\n'):
        path = tmp_path / "notes.txt"
        path.write_text(text)
        with pytest.raises(BadInput) as found:
            Partial(path)
        assert found.value.code == "not_quality_results"
        assert path.read_text() == text
    with pytest.raises(BadInput, match="cannot write"):
        Partial(tmp_path / "no such folder" / "quality.jsonl")


def test_a_line_that_broke_is_passed_over(model: Model, tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    tiny(model, [], n=1, partial=whole)
    lines = whole.read_text()
    for text in ('{"sch', '{"schema": "kvcli.quality-sample/1", "key": {"mod'):
        path = tmp_path / "quality.jsonl"
        path.write_text(text)
        Partial(path)
        path.write_text(path.read_text() + lines)
        tiny(model, [], n=1, partial=path)
        assert path.read_text() == f"{text}\n{lines}"  # nothing was run again


def test_lines_of_another_version_are_kept_and_run_again(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "quality.jsonl"
    older = '{"schema": "kvcli.quality-sample/0", "key": 1}\n{"schema": "kvcli.quality-sample/1", "less": 1}\n'
    path.write_text(older)
    assert tiny(model, [], n=1, partial=path).is_complete
    assert path.read_text().startswith(older)
    assert len(path.read_text().splitlines()) == 5


def test_outcomes_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "quality.jsonl"
    key = Key("m", "p", "mqar", 1, 512, 0, False, "d")
    outcome = Outcome(key, (Answer("zwölf\u2028Ä", 0.5, 3, {"depth": 0.1}), Answer("", 1.0, 1)), 480, 0.25)
    Partial(path).add(outcome)
    assert Partial(path).get(key) == outcome
    assert Partial(path).get(replace(key, query_visible=True)) is None
    assert outcome.score == 0.75


def test_the_full_cache_is_measured_once_whatever_the_sampling(lean: Profile) -> None:
    exact = drawing(Profile.load("exact"), 0.8, 3)
    table = rows([exact, drawing(lean, 0.8, 3)], full_profile(plain(exact)), [300])
    assert [row.name for row in table] == ["exact", "lean", "random", "streaming"]


def test_controls_have_the_memory_of_the_leanest_profile(model: Model, lean: Profile) -> None:
    full = full_profile(model.profile)
    wide = lean.replace(name="wide", policy={"window": 200})
    table = rows([wide, lean], full, [20, 300])
    assert [row.name for row in table] == ["exact", "wide", "lean", "random", "streaming"]
    assert [row.at(300).policy.footprint(300).slots for row in table[3:]] == [61, 61]
    assert [row.at(40).policy.footprint(40).slots for row in table[3:]] == [40, 40]  # lean keeps all of so few
    short = rows([wide, lean], full, [20, 40])  # it evicts nothing at all: a quarter
    assert [row.at(40).policy.footprint(40).slots for row in short[3:]] == [10, 10]
    alone = rows([], full, [1000])
    assert [row.at(1000).policy.footprint(1000).slots for row in alone[1:]] == [250, 250]
    assert all(row.at(n).policy.footprint(n).slots < n for row in alone[1:] for n in (2, 3, 9))
    assert alone[1].at(1000, 1) != alone[1].at(1000)  # other lots for another context
    assert alone[0].at(1000, 1) == alone[0].at(1000)


@pytest.mark.parametrize(
    ("changes", "error", "code"),
    [
        ({"lengths": [9000]}, ContextOverflow, "context_overflow"),
        ({"lengths": [29]}, BadInput, "task_too_long"),
        ({"lengths": []}, UsageError, "bad_quality_size"),
        ({"n": 0}, UsageError, "bad_quality_size"),
        ({"tasks": ["nonsense"]}, UsageError, "unknown_task"),
        ({"tasks": []}, UsageError, "unknown_task"),
        ({"haystack": " "}, BadInput, "empty_haystack"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_read(
    model: Model, tmp_path: Path, changes: dict[str, Any], error: type[KvcliError], code: str
) -> None:
    with pytest.raises(error) as raised:
        tiny(model, [], partial=tmp_path / "quality.jsonl", **changes)
    assert raised.value.code == code
    assert not (tmp_path / "quality.jsonl").exists() or not (tmp_path / "quality.jsonl").read_text()


def test_profiles_that_load_weights_otherwise_are_refused(model: Model) -> None:
    with pytest.raises(BadConfig):
        tiny(model, [model.profile.replace(name="other", load={"dtype": "bf16"}, sample={"seed": 1})])


def test_nothing_done_is_no_result(model: Model) -> None:
    with pytest.raises(KvcliError, match="first result"):
        tiny(model, [], cancel=lambda: True).document()


def test_progress_counts_up_to_the_end(model: Model) -> None:
    told: list[tuple[int, int, str]] = []
    tiny(model, [], n=1, tell=lambda *what: told.append(what))
    assert [done for done, _, _ in told] == [0, 1, 2, 3]
    assert {total for _, total, _ in told} == {3}
    assert told[0][2] == "exact · niah_single · 307 tokens"


def test_tables_and_notes_say_what_was_measured(model: Model, lean: Profile) -> None:
    document = tiny(model, [lean], tasks=["niah_single", "passkey", "late_questions", "vt"], lengths=[503]).document()
    document.agreement = agreed(model, [lean], "The tide went out over the grey stones. " * 60, windows=2)
    tables = dict(render.tables(document))
    for heading, lines in tables.items():
        assert len({len(line) for line in lines}) == 1, heading
    assert [line[0] for line in tables["quality"][1:]] == ["exact", "lean", "random (control)", "streaming (control)"]
    assert tables["by task"][0] == ["task", "n", "exact", "lean", "random (control)", "streaming (control)"]
    assert tables["passkey, exact: length by depth"][0] == ["tokens", "at 0%", "at 25%", "at 50%", "at 75%", "at 100%"]
    text = "\n".join(render.notes(document))
    assert "too hard for this model" in text
    assert "vt" in text
    assert "as much as lean" in text
    whole_past = lean.replace(policy={"name": "window", "sinks": 4, "window": 2000}, name="wide")
    wide = tiny(model, [whole_past], n=1).document()
    assert "wide evicted no tokens at these lengths; --quality-lengths" in " ".join(render.notes(wide))
    assert type(document).model_validate(document.document()) == document
    for width in (40, 80, 200):
        said = terminal_lines(render.blocks(document), width)
        assert max(map(text_width, said)) <= width
        whole = "\n".join(said)
        assert all(line[0] in whole and line[-1] in whole for table in tables.values() for line in table)


def test_a_table_too_wide_goes_on_below_with_its_names() -> None:
    wide = [["task", "first", "second", "third"], ["a long name", "1", "2", "3"]]
    assert stacked(wide, 80) == ["task         first  second  third", "a long name      1       2      3"]
    assert stacked(wide, 26) == [
        "task         first  second", "a long name      1       2", "", "task         third", "a long name      3"
    ]  # fmt: skip
    assert stacked(wide, 15)[:3] == ["task      first", "a long        1", "name"]


def test_agreement_is_whole_with_itself_and_less_for_a_window(model: Model, lean: Profile) -> None:
    told: list[int] = []
    text = Prose().sentences(SampleSeed("t", 1, 1, 0, Prose()).rng(), 120)
    document = agreed(
        model, [lean], " ".join(text), context=211, scored=61, windows=4, tell=lambda done, *_: told.append(done)
    )
    full, ours, lot, _ = document.rows
    assert (document.windows, document.context, document.scored, document.complete) == (4, 211, 61, True)
    assert (full.agreement.mean, full.kl.mean, full.delta_nll.mean) == (1, 0, 0)
    assert ours.kept < 0.4
    for row in (ours, lot):
        assert row.agreement.mean < 1
        assert row.kl.low is not None
        assert 0 < row.kl.low < row.kl.mean
    assert told == list(range(17))


def test_agreement_predicts_what_the_stock_pass_does(model: Model) -> None:
    """The full row's likelihood is that of transformers' own forward over the whole window."""
    import torch

    text = " ".join(Prose().sentences(SampleSeed("t", 2, 1, 0, Prose()).rng(), 40))
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    document = agreed(model, [], text, context=len(ids) - 31, scored=31, windows=1)
    stock = _stock()
    with torch.inference_mode():
        logits = stock(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    nll = -logits[-32:-1].gather(1, torch.tensor(ids[-31:]).unsqueeze(1)).mean()
    assert document.rows[0].nll == pytest.approx(float(nll), abs=1e-4)


def _stock() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from kvcli.demo import weights_dir

    return AutoModelForCausalLM.from_pretrained(weights_dir(), dtype=torch.float32).eval()


def test_short_texts_are_one_window_and_shorter_ones_refused(model: Model) -> None:
    document = agreed(model, [], "The tide went out over the grey stones. " * 12)
    assert document.windows == 1
    assert document.rows[0].kl.low is None
    with pytest.raises(BadInput) as found:
        agreement(model, [], "The tide went out.")
    assert found.value.code == "text_too_short"
    with pytest.raises(ContextOverflow):
        agreement(model, [], "The tide went out.", context=8000)
    assert agreement(model, [], "The tide went out over the grey stones. " * 12, cancel=lambda: True) is None


@pytest.mark.parametrize("kind", small_tokenizers.KINDS)
def test_a_context_has_the_same_ids_whatever_is_asked(kind: str) -> None:
    tokenizer = small_tokenizers.KINDS[kind]()
    prompts = Prompts(tokenizer)
    context = fitted(TASKS["mqar"], SampleSeed("mqar", 1, 8009, 0, Prose()), prompts)
    texts = {
        tokenizer.decode(prompts.context(context.text) + prompts.question(q), skip_special_tokens=False)
        for q in context.questions
    }
    assert len(texts) == len(context.questions)
    for text, question in zip(sorted(texts), sorted(q.prefix for q in context.questions), strict=True):
        assert text.endswith(f"<|end|><|assistant|>{question}") or question in text
        assert "\ufdd2" not in text


def test_without_a_template_the_text_is_plain() -> None:
    prompts = Prompts(small_tokenizers.byte_fallback(template=None))
    question = fitted(TASKS["niah_single"], SampleSeed("niah_single", 1, 2003, 0, Prose()), prompts).questions[0]
    said = prompts.tokenizer.decode(prompts.question(question))
    assert said == f"{question.text}\nAnswer: {question.prefix}"


def test_a_further_question_closes_the_answer_before_it_once() -> None:
    prompts = Prompts(small_tokenizers.demo())
    question = fitted(TASKS["niah_single"], SampleSeed("niah_single", 1, 307, 0, Prose()), prompts).questions[0]
    end = prompts.tokenizer.convert_tokens_to_ids("<|end|>")
    cut, stopped = prompts.next_question(question, last=99), prompts.next_question(question, last=end)
    assert cut == [end, *stopped]
    assert prompts.tokenizer.decode(stopped).startswith(f"<|user|>{question.text}<|end|><|assistant|>")
