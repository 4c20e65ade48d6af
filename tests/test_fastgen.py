"""FastGen at work: what heads choose, keep and free, and that drafting under it changes no token."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcli import assemble
from kvcli.engine.drafting.drafter import Drafter
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.engine.sequence.state import NEWLINE, PUNCT, QUESTION, SPECIAL, SYSTEM, KindSpan
from kvcli.errors import KvcliError
from kvcli.kernels.attend import attend
from kvcli.kernels.attend_invariant import NewRows
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.slots import AttentionParams, Masks, Slots, Usage, attend_new_only, compact
from kvcli.methods.drafts.lookahead import Lookahead
from kvcli.methods.drafts.ngram import Ngram
from kvcli.methods.drafts.off import Off
from kvcli.methods.policies.fastgen.frequency_scores import Scores
from kvcli.methods.policies.fastgen.policy import FastGen
from kvcli.methods.policies.fastgen.recovery import CandidateSets
from kvcli.settings.profile import load_profile
from tests import drafters, families, head_zoo, make
from tests.covering import pairs
from tests.policies import kept, moment

torch.set_num_threads(1)
STOP = 96
# small enough that heads of a tiny model differ in what they choose
SMALL = FastGen(
    recent=7, sinks=2, recovery=0.3, compression_interval=5, probe_rows=20, local_ratio=0.2, frequent_ratio=0.2
)
SETTINGS = {
    "recovery": SMALL,
    "budget": dataclasses.replace(SMALL, keep=0.5),
    "again": dataclasses.replace(SMALL, recovery=0.1, reprofile_interval=10, score_decay=0.9, gqa="min"),
    "paper": FastGen(paper=True, sinks=2, recovery=0.7, compression_interval=3, local_ratio=0.2, frequent_ratio=0.2),
}


@cache
def lm(family: str = "llama", dtype: torch.dtype = torch.float64) -> LM:
    return make.model(family, dtype)


def kinds(vocab: int = 97) -> Tensor:
    table = torch.zeros(vocab, dtype=torch.int8)
    table[:3], table[10:16], table[20] = SPECIAL, PUNCT, NEWLINE
    return table


def session(
    settings: FastGen | None, model: LM, drafter: Drafter | None = None, store: Any = None, **more: Any
) -> GenerationSession:
    kv = store or make.dense(model)
    if settings is not None:
        more |= {"policy": settings, "every": settings.compression_interval}
    return make.session(model, kv, drafter, more.pop("sampler", Sampler()), chunk=23, kinds=kinds(), **more)


def prompt(n: int = 90) -> list[int]:
    phrase = families.prompt(9)
    return (families.prompt(max(0, n - 23), seed=2) + phrase + families.prompt(5, seed=3) + phrase)[:n]


def count(s: GenerationSession) -> list[int]:
    return [int((s.cache.slots(i).pos >= 0).sum()) for i in range(s.lm.n_layers)]


# --- exactness


@cache
def plain(name: str, family: str, dtype: torch.dtype, sampler: str) -> list[int]:
    return said(name, family, dtype, sampler, Off())


SAMPLERS = {"greedy": Sampler(), "sampled": Sampler(temperature=0.8, top_p=0.95, repetition_penalty=1.2, seed=5)}
DRAFTERS: dict[str, Callable[[list[int]], Drafter]] = {
    "ngram": lambda truth: Ngram(adaptive=False, max=7).drafter(),
    "lookahead": lambda truth: Lookahead(adaptive=False, window=3, ngram=4).drafter(),
    **{
        kind.__name__.lower(): (lambda truth, kind=kind: kind(truth, 97, STOP))  # type: ignore[misc]
        for kind in drafters.ADVERSARIES
    },
}


def said(name: str, family: str, dtype: torch.dtype, sampler: str, drafter: Drafter) -> list[int]:
    s = session(SETTINGS[name], lm(family, dtype), drafter, sampler=SAMPLERS[sampler])
    run_to_end(s.read(prompt()))
    for _ in iterate_events(s.stream(40, stop={STOP})):
        assert s.committed == len(s.ids) - 1
    return s.ids


MODELS = [("llama", torch.float32, "greedy"), ("llama", torch.float64, "sampled"), ("gemma2", torch.float64, "greedy")]


@pytest.mark.parametrize(
    ("name", "family", "dtype", "sampler", "drafter"),
    pairs((name, *model, drafter) for name, model, drafter in product(SETTINGS, MODELS, DRAFTERS)),
)
def test_any_drafter_gives_the_text_of_plain_decoding(
    name: str, family: str, dtype: torch.dtype, drafter: str, sampler: str
) -> None:
    want = plain(name, family, dtype, sampler)
    assert said(name, family, dtype, sampler, DRAFTERS[drafter](want)) == want


@pytest.mark.parametrize("name", SETTINGS)
def test_the_table_above_does_evict_and_heads_do_differ(name: str) -> None:
    s = session(SETTINGS[name], lm())
    run_to_end(s.read(prompt()))
    assert sum(count(s)) < 0.9 * s.committed * 2 * 3
    policy = s.policy_record.state
    assert len({choice for layer in policy.chosen().values() for choice in layer}) > 1


@pytest.mark.parametrize("whole", [{"recovery": 1.0}, {"keep": 1.0}, {"recovery": 1.0, "reprofile_interval": 20}])
def test_asked_for_everything_it_is_the_full_cache_bit_by_bit(whole: dict[str, Any]) -> None:
    model = lm("llama", torch.float32)
    full, s = session(None, model), session(dataclasses.replace(SMALL, **whole), model)
    for each in (full, s):
        run_to_end(each.read(prompt()))
        list(iterate_events(each.stream(256)))
    assert s.ids == full.ids
    for i in range(model.n_layers):
        assert torch.equal(s.cache.slots(i).k, full.cache.slots(i).k)


# --- what is stored


class Masked:
    """Forgets nothing and hides what was let go: the reference."""

    def __init__(self, model: LM) -> None:
        self.dtype, self.changes = model.dtype, 0
        empty = torch.zeros(model.n_kv_heads, 0, model.head_dim, dtype=model.dtype)
        self.all = [Slots(empty, empty, empty[..., 0].long()) for _ in range(model.n_layers)]
        self.shown = [empty[..., 0].bool() for _ in range(model.n_layers)]

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        s, mask = self.all[layer], self.shown[layer].unsqueeze(1).expand(-1, q.shape[1], -1)
        if params.window is not None:
            mask = mask & (s.pos.unsqueeze(1) > (torch.tensor(pos) - params.window).view(1, -1, 1))
        part = attend(q, s.k, s.v, params.scale, softcap=params.softcap, mask=mask)
        return [*([part] if s.n_slots else []), *attend_new_only(q, params, own)]

    def append(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        s, wide = self.all[layer], torch.arange(start, start + k.shape[1]).expand(k.shape[0], -1)
        self.all[layer] = Slots(torch.cat((s.k, k), 1), torch.cat((s.v, v), 1), torch.cat((s.pos, wide), 1))
        self.shown[layer] = torch.cat((self.shown[layer], torch.ones_like(wide, dtype=torch.bool)), 1)

    def slots(self, layer: int) -> Slots:
        return compact(self.all[layer], self.shown[layer])

    def reaches(self, n: int) -> bool:
        return True

    def compress(self, masks: Masks = (), end: int = 0, layers: Iterable[int] | None = None) -> bool:
        for layer, (s, mask) in enumerate(zip(self.all, masks, strict=bool(masks))):
            shown = self.slots(layer)
            if mask is None:
                continue
            for j in range(mask.shape[0]):
                stay = set(shown.pos[j][mask[j]].tolist())
                self.shown[layer][j] = torch.tensor([int(p) in stay for p in s.pos[j]])
        return any(not bool(shown.all()) for shown in self.shown)

    def reserve(self, n: int) -> None:
        return

    def crop(self, n: int) -> None:
        assert n == 0

    def usage(self) -> list[Usage]:
        return []


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_freed_is_what_a_mask_would_hide(name: str, family: str) -> None:
    model = lm(family)
    freed, masked = session(SETTINGS[name], model), session(SETTINGS[name], model, store=Masked(model))
    for each in (freed, masked):
        run_to_end(each.read(prompt()))
    for _ in range(30):
        torch.testing.assert_close(run_to_end(freed.step()).logits, run_to_end(masked.step()).logits, rtol=0, atol=1e-9)
        assert freed.ids == masked.ids
        for i in range(model.n_layers):
            a, b = freed.cache.slots(i).pos, masked.cache.slots(i).pos
            assert [sorted(set(h.tolist()) - {-1}) for h in a] == [sorted(set(h.tolist()) - {-1}) for h in b]


def test_positions_are_those_of_the_text_however_little_is_stored() -> None:
    s = session(SETTINGS["budget"], lm())
    run_to_end(s.read(prompt()))
    for step in iterate_events(s.stream(20)):
        assert list(step.rows.pos) == [len(s.ids) - 2]
        for i in range(s.lm.n_layers):
            assert int(s.cache.slots(i).pos.max()) == s.committed - 1
    assert len(s.ids) == len(prompt()) + 20


def test_what_is_kept_is_described_for_each_way_to_choose_it() -> None:
    ways: list[dict[str, Any]] = [{"keep": 0.5}, {"keep": 0.0, "recovery": 0.9}, {"keep": 0.0, "recovery": "auto"}]
    assert len({FastGen(**way).footprint(0).says for way in ways}) == len(ways)


@pytest.mark.parametrize("keep", [0.2, 0.35, 0.5, 0.75, 0.9])
def test_a_budget_is_what_is_kept(keep: float) -> None:
    s = session(dataclasses.replace(SMALL, keep=keep, recent=3), lm())
    run_to_end(s.read(prompt(200)))
    heads = s.lm.n_layers * s.lm.n_kv_heads
    kept = sum(count(s)) / heads / s.committed
    step = 0.6 / heads  # the widest gap between candidates, as a share of all slots
    assert keep - step < kept <= keep


def test_more_recovery_and_more_budget_keep_more() -> None:
    for key, values in {"recovery": (0.3, 0.6, 0.8, 0.95, 1.0), "keep": (0.2, 0.4, 0.6, 0.8, 1.0)}.items():
        kept = []
        for value in values:
            s = session(dataclasses.replace(SMALL, **{key: value}), lm())
            run_to_end(s.read(prompt()))
            kept.append(sum(count(s)))
        assert kept == sorted(kept)
        assert kept[0] < kept[-1] == s.committed * 2 * 3


def test_sliding_layers_are_left_whole() -> None:
    s = session(dataclasses.replace(SMALL, recovery=0.0), lm("gemma2"))
    run_to_end(s.read(prompt()))
    list(iterate_events(s.stream(10)))
    assert [c == 2 * s.committed for c in count(s)] == [True, False, True]


def test_nothing_is_evicted_before_the_prompt_was_read() -> None:
    s = session(SMALL, lm())
    reading = iterate_events(s.read(prompt()))
    assert next(reading) == 23
    assert count(s) == [46] * 3


def test_special_tokens_system_text_and_the_newest_stay_in_every_head() -> None:
    s = session(dataclasses.replace(SMALL, recovery=0.0), lm())
    ids = [1, *prompt()]
    s.kind_spans = [KindSpan(30, 40, SYSTEM)]
    run_to_end(s.read([*ids[:50], 2, *ids[50:]]))
    list(iterate_events(s.stream(12)))
    policy = s.policy_record.state
    assert policy.chosen() == {i: ["special"] * 2 for i in range(3)}
    for i in range(3):
        for pos in s.cache.slots(i).pos:
            held = set(pos[pos >= 0].tolist())
            assert held >= {0, 1, 50, *range(30, 40), *range(s.committed - 7, s.committed)}
            assert len(held) <= 2 + 1 + 10 + 7 + 2 * 5


@pytest.mark.parametrize("asked", [{}, {"protect_question": True}, {"protect_question": True, "paper": True}])
def test_the_last_question_stays_in_every_head_where_asked_and_an_older_one_does_not(asked: dict[str, Any]) -> None:
    own = FastGen(**{"recent": 0, "sinks": 2, "recovery": 0.0, "compression_interval": 5} | asked)
    s = session(own, lm())
    is_kept = own.protect_question and not own.paper
    assert (QUESTION in s.marks) == is_kept
    for start in (20, 120):
        s.kind_spans = [KindSpan(start, start + 9, QUESTION)]
        run_to_end(s.read(prompt()))
        list(iterate_events(s.stream(12)))
        for pos in (pos for layer in range(s.lm.n_layers) for pos in s.cache.slots(layer).pos):
            assert ({*range(start, start + 9)} <= set(pos.tolist())) == is_kept
    assert not {*range(20, 29)} <= set(s.cache.slots(0).pos[0].tolist()), "it is no longer the last"


def test_punctuation_of_the_answer_stays_where_heads_keep_punctuation() -> None:
    own = dataclasses.replace(SMALL, policies=("punct",), recovery=0.0, punct_cap=1.0)
    s = session(own, lm())
    run_to_end(s.read(prompt()))
    run_to_end(s.read([11, 50, 51, 20, *[52 + i % 5 for i in range(40)]]))  # a later prompt of the same text
    list(iterate_events(s.stream(10)))
    at = [i for i, token in enumerate(s.ids[: s.committed]) if int(kinds()[token]) in (PUNCT, NEWLINE)]
    assert len(at) > 3
    assert s.cache.slots(0).n_slots < s.committed, "nothing was forgotten"
    for pos in s.cache.slots(0).pos:
        assert set(pos.tolist()) >= set(at)


# --- turns


def test_a_long_later_prompt_is_measured_and_a_short_one_is_not() -> None:
    s = session(SMALL, lm())
    run_to_end(s.read(prompt()))
    policy = s.policy_record.state
    first = policy.chosen()
    list(iterate_events(s.stream(6)))
    run_to_end(s.read(families.prompt(5, seed=8)))
    assert policy.chosen() == first
    assert [layer.measured for layer in policy._layers.values()] == [89] * 3
    run_to_end(s.read(families.prompt(80, seed=8)))
    assert [layer.measured for layer in policy._layers.values()] == [s.committed] * 3


def test_an_undo_reads_anew_and_answers_alike_and_a_fork_goes_its_own_way() -> None:
    s = session(SETTINGS["again"], lm())
    run_to_end(s.read(prompt()))
    other = s.fork()
    first = [t for step in iterate_events(s.stream(20)) for t in step.new]
    assert [t for step in iterate_events(other.stream(20)) for t in step.new] == first
    assert s.resume(prompt()) == 0
    run_to_end(s.read(prompt()))
    assert [t for step in iterate_events(s.stream(20)) for t in step.new] == first


@pytest.mark.parametrize("n", [1, 2, 5, 40])
@pytest.mark.parametrize("name", SETTINGS)
def test_short_prompts_answer(name: str, n: int) -> None:
    s = session(SETTINGS[name], lm())
    run_to_end(s.read(prompt(n)))
    assert len([t for step in iterate_events(s.stream(25)) for t in step.new]) == 25


# --- while answering


def test_scores_are_what_accepted_rows_looked_at() -> None:
    noise = torch.Generator().manual_seed(2)
    n, d, guard, decay = 60, 6, 4, 0.9
    k = torch.randn(2, n, d, generator=noise, dtype=torch.float64)
    q = torch.randn(4, n, d, generator=noise, dtype=torch.float64)
    pos = torch.arange(n).expand(2, -1)

    def attention(upto: int, rows: range) -> Tensor:
        """[K, r, n] by the map, mean over the group; only slots of the first `upto` tokens."""
        score = q[:, list(rows)] @ k[:, :upto].repeat_interleave(2, 0).transpose(1, 2)
        far = torch.tensor([[r - j for j in range(upto)] for r in rows])
        p = score.masked_fill(far < 0, -torch.inf).softmax(-1) * (far >= guard)
        return torch.nn.functional.pad(p.view(2, 2, len(rows), upto).mean(1), (0, n - upto))

    wanted, first = torch.tensor([True, False]), range(30, 40)
    sets = CandidateSets.of(FastGen(recent=guard), torch.zeros(40, dtype=torch.int8))
    scores = Scores(attention(40, first).sum(1)[:, :40], torch.tensor(first), 40, sets, FastGen(score_decay=decay))
    s = Slots(k[:, :40], k[:, :40], pos[:, :40])
    scores.bind(s, wanted, pos[:, :40] % 2 == 0)
    want = attention(40, first).sum(1)[0]
    want[1::2] = 0.0  # these were not held, so what they had is forgotten
    seen = torch.tensor([float(sum(r >= j + guard for r in first)) for j in range(n)]).double()
    for upto in (50, 60):
        fresh = range(upto - 10, upto)
        weight = torch.tensor([decay ** (upto - 1 - r) for r in fresh], dtype=torch.float64)
        want = want * decay**10 + (attention(upto, fresh)[0] * weight.unsqueeze(1)).sum(0)
        at_least = torch.tensor([[r >= j + guard for j in range(n)] for r in fresh])
        seen = seen * decay**10 + (at_least * weight.unsqueeze(1)).sum(0)
        now = Slots(k[:, :upto], k[:, :upto], pos[:, :upto])
        at = moment(now, q[:, list(fresh)], q_pos=torch.tensor(fresh), scale=1.0)
        got = scores.add(now, at, wanted)
        torch.testing.assert_close(got[0], (want / seen.clamp(min=1))[:upto], rtol=1e-5, atol=1e-7)
        assert not bool(got[1].any())
        scores.bind(now, wanted, torch.ones_like(now.pos, dtype=torch.bool))
    assert scores.nbytes == 60 * (4 + 4)


def test_frequent_tokens_grow_with_the_text_and_what_is_no_longer_looked_at_goes() -> None:
    own = FastGen(
        policies=("frequent",),
        recovery=0.0,
        sinks=0,
        recent=0,
        compression_interval=10,
        frequent_ratio=0.1,
        local_ratio=0.0,
    )
    memory = own.requirements(lm()).policy_state()
    before, after = [3, 17, 40, 41], [5, 60, 61, 70, 90, 91, 92, 93, 94, 95]

    def rows(targets: list[int], n: int, at: range) -> tuple[Tensor, Slots]:
        p = torch.zeros(1, len(at), n, dtype=torch.float64)
        for i, r in enumerate(at):
            seen = [t for t in targets if t <= r] or [0]
            p[0, i, seen] = 1 / len(seen)
        k = torch.eye(n, dtype=torch.float64).expand(1, -1, -1)
        return p.clamp(min=1e-30).log(), Slots(k, k, torch.arange(n).view(1, -1))

    probes = own.probes(100)
    q, s = rows(before, 100, range(100))
    at = moment(s, q[:, probes], q_pos=torch.tensor(probes), scale=1.0, phase="read", policy_state=memory)
    first = kept(own, s, at)[0]
    assert int(first.sum()) == 10
    assert bool(first[before].all())
    for n in range(110, 1200, 10):
        q, s = rows(after, n, range(n - 10, n))
        held = Slots(s.k, s.v, s.pos)
        at = moment(held, q, q_pos=torch.arange(n - 10, n), scale=1.0, n_prompt=100, policy_state=memory)
        mask = kept(own, held, at)[0]
        assert int(mask.sum()) == round(0.1 * n) + 10, "a batch of the newest is not judged yet"
    assert bool(mask[after].all())


def test_heads_choose_again_when_they_look_elsewhere() -> None:
    n = 400
    names = list(head_zoo.NAMES)
    maps = head_zoo.maps(n)
    q, s = head_zoo.layer(maps[[names.index("sink")]])
    later, _ = head_zoo.layer(maps[[names.index("uniform")]])
    for every, want in ((50, "full"), (0, "special")):
        own = FastGen(recovery=0.9, recent=16, reprofile_interval=every, probe_rows=40)
        wants = own.requirements(lm())
        memory = wants.policy_state()
        probes = [p for p in own.probes(n - 60) if p < n - 60]
        short = Slots(s.k[:, : n - 60], s.v[:, : n - 60], s.pos[:, : n - 60])
        at = moment(short, q[:, probes], q_pos=torch.tensor(probes), scale=1.0, phase="read", policy_state=memory)
        kept(own, short, at)
        assert memory.chosen() == {0: ["special"]}
        rows = range(n - wants.recent_queries, n)
        at = moment(s, later[:, list(rows)], q_pos=torch.tensor(rows), scale=1.0, n_prompt=n - 60, policy_state=memory)
        kept(own, s, at)
        assert memory.chosen() == {0: [want]}


# --- settings


def heads_file(folder: Path, rows: list[list[float]], name: str = "heads.json") -> str:
    text = json.dumps({"heads": rows}) if name.endswith("json") else "\n".join("\t".join(map(str, r)) for r in rows)
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize("name", ["heads.json", "full_attention_heads.tsv"])
@pytest.mark.parametrize("keep", [0.0, 0.4])
def test_heads_of_a_head_map_keep_everything(tmp_path: Path, name: str, keep: float) -> None:
    rows = [[0.0, 0.9], [0.4, 0.5], [0.1, 0.2]]
    own = dataclasses.replace(SMALL, headmap=heads_file(tmp_path, rows, name), recovery=0.0, keep=keep)
    s = session(own, lm())
    run_to_end(s.read(prompt()))
    policy = s.policy_record.state
    full = {(i, j) for i, layer in policy.chosen().items() for j, choice in enumerate(layer) if choice == "full"}
    assert full >= {(0, 1), (1, 1)}
    assert keep > 0 or full == {(0, 1), (1, 1)}


def test_a_head_map_of_another_model_is_refused(tmp_path: Path) -> None:
    own = dataclasses.replace(SMALL, headmap=heads_file(tmp_path, [[0.0, 0.9]]))
    with pytest.raises(KvcliError, match="another model"):
        own.requirements(lm())


def test_the_published_method_has_no_guard_to_set() -> None:
    for wrong in ({"recent": 64}, {"criterion": "p05"}, {"policies": ["special"]}, {"probe_rows": 9}):
        with pytest.raises(KvcliError) as refused:
            load_profile("exact").replace(exactness="approx", policy={"name": "fastgen", "paper": True, **wrong})
        assert "paper = true sets" in "\n".join(refused.value.lines)
    assert FastGen(paper=True, recent=0, criterion="mean", crossfit=False).guarded == 0


@pytest.mark.parametrize("name", ["fastgen", "fastgen-paper"])
def test_the_shipped_profiles_answer(name: str) -> None:
    profile = load_profile(name)
    assert profile.exactness == "approx"
    s = assemble.session(lm("llama", torch.float32), profile)
    run_to_end(s.read(prompt()))
    list(iterate_events(s.stream(5)))
    assert profile.policy.footprint(1000).slots == (500 if name == "fastgen" else 1000)
    assert profile.policy.describe_result(s.policy_record.state) == "", "nothing could be measured"
    run_to_end(s.read(prompt() * 3))
    said = profile.policy.describe_result(s.policy_record.state)
    assert said == ("without a head map" if name == "fastgen" else "")


@pytest.mark.parametrize("recovery", ["auto", 0.3])
def test_a_prompt_inside_the_guard_is_no_evidence_and_its_answer_stays_whole(recovery: Any) -> None:
    own = dataclasses.replace(SMALL, recent=24, recovery=recovery, kl_max=1e9, replay=8)
    s = session(own, lm())
    run_to_end(s.read(prompt(20)))
    policy = s.policy_record.state
    list(iterate_events(s.stream(60)))
    assert policy.chosen() == {}
    assert count(s) == [2 * s.committed] * 3, "nobody was judged, so nobody forgets"
    run_to_end(s.read(families.prompt(40, seed=8)))
    assert set(policy.chosen()) == {0, 1, 2}, "a prompt behind more than the guard is measured"
    assert sum(count(s)) < 6 * s.committed


def test_what_no_head_may_forget_is_no_evidence() -> None:
    measured = []
    for end in (30, 36):  # the guard begins at 36 of 60
        s = session(dataclasses.replace(SMALL, recent=24), lm())
        s.kind_spans = [KindSpan(0, end, SYSTEM)]
        run_to_end(s.read([*families.prompt(60), 5]))
        measured.append(set(s.policy_record.state.chosen()))
    assert measured == [{0, 1, 2}, set()]
