"""The Python API on a tiny model: shipped profiles generate (I10), turns reuse the cache, failures lose nothing."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import kvcli
from kvcli.api import End, Live, Read, Text
from kvcli.chat.model import Model
from kvcli.chat.saved_chats import SavedChats
from kvcli.chat.text_session import TextSession
from kvcli.demo import weights_dir
from kvcli.engine.hf.lm import LM
from kvcli.errors import BadConfig, BadInput, BadModel, ContextOverflow, DoesNotFit, ExitStatus
from kvcli.kv.slots import nbytes
from kvcli.models.text import tokens_with
from kvcli.settings.config import builtin_files
from kvcli.settings.profile import Profile
from tests import drafters, families, make, small_tokenizers

DRAFTED = ("draft", "specextend", "specextend-paper")  # tests/test_draft_model_loading.py has those
SHIPPED = [file.profile for file in builtin_files() if file.profile not in DRAFTED]
LONG = 1301  # tokens: beyond every guard, residual and window


@cache
def lm() -> LM:
    return make.model("llama", vocab_size=2048)


@cache
def long_lm() -> LM:
    return make.model("llama", vocab_size=2048, max_position_embeddings=2048)


@cache
def long_text(profile: str, seed: int | None, **spec: str) -> tuple[list[int], int]:
    """What the profile writes behind a long prompt, and the bytes of keys and values it then holds in memory."""
    sample = {"temperature": 0.0} if seed is None else {"temperature": 0.8, "top_p": 0.9, "seed": seed}
    chosen = Profile.load(profile).replace(sample=sample, **({"spec": spec} if spec else {}))
    made = Model(long_lm(), small_tokenizers.demo(), chosen)
    turn = made.generate(prompt(LONG), max_new_tokens=30)
    assert (turn.stats.new, turn.finish) == (30, "length")
    return turn.ids, turn.stats.kv_bytes - turn.stats.kv.get("disk", 0)


def model(profile: str = "exact", **changes: Any) -> TextSession:
    return Model(lm(), small_tokenizers.demo(), Profile.load(profile).replace(**changes)).open()


def prompt(n: int = 40) -> list[int]:
    phrase = families.prompt(10, 2048)
    return families.prompt(n - 16, 2048, seed=2) + phrase + phrase[:6]


@pytest.mark.parametrize("seed", [None, 4])
@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_profile_does_what_it_says(name: str, seed: int | None) -> None:
    """Drafting never changes its text; an exact one writes that of `exact` from as many bytes, another holds fewer."""
    ids, held = long_text(name, seed)
    assert ids == long_text(name, seed, method="off")[0]
    exact, whole = long_text("exact", seed)
    if Profile.load(name).exactness == "exact":
        assert (ids, held) == (exact, whole)
    elif name != "lazy-paper":  # at each token whatever is looked at comes back: in a random model everything
        assert held < 0.85 * whole


def test_forgetting_shows_in_the_text() -> None:
    """Else the test above could not tell a profile that forgets from one that does not."""
    texts = {name: tuple(long_text(name, None)[0]) for name in ("exact", "streaming", "snap", "lean")}
    assert len(set(texts.values())) == 4


def test_events_come_in_order_and_add_up() -> None:
    m = model("ngram", spec={"adaptive": False}, prefill={"chunk": 16})
    events = list(m.stream(prompt(), max_new_tokens=25))
    kinds = [type(e) for e in events]
    assert kinds[0] is Live
    assert kinds[-1] is End
    assert kinds.index(Text) > max(i for i, k in enumerate(kinds) if k is Read)
    reads = [e for e in events if isinstance(e, Read)]
    assert [r.done for r in reads] == [16, 32, 39, 40]
    turn = events[-1].turn
    pieces = [e for e in events if isinstance(e, Text)]
    assert "".join(p.text for p in pieces) == turn.text
    assert [i for p in pieces for i in p.ids] == list(turn.ids[: sum(len(p.ids) for p in pieces)])
    stats = turn.stats
    assert stats.prompt == 40
    assert stats.context == 40 + len(turn.ids)
    assert stats.new == len(turn.ids) == stats.passes + stats.accepted_tokens
    assert stats.kv == nbytes(m.session.cache)
    assert stats.peak > 0


def test_the_next_turn_reads_only_what_is_new() -> None:
    m = model()
    first = m.generate(prompt(), max_new_tokens=10)
    longer = [*prompt(), *first.ids, 7, 8, 9]
    second = m.generate(longer, max_new_tokens=5)
    assert second.stats.cached == 49  # all but the last token of the answer, which was never read
    assert second.ids == model().generate(longer, max_new_tokens=5).ids
    assert m.generate(prompt(), max_new_tokens=10).ids == first.ids


def test_a_stop_string_ends_the_text_before_it() -> None:
    whole = model().generate(prompt(), max_new_tokens=30)
    cut = whole.text[len(whole.text) // 2 :][:3]
    turn = model().generate(prompt(), max_new_tokens=30, stop=[cut])
    assert turn.finish == "stop"
    assert turn.text == whole.text[: whole.text.index(cut)]


def test_nothing_counts_behind_a_stop_string_however_much_a_pass_gave() -> None:
    class Right(drafters.Right):
        def drafter(self) -> Right:
            return self

    whole = model().generate(prompt(), max_new_tokens=30)
    stop = [model().tokenizer.decode(whole.ids[9:11])]
    want = model().generate(prompt(), max_new_tokens=30, stop=stop)
    m = model()
    m.session.drafter = Right([*prompt(), *whole.ids], 2048, -1)
    turn = m.generate(prompt(), max_new_tokens=30, stop=stop)
    assert turn.stats.passes < want.stats.passes
    assert (turn.text, turn.ids, turn.finish) == (want.text, want.ids, "stop")
    assert model().generate(prompt(), max_new_tokens=30, stop=stop[0]).text == want.text, "one string is one string"
    assert model(sample={"stop": stop}).generate(prompt(), max_new_tokens=30).ids == want.ids, "as in a profile"


def test_a_bias_and_breakers_are_of_tokens_that_the_model_has() -> None:
    first = model().generate(prompt(), max_new_tokens=1).ids[0]
    assert model().generate(prompt(), max_new_tokens=1, logit_bias=f"{first}-inf").ids[0] != first
    biases = [{"logit_bias": bias} for bias in (f"{lm().vocab}+1", "5", "5+inf", f"5+1{'0' * 40}")]
    for wrong in (*biases, {"stop": [""]}, {"xtc_threshold": 0.6}):
        with pytest.raises(BadConfig):
            model().generate(prompt(), max_new_tokens=1, **wrong)
    dry = tokens_with(model().tokenizer, lm().vocab, ("e",))
    assert 0 < len(dry) < lm().vocab
    with pytest.raises(BadConfig, match="no token") as error:
        tokens_with(model().tokenizer, lm().vocab, ("e", "no such token"))
    assert error.value.code == "unknown_token"


def test_a_stream_that_another_one_overtook_says_so() -> None:
    m = model(prefill={"chunk": 16})
    want = model().generate(prompt(30), max_new_tokens=8).ids
    for events in range(1, 8):  # overtaken before, while and after it reads
        first = m.stream(prompt(), max_new_tokens=8, seed=5)
        second = m.stream(prompt(30), max_new_tokens=8)
        for _ in range(events):
            next(first)
        seen = [next(second), next(second)]
        with pytest.raises(BadInput, match="another answer began"):
            list(first)
        seen += second
        assert seen[-1].turn.ids == want
    last = m.stream(prompt(), max_new_tokens=2)
    assert any(isinstance(e, End) for e in last)
    m.generate(prompt(30), max_new_tokens=2)
    assert list(last) == [], "what has ended cannot be overtaken"


def test_the_seed_is_the_streams_own_whatever_is_asked_before_it_starts() -> None:
    m = model(sample={"temperature": 1.5})
    want = m.generate(prompt(), max_new_tokens=12).ids
    first = m.stream(prompt(), max_new_tokens=12)
    m.stream(prompt(), max_new_tokens=12, seed=99)
    assert list(first)[-1].turn.ids == want


@pytest.mark.parametrize("new", [0, -3])
def test_an_answer_without_tokens_is_refused(new: int) -> None:
    with pytest.raises(BadConfig, match="in options of the answer") as found:
        model().generate(prompt(), max_new_tokens=new)
    assert "max_new_tokens" in str(found.value.lines)


def test_settings_of_one_answer_leave_the_next_alone() -> None:
    m = model(sample={"temperature": 0.0})
    plain = m.generate(prompt(), max_new_tokens=12).ids
    hot = m.generate(prompt(), max_new_tokens=12, temperature=3.0, seed=4).ids
    assert hot != plain
    assert m.generate(prompt(), max_new_tokens=12, temperature=3.0, seed=4).ids == hot
    assert m.generate(prompt(), max_new_tokens=12).ids == plain
    with pytest.raises(BadConfig, match="1 problem") as found:
        m.generate(prompt(), temprature=1.0)
    assert "temperature" in str(found.value.lines)


@pytest.mark.parametrize("token", [-1, 2048])
def test_tokens_that_the_model_does_not_have_are_refused(token: int) -> None:
    with pytest.raises(BadInput, match="2,048"):
        model().generate([5, token])


@pytest.mark.parametrize("order", ["chunks", "layers"])
def test_what_was_cancelled_once_stays_cancelled(order: str) -> None:
    """A text that was half read must not be continued, though the second answer to `cancel` is no."""
    asked = iter([True])
    text = model(prefill={"chunk": 16, "order": order})
    events = list(text.stream(prompt(), max_new_tokens=8, cancel=lambda: next(asked, False)))
    assert events[-1].turn.finish == "interrupted"
    assert events[-1].turn.ids == ()
    assert [event.done for event in events if isinstance(event, Read)] == [16 if order == "chunks" else 5]
    assert text.generate(prompt(), max_new_tokens=8).ids == model().generate(prompt(), max_new_tokens=8).ids


def test_reading_layer_by_layer_says_how_far_it_is_and_is_in_the_figures() -> None:
    text = model(prefill={"chunk": 16, "order": "layers"})
    events = list(text.stream(prompt(), max_new_tokens=8))
    done = [event.done for event in events if isinstance(event, Read)]
    assert len(done) == 3 * lm().n_layers + 1
    assert done == sorted(done)
    assert done[-2:] == [39, 40]
    assert events[-1].turn.stats.order == "layers"
    plain = model(prefill={"chunk": 16}).generate(prompt(), max_new_tokens=8)
    assert (events[-1].turn.ids, plain.stats.order) == (plain.ids, "chunks")


def test_a_model_that_a_pruner_cannot_judge_is_refused_when_it_is_opened() -> None:
    sliding = Model(make.model("mistral", vocab_size=2048), small_tokenizers.demo(), Profile.load("lazy"))
    with pytest.raises(BadModel, match="has none") as caught:
        sliding.open()
    assert caught.value.code == "no_pruning"


def test_what_a_pruner_does_is_a_caution_once() -> None:
    made = Model(long_lm(), small_tokenizers.demo(), Profile.load("lazy"))
    (said,) = made.open().cautions
    assert said.startswith("of a prompt of 1,024 tokens or more")
    assert "the newest 64" in said
    assert "the question always do" in said


def test_stop_tokens_end_a_turn_unless_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = model().generate(prompt(), max_new_tokens=20)
    stop = whole.ids[7]
    monkeypatch.setattr(lm(), "stop_ids", frozenset({stop}))
    turn = model().generate(prompt(), max_new_tokens=20)
    assert turn.ids == whole.ids[: whole.ids.index(stop) + 1]
    assert turn.finish == "stop"
    assert model().generate(prompt(), max_new_tokens=20, ignore_eos=True).ids == whole.ids


def test_a_prompt_beyond_the_window_is_refused_with_the_numbers_before_it_is_read() -> None:
    m = model(context={"limit": 64, "reserve": 16})
    with pytest.raises(ContextOverflow) as caught:
        m.stream(prompt(50), max_new_tokens=1000)
    assert caught.value.exit == ExitStatus.CONTEXT_OVERFLOW
    assert caught.value.detail == {"prompt": 50, "reserve": 16, "limit": 64}
    assert "50 tokens + answer 16 tokens > 64" in caught.value.lines[0]
    assert "--max-new-tokens 14" in caught.value.try_
    assert m.session.ids == []
    turn = m.generate(prompt(48), max_new_tokens=1000)
    assert len(turn.ids) == 16, "an answer ends where the window does"
    assert turn.finish == "length"


def test_what_an_overflow_proposes_is_enough_when_typed() -> None:
    most = lm().limit
    for length, limit, fits, proposed in (
        (50, 64, 0, ["--ctx 66", "--max-new-tokens 14"]),
        (70, 64, 0, ["--ctx 86"]),  # longer than the window
        (70, 64, 80, ["--ctx 80 --max-new-tokens 10"]),  # memory has room for the prompt, and for a shorter answer
        (90, 64, 80, []),
        (50, 64, 64, ["--max-new-tokens 14"]),
        (most - 4, 64, 0, [f"--ctx {most} --max-new-tokens 4"]),
        (most, most, 0, []),
    ):
        m = model(context={"limit": limit, "reserve": 16})
        m.model.fits = (lambda _, fits=fits: fits) if fits else None
        m = m.with_profile(m.profile)  # as /profile does in a chat
        with pytest.raises(ContextOverflow) as caught:
            m.stream(prompt(length), max_new_tokens=1000)
        typed = [way for way in caught.value.try_ if way.startswith("--")]
        assert typed == proposed, (length, limit, fits)
        for way in typed:
            asked = dict(zip(*[iter(way.split())] * 2, strict=True))
            again = model(context={"limit": int(asked.get("--ctx", limit)), "reserve": 16})
            again.stream(prompt(length), max_new_tokens=int(asked.get("--max-new-tokens", 1000)))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(BadInput, match="the question is empty"):
        model().generate([])


@pytest.mark.parametrize("after", [1, 2, 5])
def test_cancelling_keeps_what_was_said_and_the_kv_cache(after: int) -> None:
    m = model(prefill={"chunk": 16})
    whole = model(prefill={"chunk": 16}).generate(prompt(), max_new_tokens=20)
    asked = iter(range(100))
    turn = list(m.stream(prompt(), max_new_tokens=20, cancel=lambda: next(asked) >= after))[-1].turn
    assert turn.finish == "interrupted"
    assert whole.ids[: len(turn.ids)] == turn.ids
    assert len(turn.ids) < 20
    assert m.generate(prompt(), max_new_tokens=20).ids == whole.ids


def test_a_turn_that_breaks_leaves_a_kv_cache_that_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    m = model()
    want = m.generate(prompt(), max_new_tokens=12).ids
    calls = iter(range(10**6))
    append = m.session.cache.append

    def breaking(*args: Any) -> None:
        if next(calls) == 7:  # in the middle of storing a row: one layer has it, the next has not
            raise MemoryError("full")
        append(*args)

    monkeypatch.setattr(m.session.cache, "append", breaking)
    with pytest.raises(DoesNotFit):
        m.generate([*prompt(), *want], max_new_tokens=5)
    monkeypatch.undo()
    assert m.generate(prompt(), max_new_tokens=12).ids == want


def test_another_profile_shares_the_weights_and_another_load_is_refused() -> None:
    m = model()
    other = m.with_profile(Profile.load("ngram"))
    assert other.model.lm is m.model.lm
    assert other.generate(prompt(), max_new_tokens=12).ids == m.generate(prompt(), max_new_tokens=12).ids
    with pytest.raises(BadConfig) as caught:
        m.with_profile(m.profile.replace(load={"dtype": "fp16"}))
    assert caught.value.lines == ("load.dtype: auto -> fp16",)


def test_a_profile_that_keeps_the_kv_cache_alike_goes_on_without_reading_again() -> None:
    m = model()
    first = m.generate(prompt(), max_new_tokens=12).ids
    other = m.with_profile(Profile.load("ngram").replace(sample={"max_new_tokens": 8}))
    assert other.take_cache(m)
    again = other.generate([*prompt(), *first[:6]])
    assert again.stats.cached == len(prompt()) + 5
    assert again.ids[:6] == first[6:]
    assert not m.session.ids  # left empty, and still of use
    assert m.generate(prompt(), max_new_tokens=12).ids == first


def test_no_kv_cache_is_taken_over_during_an_answer() -> None:
    other = model()
    answer = other.stream(prompt(30), max_new_tokens=20)
    assert any(isinstance(event, Text) for event in answer)
    m = other.with_profile(other.profile)
    m.generate(prompt(), max_new_tokens=4)
    assert other.take_cache(m)
    with pytest.raises(BadInput):
        list(answer)
    assert len(other.session.ids) == len(prompt()) + 4


def test_lookahead_rows_keep_their_view_when_a_kv_cache_is_taken_over() -> None:
    m = model()
    m.generate(prompt(), max_new_tokens=4)
    fafo = m.with_profile(Profile.load("fafo").replace(spec={"adaptive": False, "sinks": 1, "recent": 4}))
    assert fafo.take_cache(m)
    assert m.session.view is None
    fafo.generate([*prompt(), 5, 6], max_new_tokens=12)
    shown = fafo.session.view._copy.slots(0).pos[0].tolist()
    assert shown[:2] == [0, len(prompt()) - 3]
    assert {row["tier"] for row in fafo.kv_table()} == {"cpu", "view"}
    back = m.with_profile(Profile.load("exact"))
    assert back.take_cache(fafo)
    assert back.session.view is None
    assert fafo.session.view is not None


def test_a_profile_that_keeps_the_kv_cache_otherwise_reads_again() -> None:
    m = model()
    m.generate(prompt(), max_new_tokens=4)
    assert not m.with_profile(m.profile.replace(prefill={"chunk": 5})).take_cache(m)
    assert m.session.ids


def test_closing_frees_the_kv_cache() -> None:
    m = model()
    m.generate(prompt(), max_new_tokens=4)
    assert sum(nbytes(m.session.cache).values()) > 0
    with m:
        pass
    assert sum(nbytes(m.session.cache).values()) == 0


def test_kv_dtype_is_what_is_stored_and_breaks_a_promise_of_exactness() -> None:
    approximate = model(exactness="approx", kv={"dtype": "bf16"})
    approximate.generate(prompt(), max_new_tokens=4)
    assert approximate.session.cache.slots(0).k.dtype == torch.bfloat16
    with pytest.raises(BadConfig):
        Profile.load("exact").replace(kv={"dtype": "bf16"})


def test_the_models_own_sampling_fills_what_the_profile_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm(), "generation", {"temperature": 0.6, "top_p": 0.9})
    sampler = model(sample={"temperature": 0.0}).session.sampler
    assert (sampler.temperature, sampler.top_p) == (0.0, 0.9)


def test_the_bundled_model_loads_and_answers() -> None:
    with kvcli.load("demo", profile="ngram", set={"sample.temperature": 0.0}) as m:
        assert m.info.id == "demo"
        turn = m.generate("Hello", max_new_tokens=32)
        assert turn.text.startswith("Hello!")
        assert turn.finish == "stop"
        assert m.generate("Hello", max_new_tokens=32).stats.cached > 0


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Any) -> None:
    families.build("llama").save_pretrained(tmp_path)
    with pytest.raises(BadModel, match="has no tokenizer") as caught:
        kvcli.load(str(tmp_path), profile="exact")
    assert caught.value.exit == ExitStatus.BAD_MODEL


# ---- by the settings and in the folders of the commands ----


def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **environ: str) -> Path:
    for name in ("KVCLI_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (environ or {"KVCLI_HOME": str(tmp_path / "home")}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def write_config(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(text)


CONFIG = f"""default_model = "mine"
default_profile = "short"
[models.mine]
path = "{weights_dir()}"
[profiles.short]
extends = "exact"
sample.max_new_tokens = 3
"""


@pytest.mark.parametrize(
    ("environ", "config", "data"),
    [
        ({"KVCLI_HOME": "home"}, "home/config", "home/data"),
        ({"XDG_CONFIG_HOME": "a", "XDG_DATA_HOME": "b"}, "a/kvcli", "b/kvcli"),
    ],
)
def test_the_library_has_the_users_config_and_keeps_chats_where_commands_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], config: str, data: str
) -> None:
    home(tmp_path, monkeypatch, **{name: str(tmp_path / value) for name, value in environ.items()})
    write_config(tmp_path / config, CONFIG)
    with kvcli.load() as m:
        assert (m.info.id, m.profile.name) == ("mine", "short")
        assert "mine" in repr(m)
        assert "8,192 tokens" in repr(m)
        chat = m.chat()
        assert chat.send("Hello").stats.new == 3
        name = chat.save()
    assert [entry.id for entry in SavedChats(tmp_path / data).entries()] == [name]


def test_what_commands_read_of_a_project_and_the_environment_counts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home(tmp_path, monkeypatch)
    (tmp_path / ".kvcli.toml").write_text("[profiles.here]\nextends = 'exact'\nsample.top_k = 7\n")
    monkeypatch.setenv("KVCLI_SAMPLE__SEED", "5")
    monkeypatch.setenv("KVCLI_PROFILE", "here")
    with kvcli.load("demo", set={"sample.temperature": 0.5}) as m:
        sample = m.profile.sample
        assert (sample.top_k, sample.seed, sample.temperature) == (7, 5, 0.5)


def test_a_name_of_the_list_is_found_as_commands_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = home(tmp_path, monkeypatch)
    with pytest.raises(BadModel, match="try: kvcli models get smollm2-135m"):
        kvcli.load("smollm2-135m")
    with pytest.raises(BadModel, match="did you mean demo"):
        kvcli.load("dmo")
    file = folder / "data" / "models" / "smollm2-135m.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGUF and no more")
    with pytest.raises(BadModel) as caught:  # found, and looked at
        kvcli.load("smollm2-135m")
    assert str(file) in str(caught.value) or "gguf" in str(caught.value).lower()


def test_an_error_says_all_of_it_where_nobody_prints_its_parts() -> None:
    text = model()
    for typed, meant in [("max_tokens", "max_new_tokens"), ("temp", "temperature"), ("repeat_penalty", "repetition_p")]:
        with pytest.raises(BadConfig, match=f'did you mean "sample.{meant}'):
            text.generate("hi", **{typed: 5})
    error = BadModel("it is gone", lines=["two", "lines"], try_=["this", "that"])
    assert str(error) == "it is gone\n  two\n  lines\n  try: this\n  try: that"
    assert error.args == ("it is gone",)


def test_a_chat_that_nobody_gave_a_place_is_kept_nowhere() -> None:
    chat = kvcli.Chat(model())
    chat.send("hi", max_new_tokens=2)
    with pytest.raises(BadInput) as caught:
        chat.save()
    assert caught.value.code == "no_place"
