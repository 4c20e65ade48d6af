"""The packed tier: attention over what its slots say, ragged heads, holes, repacking, bytes."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from torch import Tensor

from kvcli.assemble import view
from kvcli.engine.drafting.drafter import Drafter
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.errors import BadConfig
from kvcli.kernels.attend.reference import attend as specified
from kvcli.kernels.merge_attention import merge_attention
from kvcli.kv.cache.level import TierLevel
from kvcli.kv.slots import AttentionParams, Slots, alike, compact, nbytes, visible
from kvcli.kv.tiers.quantized import QuantizedTier
from kvcli.methods.drafts.off import Off
from tests import make
from tests.covering import pairs
from tests.exact.table import DRAFTERS, POLICIES, SAMPLERS, lm, prompt

K, G, D, L = 3, 2, 16, 2
H = K * G
GROUP = 5
N = 67
BITS = [(8, 8), (4, 4), (4, 2), (2, 8), (16, 4), (8, 16)]


def made(n: int, seed: int = 0, dtype: torch.dtype = torch.float64, first: int = 0) -> Slots:
    noise = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(K, n, D, generator=noise, dtype=torch.float64).to(dtype) for _ in "kv")
    return Slots(k, v, torch.arange(first, first + n).expand(K, -1))


def tier(bits: tuple[int, int], dtype: torch.dtype = torch.float64, rotate: str = "none") -> QuantizedTier:
    return make.quantized((L, K, D), bits, dtype, group=GROUP, rotate=rotate)


def filled(bits: tuple[int, int], dtype: torch.dtype = torch.float64, rotate: str = "none") -> QuantizedTier:
    kv, s = tier(bits, dtype, rotate), made(N, dtype=dtype)
    for a, b in ((0, 1), (1, 30), (30, N)):
        for layer in range(L):
            kv.take(layer, Slots(s.k[:, a:b], s.v[:, a:b], s.pos[:, a:b]))
    return kv


def rows(n: int, at: int = N) -> tuple[Tensor, Tensor]:
    q = torch.randn(H, n, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return q, torch.arange(at, at + n)


def says(kv: QuantizedTier, q: Tensor, pos: Tensor, params: AttentionParams) -> Tensor:
    """Attention over the slots that the tier shows."""
    s = kv.slots(1)
    mask = visible(s.pos, pos, params.window)
    return specified(q, s.k.double(), s.v.double(), params.scale, params.softcap, mask, s.n_slots)[0]


def read(kv: QuantizedTier, q: Tensor, pos: Tensor, params: AttentionParams) -> Tensor:
    parts = kv.attend(1, q, params, pos)
    return merge_attention(parts) if parts else torch.zeros_like(q)


def uneven(s: Slots) -> Tensor:
    """Head j keeps the slots whose position is a multiple of j + 1."""
    return torch.stack([s.pos[j] % (j + 1) == 0 for j in range(s.pos.shape[0])]) & (s.pos >= 0)


def scattered(s: Slots, share: float, seed: int = 3) -> Tensor:
    return (torch.rand(s.pos.shape, generator=torch.Generator().manual_seed(seed)) < share) & (s.pos >= 0)


def by_position(s: Slots, head: int) -> tuple[list[int], Tensor, Tensor]:
    order = s.pos[head].argsort()[(s.pos[head] < 0).sum() :]
    return s.pos[head][order].tolist(), s.k[head][order], s.v[head][order]


@pytest.mark.parametrize("bits", BITS, ids=str)
@pytest.mark.parametrize("rotate", ["none", "hadamard"])
@pytest.mark.parametrize(
    "params",
    [AttentionParams(0.3), AttentionParams(0.3, 2.0), AttentionParams(0.3, 0.0, 13), AttentionParams(0.3, 0.0, 2)],
    ids=str,
)
@pytest.mark.parametrize("evict", ["nothing", "ragged", "holes"])
def test_reading_is_attention_over_the_slots_it_shows(
    bits: tuple[int, int], rotate: str, params: AttentionParams, evict: str
) -> None:
    kv = filled(bits, rotate=rotate)
    if evict != "nothing":
        s = kv.slots(1)
        kv.evict_except(1, uneven(s) if evict == "ragged" else scattered(s, 0.8))
    for n in (1, 5):
        q, pos = rows(n)
        torch.testing.assert_close(read(kv, q, pos, params), says(kv, q, pos, params))


@pytest.mark.parametrize("bits", BITS, ids=str)
@pytest.mark.parametrize("n", [1, 3, 40])
@pytest.mark.parametrize("evict", [False, True])
def test_the_cpu_reads_the_same_in_sixteen_bits(bits: tuple[int, int], n: int, evict: bool) -> None:
    kv = filled(bits, torch.bfloat16)
    if evict:
        kv.evict_except(1, scattered(kv.slots(1), 0.7))
    q, pos = rows(n)
    q = q.bfloat16()
    for sight in (AttentionParams(0.3), AttentionParams(0.3, 2.0), AttentionParams(0.3, 0.0, 13)):
        want = says(kv, q.double(), pos, sight)
        torch.testing.assert_close(read(kv, q, pos, sight).double(), want, atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize(("bits", "off"), [((16, 16), 1e-12), ((8, 8), 0.02), ((4, 4), 0.25), ((2, 2), 0.9)], ids=str)
def test_the_error_is_that_of_the_rounding(bits: tuple[int, int], off: float) -> None:
    whole, s = make.dense((L, K, D)), made(N)
    whole.append(1, s.k, s.v, int(s.pos[0, 0]))
    q, pos = rows(5)
    want = merge_attention(whole.attend(1, q, AttentionParams(0.3), pos))
    found = (read(filled(bits), q, pos, AttentionParams(0.3)) - want).norm() / want.norm()
    assert off / 50 * (bits != (16, 16)) <= found <= off


def test_rotation_leaves_scores_and_values_as_they_are() -> None:
    s, got = made(N), filled((16, 16), rotate="hadamard").slots(1)
    torch.testing.assert_close(got.k, s.k)
    torch.testing.assert_close(got.v, s.v)


def test_rotation_helps_against_an_outlier() -> None:
    s = made(N)
    s.k[..., 3] *= 40  # one channel of a slot spoils its scale
    off = []
    for rotate in ("none", "hadamard"):
        kv = tier((8, 8), rotate=rotate)
        kv.take(0, s)
        off.append(float((kv.slots(0).k - s.k)[..., :3].norm()))
    assert off[1] < off[0] / 2


@pytest.mark.parametrize("bits", BITS, ids=str)
def test_taking_piece_by_piece_is_taking_at_once(bits: tuple[int, int]) -> None:
    """What a slot becomes depends on the slots of its group alone, not on when they came."""
    once, s = tier(bits), made(N)
    once.take(1, s)
    a, b = once.slots(1), filled(bits).slots(1)
    assert torch.equal(a.k, b.k)
    assert torch.equal(a.v, b.v)
    assert torch.equal(a.pos, b.pos)


@pytest.mark.parametrize("bits", BITS, ids=str)
def test_heads_bring_different_numbers(bits: tuple[int, int]) -> None:
    kv, s = tier(bits), made(N)
    given = compact(s, uneven(s))
    kv.take(0, given)
    kv.take(0, Slots(given.k[:, :0], given.v[:, :0], given.pos[:, :0]))
    alone = tier(bits)
    for j in range(K):
        held = given.pos[j] >= 0
        assert by_position(kv.slots(0), j)[0] == given.pos[j][held].tolist()
    alone.append(0, s.k, s.v, int(s.pos[0, 0]))  # the first head brought all
    torch.testing.assert_close(by_position(kv.slots(0), 0)[1], by_position(alone.slots(0), 0)[1])
    assert kv.n_slots(0) == N
    assert kv.n_slots(1) == 0
    assert kv.attend(1, *rows(1)[:1], AttentionParams(0.3), rows(1)[1]) == []


@pytest.mark.parametrize("bits", BITS, ids=str)
@pytest.mark.parametrize("share", [0.9, 0.5, 0.1, 0.0])
def test_keeping_gives_back_what_fell_out_and_holds_the_rest(bits: tuple[int, int], share: float) -> None:
    kv = filled(bits)
    before = kv.slots(1)
    mask = scattered(before, share)
    fell = kv.evict_except(1, mask)
    after = kv.slots(1)
    for j in range(K):
        pos, k, v = by_position(after, j)
        assert pos == before.pos[j][mask[j]].tolist()
        assert by_position(fell, j)[0] == before.pos[j][~mask[j]].tolist()
        torch.testing.assert_close(by_position(fell, j)[1], before.k[j][~mask[j]])
        assert torch.equal(v, before.v[j][mask[j]]), "values are never rounded twice"
        if bits[0] >= 8:
            assert torch.equal(k, before.k[j][mask[j]]), "keys of whole slots are never rounded twice"
        else:  # again in a new group, by half a step of that
            assert ((k - before.k[j][mask[j]]).abs() <= 8 / ((1 << bits[0]) - 1) / 2).all()
    for head in kv._layers[1]:
        assert int((head.pos < 0).sum()) <= head.length / 2 if bits[0] < 8 else not head.has_holes


def test_a_group_stays_until_less_than_half_of_it_is_left() -> None:
    kv = tier((4, 4))
    s = made(20)
    kv.take(0, s)
    mask = torch.ones(K, 20, dtype=torch.bool)
    mask[:, [0, 3]] = False  # three of five are left: holes
    mask[:, [5, 6, 7]] = False  # two of five: they move
    mask[:, 10:15] = False  # none
    kv.evict_except(0, mask)
    assert kv.slots(0).pos[0].tolist() == [-1, 1, 2, -1, 4, 15, 16, 17, 18, 19, 8, 9]
    kv.take(0, made(3, seed=1, first=20))
    assert kv.slots(0).pos[1].tolist() == [-1, 1, 2, -1, 4, 15, 16, 17, 18, 19, 8, 9, 20, 21, 22]
    assert [head.waits[0].shape[1] for head in kv._layers[0]] == [0] * K
    newest = kv.newest(0, 4)
    assert newest.pos.tolist() == [[19, 20, 21, 22]] * K
    assert kv.newest(0, 99).pos[0].tolist() == [1, 2, 4, 8, 9, *range(15, 23)]


@pytest.mark.parametrize("bits", BITS, ids=str)
def test_cropping_forgets_the_newest_and_more_may_come(bits: tuple[int, int]) -> None:
    kv = filled(bits)
    kv.evict_except(1, uneven(kv.slots(1)))
    kv.crop(33)
    for layer in range(L):
        kv.take(layer, made(4, seed=2, first=33))
        for j in range(K):
            step = j + 1 if layer else 1
            assert by_position(kv.slots(layer), j)[0] == [*range(0, 33, step), 33, 34, 35, 36]
    q, pos = rows(2, 40)
    torch.testing.assert_close(read(kv, q, pos, AttentionParams(0.3)), says(kv, q, pos, AttentionParams(0.3)))
    kv.crop(0)
    assert kv.n_slots(0) == kv.n_slots(1) == 0
    assert sum(nbytes(kv).values()) == 0


def test_keeping_all_changes_nothing() -> None:
    kv = filled((4, 4))
    held = [t.data_ptr() for head in kv._layers[0] for t in head.tensors]
    changes = kv.changes
    assert kv.evict_except(0, kv.slots(0).pos >= 0).n_slots == 0
    kv.crop(N)
    assert [t.data_ptr() for head in kv._layers[0] for t in head.tensors] == held
    assert kv.changes == changes


def test_a_copy_goes_its_own_way_and_still_shares_positions() -> None:
    kv = filled((8, 8))
    other = copy.deepcopy(kv)
    assert nbytes(other) == nbytes(kv)
    other.crop(10)
    assert kv.n_slots(1) == N
    assert len({head.pos.data_ptr() for head in kv._layers[1]}) == 1


@pytest.mark.parametrize("coarse", [False, True])
def test_a_copy_of_what_was_read_reads_its_own_slots(coarse: bool) -> None:
    sight, n = AttentionParams(0.3, is_draft=coarse), 256
    kv = make.quantized((1, K, 64), dtype=torch.float32, halves=True)
    noise = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(heads, n, 64, generator=noise) for heads in (K, K, 2 * K))
    kv.append(0, k, v, 0)
    want = merge_attention(kv.attend(0, q[:, :1], sight, [n]))
    other = copy.deepcopy(kv)
    for head in kv._layers[0]:
        for t in head.tensors:
            t.zero_()  # as memory that was given back may be
    assert torch.equal(merge_attention(other.attend(0, q[:, :1], sight, [n])), want)


@pytest.mark.parametrize(("bits", "most"), [((8, 8), 0.53), ((4, 4), 0.30), ((4, 2), 0.24), ((2, 2), 0.18)], ids=str)
@pytest.mark.parametrize("ragged", [False, True])
def test_bytes_are_a_fraction_of_sixteen_bits(bits: tuple[int, int], most: float, ragged: bool) -> None:
    n, d = 64 * 31, 64
    kv = make.quantized((1, K, d), bits, torch.bfloat16, group=64)
    noise = torch.Generator().manual_seed(0)
    k, v = (torch.randn(K, n, d, generator=noise).bfloat16() for _ in "kv")
    for a in range(0, n, 62):
        kv.append(0, k[:, a : a + 62], v[:, a : a + 62], a)
    mask = torch.zeros(K, n, dtype=torch.bool)
    for j in range(K):
        mask[j, : 64 * 10 * (j + 1)] = True
    if ragged:
        kv.evict_except(0, mask)
    dense = (2 * 2 * d + 4) * int(mask.sum()) if ragged else 2 * 2 * d * K * n  # heads of their own have own positions
    assert sum(nbytes(kv).values()) <= most * dense
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for h in kv._layers[0] for t in h.tensors}
    assert sum(nbytes(kv).values()) == sum(held.values())


def test_what_falls_out_gives_its_bytes_back() -> None:
    for bits in BITS:
        kv = filled(bits)
        full = sum(nbytes(kv).values())
        for layer in range(L):
            s = kv.slots(layer)
            kv.evict_except(layer, s.pos < N // 4)
        assert sum(nbytes(kv).values()) < 0.45 * full, "a quarter of the slots, and room for a group"


def test_numbers_given_are_not_held_on_to() -> None:
    """A view of somebody's chunk would keep all of it alive, and change with it."""
    for bits in (*BITS, (16, 16)):
        kv, s = tier(bits, torch.float32), made(GROUP, dtype=torch.float32)
        kv.take(0, s)
        before = kv.slots(0)
        s.k.zero_()
        s.v.zero_()
        assert torch.equal(kv.slots(0).k, before.k)
        assert torch.equal(kv.slots(0).v, before.v)


