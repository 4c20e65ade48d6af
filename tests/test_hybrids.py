"""Models some of whose layers keep a state, family by family: texts equal `generate`'s, states those of one long pass.

A tiny model may write the same tokens from a wrong state, so states are compared wherever tokens are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvcli.chat.model import Model
from kvcli.engine.drafting.drafter import Drafter
from kvcli.engine.engine import Engine, run, run_to_end
from kvcli.engine.forward_request import Draft, ForwardRequest, Rows
from kvcli.engine.hf import recurrent_layers
from kvcli.engine.hf.lm import LM
from kvcli.engine.hf.mla import LatentProjection
from kvcli.engine.hf.model_probe import quiet
from kvcli.engine.loading.open_lm import install_kernels, wrap_lm
from kvcli.engine.sequence.commit import commit
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.errors import BadModel
from kvcli.kv.cache.level import TierLevel
from kvcli.kv.recurrent_state import RecurrentStates, StateCheckpoint, StateUpdate, apart_by
from kvcli.kv.slots import KVCache
from kvcli.methods.drafts.ngram import Ngram
from kvcli.methods.drafts.off import Off
from kvcli.methods.policies.streaming import StreamingLLM
from kvcli.prefix_cache.prefix_cache import PrefixCache
from kvcli.settings.profile import Profile
from tests import make, small_tokenizers
from tests.covering import pinned
from tests.hybrids import HYBRIDS, VOCAB, build, prompt

PROMPT, NEW = 29, 28  # tokens
RECURRENT = [name for name in HYBRIDS if not name.startswith("lfm2")]
FAR = 0.05  # relative error of states that a fault must make


@cache
def model(name: str) -> LM:
    """As it is loaded, its check included."""
    with quiet():
        return make.model(name, id=name, verify=True, kernels=True)


@cache
def truth(name: str) -> tuple[int, ...]:
    """The text that transformers writes."""
    with quiet():
        return tuple(
            build(name).generate(torch.tensor([prompt(PROMPT)]), max_new_tokens=NEW, do_sample=False)[0].tolist()
        )


class Partly(Off):
    """Drafts the truth up to a token that it draws by lot, and wrong ones behind: most passes are accepted in part."""

    def __init__(self, text: Sequence[int], seed: int = 0, most: int = 5) -> None:
        self.__dict__.update(text=text, lot=random.Random(seed), most=most, n_partly=0)

    def propose(self, ids: Sequence[int], room: int, context: object = None) -> Draft:
        guesses = list(self.text[len(ids) : len(ids) + min(self.most, room)])
        good = self.lot.randint(0, len(guesses))
        return Draft.chain(guesses[:good] + [(token + 1) % VOCAB for token in guesses[good:]])

    def observe(self, step: Any) -> None:
        self.__dict__["n_partly"] += len(step.path) < step.rows.n_rows


def session(
    name: str, drafter: Drafter | None = None, chunk: int = 64, kv: KVCache | None = None, **told: Any
) -> GenerationSession:
    lm = model(name)
    return make.session(lm, kv, drafter, chunk=chunk, **told)


def written(text: GenerationSession, n: int) -> list[int]:
    """So many tokens more."""
    before = len(text.ids)
    while len(text.ids) < before + n:
        run_to_end(text.step(most=before + n - len(text.ids)))
    return text.ids[before:]


@cache
def long_pass(name: str, ids: tuple[int, ...]) -> StateCheckpoint:
    """What is known behind all but the last of these, read in one pass."""
    one = session(name, chunk=len(ids))
    run_to_end(one.read(ids))
    return one.states.now


def is_right(text: GenerationSession) -> bool:
    name = text.lm.info.id
    theirs = long_pass(name, tuple(text.ids))
    return text.states.now.at == theirs.at == text.committed and apart_by(text.states.now, theirs) < 1e-3


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("chunk", [64, 7, 1])
def test_text_and_states_in_any_chunks(name: str, chunk: int):
    text = session(name, chunk=chunk)
    run_to_end(text.read(prompt(PROMPT)))
    written(text, NEW)
    assert text.ids == list(truth(name))
    assert is_right(text)
    assert len(set(truth(name)[PROMPT:])) > 5  # not one token over and over


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("chunk", [64, 11])
def test_drafts_accepted_in_part_change_nothing(name: str, chunk: int):
    drafter = Partly(truth(name), seed=chunk)
    text = session(name, drafter, chunk)
    run_to_end(text.read(prompt(PROMPT)))
    written(text, NEW)
    assert text.ids == list(truth(name))
    assert is_right(text)
    assert drafter.n_partly > 2


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2", "nemotron_h"])
def test_copies_as_a_chain(name: str):
    text, plain = (
        session(name, drafter) for drafter in (Ngram(adaptive=False, branches=1, min_match=1).drafter(), Off())
    )
    for each in (text, plain):
        run_to_end(each.read([*prompt(PROMPT), *prompt(PROMPT)]))
        written(each, NEW)
    assert text.ids == plain.ids
    assert is_right(text)


def test_long_chunks_read_each_other_expanded_beside_states(monkeypatch: pytest.MonkeyPatch):
    """As without recurrent layers, where that is less work; the KV cache is read as latents, whatever reads it."""
    (pays_from,) = {latent.expand_threshold for latent in model("kimi_linear").latents.values()}
    assert 32 < pays_from < 64
    made, values = list[int](), LatentProjection.values

    def noted(latent: LatentProjection, out: torch.Tensor) -> torch.Tensor:
        made.append(out.shape[1])
        return values(latent, out)

    monkeypatch.setattr(LatentProjection, "values", noted)
    texts = [session("kimi_linear", chunk=chunk) for chunk in (32, 64)]
    for text, want in zip(texts, ([32] * 5, [64, 32]), strict=True):
        made.clear()
        run_to_end(text.read(prompt(161)))
        assert made == want  # by the first of two layers that attend: the last ends where it has its keys
        written(text, NEW)
        assert is_right(text)
    assert texts[0].ids == texts[1].ids


@pytest.mark.parametrize("name", HYBRIDS)
def test_back_to_any_point(name: str):
    ids = list(truth(name))
    text = session(name, Partly(ids), chunk=16)
    run_to_end(text.read(ids[:PROMPT]))
    written(text, NEW)
    for n in (PROMPT + 20, PROMPT + 1, PROMPT - 3, 17, 5):
        kept = text.rewind(n)
        assert kept <= n - 1
        assert text.states.now.at == text.committed == kept
        while run_to_end(text.prefill_chunk(ids[:n])):
            pass
        assert is_right(text)
    written(text, len(ids) - 5)
    assert text.ids == [*ids[:5], *text.ids[5:]]
    assert is_right(text)


@pytest.mark.parametrize("name", pinned(zip(HYBRIDS, strict=True), ("nemotron_h",)))
def test_a_copy_goes_its_own_way(name: str):
    text = session(name, Partly(truth(name)))
    run_to_end(text.read(prompt(PROMPT)))
    written(text, 10)
    other = text.fork()
    other.ids[-1] = (other.ids[-1] + 1) % VOCAB
    written(other, 12)
    written(text, NEW - 10)
    assert text.ids == list(truth(name))
    assert is_right(text)
    assert is_right(other)


@pytest.mark.parametrize("name", HYBRIDS)
def test_texts_side_by_side_know_nothing_of_each_other(name: str):
    """One is read while others are written, with drafts and without: each as alone."""
    ids = list(truth(name))
    texts = [session(name, Partly(ids, seed), chunk=9) for seed in (1, 2)] + [session(name, chunk=13)]
    prompts = [ids[:PROMPT], ids[: PROMPT - 12], prompt(3 * PROMPT, seed=5)]
    alone = session(name)
    run_to_end(alone.read(prompts[2]))
    written(alone, NEW)
    many = Engine()
    for text, told in zip(texts, prompts, strict=True):
        many.add(_read_and_write(text, told))
    while many.step():
        pass
    assert texts[0].ids == ids
    assert texts[2].ids == alone.ids
    assert all(map(is_right, texts))


def _read_and_write(text: GenerationSession, ids: Sequence[int]) -> Any:
    yield from text.read(ids)
    yield from text.stream(NEW)


def packed(lm: LM) -> KVCache:
    """The newest tokens as they are, older ones in 8 bits."""
    below = make.quantized(lm, group=8)
    return make.tiered(lm, TierLevel(below, group=8), holds=16, group=8)


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2", "nemotron_h", "granitemoehybrid", "falcon_h1", "kimi_linear"])
@pytest.mark.parametrize("how", ["window", "int8"])
def test_what_is_stored_otherwise_is_so_with_drafts(name: str, how: str):
    """A policy, or fewer bits, act on keys and values alone: the text is that of the same profile without drafts."""
    texts = []
    for drafter in (Off(), None):
        told = {"policy": StreamingLLM(sinks=2, window=19), "every": 16} if how == "window" else {"every": 16}
        kv = packed(model(name)) if how == "int8" else None
        text = session(name, drafter or Partly(texts[0].ids), 16, kv, **told)
        run_to_end(text.read(prompt(PROMPT)))
        written(text, NEW)
        texts.append(text)
    assert texts[0].ids == texts[1].ids
    assert apart_by(texts[1].states.now, texts[0].states.now) < 1e-3


# ---- faults ----


def _no_replay(trial: recurrent_layers.StateCacheShim, part: recurrent_layers.SequenceSlice, n: int) -> Any:
    return part.folding.rec


def _uncut(folding: StateUpdate, key: Any, dropped: int) -> Any:
    return folding._conv[key][..., -folding._width[key] :].clone()


@pytest.mark.parametrize("name", RECURRENT)
def test_a_state_with_rejected_rows_in_it_shows(name: str, monkeypatch: pytest.MonkeyPatch):
    model(name)  # which is checked as it is built, and refused with the fault in it
    monkeypatch.setattr(recurrent_layers.StateCacheShim, "_again", _no_replay)
    assert _off(name) > FAR


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_history_with_rejected_rows_in_it_shows(name: str, monkeypatch: pytest.MonkeyPatch):
    model(name)
    monkeypatch.setattr(StateUpdate, "_newest", _uncut)
    assert _off(name) > FAR


def _off(name: str) -> float:
    """How wrong states are behind drafts that were accepted in part."""
    right = long_pass(name, truth(name))
    text = session(name, Partly(truth(name)))
    run_to_end(text.read(prompt(PROMPT)))
    while len(text.ids) < len(truth(name)):
        run_to_end(text.step(most=len(truth(name)) - len(text.ids)))
        text.ids = list(truth(name)[: len(text.ids)])  # whatever is drawn from such a state
    return apart_by(text.states.now, right)


@pytest.mark.parametrize(("name", "what"), [("kimi_linear", "conv_state"), ("granitemoehybrid", "recurrent_state")])
@pytest.mark.parametrize("copies", [True, False])
def test_states_are_handed_out_as_copies(name: str, what: str, copies: bool, monkeypatch: pytest.MonkeyPatch):
    """Some layers write a lone row into what they are given: a checkpoint would change with it."""
    text = session(name)
    run_to_end(text.read(prompt(PROMPT)))
    held = [t for _, t in text.states.now.tensors]
    was = [t.clone() for t in held]
    if not copies:
        of = {"conv_state": "conv", "recurrent_state": "rec"}[what]

        def itself(folding: StateUpdate, key: Any) -> Any:
            given = getattr(folding.before, of).get(key)
            if given is not None:
                folding._width[key] = given.shape[-1]
                (folding._conv if of == "conv" else folding.rec)[key] = given
            return given

        monkeypatch.setattr(StateUpdate, what, itself)
    written(text, 3)
    assert all(map(torch.equal, held, was)) is copies


def test_a_pass_that_ends_before_a_recurrent_layer_is_noticed(monkeypatch: pytest.MonkeyPatch):
    assert model("nemotron_h").recurrent_layers.are_last
    monkeypatch.setattr(model("nemotron_h").recurrent_layers, "are_last", False)
    with pytest.raises(AssertionError, match="ended before a recurrent layer"):
        run_to_end(session("nemotron_h").read(prompt(PROMPT)))


@pytest.mark.parametrize("fault", ["_again", "_newest"])
def test_the_check_at_load_notices(fault: str, monkeypatch: pytest.MonkeyPatch):
    of, wrong = {"_again": (recurrent_layers.StateCacheShim, _no_replay), "_newest": (StateUpdate, _uncut)}[fault]
    monkeypatch.setattr(of, fault, wrong)
    with quiet(), pytest.raises(BadModel, match="gives other logits") as told:
        make.model("qwen3_5_text", verify=True)
    assert "recurrent states after them" in " ".join(told.value.lines)


@pytest.mark.parametrize("name", RECURRENT)
def test_no_weight_of_a_linear_layer_is_read_twice(name: str, monkeypatch: pytest.MonkeyPatch):
    lm, calls = model(name), 0
    linear = torch.nn.functional.linear

    def counted(*args: Any, **told: Any) -> Any:
        nonlocal calls
        calls += 1
        return linear(*args, **told)

    from kvcli.kernels import linear as module

    ours = module.linear

    def counted_ours(*args: Any, **told: Any) -> Any:
        nonlocal calls
        calls += 1
        return ours(*args, **told)

    text = session(name, Partly(truth(name), most=5))
    run_to_end(text.read(prompt(PROMPT)))
    again = recurrent_layers.StateCacheShim._again

    def quietly(*args: Any) -> Any:
        before = calls
        found = again(*args)
        assert calls == before
        return found

    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    monkeypatch.setattr(module, "linear", counted_ours)
    monkeypatch.setattr(recurrent_layers.StateCacheShim, "_again", quietly)
    written(text, 20)
    assert calls > 20
    assert text.drafter.n_partly > 1
    assert lm.recurrent_layers


# ---- checkpoints ----


def test_a_turn_back_in_a_long_conversation_reads_little_again():
    """Thirty turns: the last is taken back, then some of those before it."""
    text, ids, ends = session("lfm2", chunk=2048), list[int](), list[int]()
    for turn in range(30):
        question = prompt(190 + turn % 7, seed=turn)
        text.start_answer([*ids, *question], Sampler())
        while run_to_end(text.prefill_chunk([*ids, *question])):
            pass
        written(text, 9)
        ids = list(text.ids)
        ends.append(len(ids))
    assert len(ids) > 6000
    for turn in (28, 27, 26):
        asked = [*ids[: ends[turn]], *prompt(50, seed=99)]
        kept = text.start_answer(asked, Sampler())
        assert ends[turn] - kept <= 64, f"behind turn {turn}"
        while run_to_end(text.prefill_chunk(asked)):
            pass
        assert is_right(text)


def test_checkpoints_are_the_fewer_the_further_back():
    states, far = RecurrentStates(StateCheckpoint(0, {(0, 0): torch.zeros(1)}, {}), most=6), 10_000
    for n in range(1, far):
        states.advance(StateCheckpoint(n, {(0, 0): torch.zeros(1)}, {}))
        if n % 50 == 0:
            states.mark()
    states.advance(StateCheckpoint(far, {(0, 0): torch.zeros(1)}, {}))
    marks = [mark.at for mark in states._marks]
    assert len(marks) == 6
    assert states.reaches(far) == far
    assert states.reaches(far - 60) >= far - 150
    gaps = [far - at for at in marks]
    assert all(later < earlier <= 8 * later for later, earlier in zip(gaps[1:], gaps[:-1], strict=True)), gaps
    assert states.reaches(marks[0] - 1) == 0


def test_a_state_goes_to_disk_and_comes_back():
    name = "qwen3_5_text"
    text = session(name, chunk=16)
    run_to_end(text.read(prompt(PROMPT)))
    written(text, 10)
    other = session(name, chunk=16)
    other.restore(text.state(), text.ids[-1])
    assert other.ids == text.ids
    assert written(other, 20) == written(text, 20)
    assert is_right(other)
    assert other.rewind(PROMPT + 5) == text.rewind(PROMPT + 5) > 0


def test_a_kv_cache_in_the_prefix_cache_is_continued(tmp_path: Path):
    """As a whole, with its checkpoints: blocks of keys and values would be no KV cache of it."""
    made = build("qwen3_next")
    save_file({name: p.clone() for name, p in made.named_parameters()}, tmp_path / "model.safetensors")
    with quiet():
        lm = wrap_lm(made, id="qwen3_next", path=str(tmp_path))
    shelf, ids = PrefixCache(tmp_path / "kept", 1 << 30, lm, min_work=0), prompt(400)
    first, other = (make.session(lm, chunk=64) for _ in range(2))
    run_to_end(first.read(ids))
    assert not shelf.save(first).why_not
    longer = [*ids, *prompt(30, seed=2)]
    other.start_answer(longer, Sampler())
    assert shelf.load_prefix(other, longer) == len(ids) - 1
    while run_to_end(other.prefill_chunk(longer)):
        pass
    assert is_right(other)
    assert other.rewind(200) == 192


@pytest.mark.parametrize("profile", ["fafo", "lookahead"])
def test_a_conversation_is_gone_back_in(profile: str):
    """Asked, asked again otherwise, taken back: each answer is that of a conversation that never was another."""
    with quiet():
        lm = make.model("qwen3_5_text", seed=5, vocab_size=2048)  # whose answers are spelled as they were written
    wanted = Profile.load(profile).replace(sample={"temperature": 0, "max_new_tokens": 12}, spec={"adaptive": False})
    made = Model(lm, small_tokenizers.demo(), wanted)
    assert any("this model has recurrent layers" in said for said in made.cautions)
    chat = made.chat("Be brief.")
    first = chat.send("What is the depth of the well?").text
    chat.send("And of the other one?")
    *_, end = chat.edit("And of the other one, in feet?")
    assert end.turn.stats.cached == 34  # all before what was asked
    third = chat.send("Why?")
    assert third.stats.cached > end.turn.stats.prompt
    chat.undo(2)
    again = chat.send("Where is it?").text
    plain = Model(
        lm, small_tokenizers.demo(), Profile.load("exact").replace(sample={"temperature": 0, "max_new_tokens": 12})
    )
    other = plain.chat("Be brief.")
    assert other.send("What is the depth of the well?").text == first
    assert other.send("Where is it?").text == again
    states = [text.session.states.now for text in (chat.text_session, other.text_session)]
    assert apart_by(*states) < 1e-3


@pytest.mark.parametrize("name", ["qwen3_5_text", "nemotron_h", "lfm2"])
def test_quantized_weights_and_16_bits_load(name: str):
    """The check at load is passed, and what is packed answers from the tape, too."""
    with quiet():
        make.model(name, torch.bfloat16, verify=True)
        lm = make.model(name, id=name, quant="int8")
        install_kernels(lm)
    assert "packed int8" in lm.info.backend
    text = make.session(lm)
    run_to_end(text.read(prompt(PROMPT)))
    plain = written(text, 20)
    guessed = make.session(lm, drafter=Partly([*prompt(PROMPT), *plain]))
    run_to_end(guessed.read(prompt(PROMPT)))
    assert written(guessed, 20) == plain
    assert apart_by(guessed.states.now, text.states.now) < 1e-3


def test_what_cannot_be_served_is_refused_by_name():
    from kvcli.engine.drafting.drafter import ModelPair
    from kvcli.engine.hf.rope import rotaries
    from kvcli.methods.drafts.lookahead import Lookahead
    from kvcli.methods.drafts.self_draft import SelfDraft

    lm = model("lfm2")
    for asked in (
        lambda: session("lfm2", by_layers=True),
        lambda: rotaries(lm),
        lambda: SelfDraft().drafter(pair=ModelPair(lm, lm)),
    ):
        with pytest.raises(BadModel, match="lfm2 has recurrent layers") as told:
            asked()
        assert told.value.code == "keeps_states"
        assert told.value.try_
    text = session("lfm2", Lookahead(adaptive=False).drafter())
    run_to_end(text.read(prompt(PROMPT)))
    with pytest.raises(BadModel, match="one chain only, without lookahead"):
        written(text, NEW)


def test_bytes_reported_are_bytes_held():
    text = session("granitemoehybrid")
    run_to_end(text.read(prompt(PROMPT)))
    now = [*text.states.now.conv.values(), *text.states.now.rec.values()]
    assert sum(use.nbytes for use in text.states.usage()) == sum(t.nbytes for t in now)  # a checkpoint shares it
    written(text, 3)
    assert sum(use.nbytes for use in text.states.usage()) == 2 * sum(t.nbytes for t in now)


@pytest.mark.parametrize("name", HYBRIDS)
def test_fit_knows_the_sizes_before_a_weight_is_read(name: str):
    from kvcli.models.shape import shape_of

    lm = model(name)
    config = {**lm.model.config.to_dict(), "num_hidden_layers": lm.info.layers}
    shape = shape_of(config)
    assert shape.folds.nbytes(lm.dtype.itemsize) == sum(t.nbytes for _, t in lm.recurrent_layers.like.tensors)
    stores = [(of.kv_heads, of.key, of.value) for of in shape.stores if of.numbers]
    assert stores == [(of.n_kv_heads, of.k_dim, of.v_dim) for of in lm.shapes]
    text = session(name, Partly(truth(name)))
    run_to_end(text.read(prompt(PROMPT)))
    (made,) = run(
        [ForwardRequest(lm, Rows.chain(prompt(5), text.committed), text.cache, want=range(5), states=text.states)]
    )
    part: recurrent_layers.SequenceSlice = made.fold.args[0]  # type: ignore[union-attr]
    tape = sum(t.nbytes for gave in (part.tape or {}).values() for t in gave)
    tape += sum(t.nbytes for behind in part.behind.values() for t in behind.args[0])  # type: ignore[attr-defined]
    tape = tape or sum(t.nbytes for t in part.folding._conv.values())  # of convolutions alone, which are not replayed
    told = 5 * lm.dtype.itemsize * shape.folds.layers * shape.folds.taped
    assert (
        tape <= told <= 2.5 * tape * (2 if lm.recurrent_layers.are_by_row else 1)
    )  # it does not know what computes them


def test_layers_that_a_config_lists_and_does_not_count_are_counted(tmp_path: Path):
    """As transformers saves Nemotron-H."""
    from kvcli.models.shape import of_source
    from kvcli.models.source import find

    build("nemotron_h").save_pretrained(tmp_path)
    assert "num_hidden_layers" not in (tmp_path / "config.json").read_text()
    assert of_source(find(str(tmp_path))).layers == model("nemotron_h").info.layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "lfm2"])
def test_what_is_called_bit_exact_has_the_same_bits_in_any_chunks(name: str, dtype: torch.dtype):
    """Of all rows, not of those alone that the trial at load writes."""
    lm, ids, found = make.model(name, dtype, id=name), prompt(150), []
    install_kernels(lm)
    if not lm.is_row_invariant:
        pytest.skip("it is not called so")
    for chunk in (150, 7):
        kv, states, logits = make.dense(lm), RecurrentStates(lm.recurrent_layers.like), []
        for at in range(0, len(ids), chunk):
            rows = Rows.chain(ids[at : at + chunk], at)
            (made,) = run([ForwardRequest(lm, rows, kv, want=range(rows.n_rows), states=states)])
            commit(kv, rows, made, range(rows.n_rows))
            logits.append(made.logits)
        found.append((torch.cat(logits), states.now))
    (mine, known), (other, its) = found
    assert torch.equal(mine, other)
    assert all(torch.equal(t, its.rec[key]) for key, t in known.rec.items())