@pytest.mark.parametrize(
    ("head_dim", "more", "why"),
    [
        (48, {"rotate": "hadamard"}, r"head sizes of a power of two.*48"),
        (13, {"k_bits": 4}, r"kv\.k_bits = 4 does not fit.*13"),
        (6, {"v_bits": 2}, r"kv\.v_bits = 2 does not fit.*6"),
    ],
)
def test_what_the_layouts_cannot_hold_is_refused(head_dim: int, more: dict[str, object], why: str) -> None:
    with pytest.raises(BadConfig, match=why):
        QuantizedTier(alike(1, 1, head_dim), torch.float32, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("low", "dtype", "policy"),
    pairs(product((((8, 8), "none"), ((4, 2), "none"), ((2, 2), "hadamard")), ("fp32", "fp64"), ("all", "ragged"))),
    ids=str,
)
def test_any_drafter_gives_the_text_of_plain_decoding(
    low: tuple[tuple[int, int], str], dtype: str, policy: str
) -> None:
    bits, rotate = low
    model, (keep, every) = lm("dense", dtype), POLICIES[policy]

    def text(drafter: Drafter) -> list[int]:
        shape = model.shapes, model.dtype
        packed = QuantizedTier(*shape, k_bits=bits[0], v_bits=bits[1], group=GROUP, rotate=rotate)
        kv = make.tiered(model, TierLevel(packed), holds=7, group=GROUP, sinks=2)
        chosen = {"view": view(model, kv, drafter), "policy": keep, "every": every or 16, "chunk": 13}
        session = make.session(model, kv, drafter, SAMPLERS["sampled"], **chosen)
        run_to_end(session.read(prompt()))
        list(iterate_events(session.stream(40)))
        assert packed.n_slots(1) > 20 or policy == "ragged"
        return session.ids

    want = text(Off())
    for name in ("ngram", "fafo", "right", "wrong"):
        assert text(DRAFTERS[name](want)) == want, name


def test_layers_that_hold_the_same_slots_share_their_positions_and_count_them_once() -> None:
    kv, s = filled((4, 4)), made(N)
    first, second = kv.usage()
    assert first.nbytes - second.nbytes == 4 * N
    kv.evict_except(1, s.pos % 2 == 0)
    left = kv.usage()[1].nbytes
    assert kv.slots(0).n_slots == N, "one lost nothing with the other"
    kv.evict_except(0, s.pos % 2 == 0)
    assert kv.usage()[0].nbytes == left, "positions of its own, as the second has"
    assert kv.usage()[1].nbytes < left, "which are those of the first again"
