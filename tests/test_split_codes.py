"""Codes of 8 bits in two halves of four: drafts read the upper one, everything else both (QuantSpec)."""

from __future__ import annotations

import pytest
import torch

from kvcli.assemble import session
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.stats import Stats
from kvcli.errors import BadConfig
from kvcli.kernels.attend import attend
from kvcli.kernels.quantize_kv import pack_keys, pack_values, unpack_keys, unpack_values
from kvcli.kv.slots import AttentionParams, Slots, run_of
from kvcli.kv.snapshot import SnapshotReader
from kvcli.kv.tiers.quantized import QuantizedTier
from kvcli.settings.profile import load_profile
from tests import families, make
from tests.test_draft_and_full import lm

K, S, D = 3, 150, 32


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    noise = torch.Generator().manual_seed(0)
    return (torch.randn(*shape, generator=noise) * 3 + 5 * torch.randn(shape[-1], generator=noise)).to(dtype)


def filled(dtype: torch.dtype = torch.float32, rotate: str = "none") -> QuantizedTier:
    tier = make.quantized((2, K, D), dtype=dtype, group=16, rotate=rotate, halves=True)
    k, v = numbers(K, S, D, dtype=dtype), numbers(K, S, D, dtype=dtype).flip(1)
    for at in range(0, S, 50):
        tier.append(0, k[:, at : at + 50], v[:, at : at + 50], at)
    return tier


def test_both_halves_say_what_eight_bits_can_and_the_upper_one_what_four_can() -> None:
    x = numbers(S // 10 * 10, D)
    for packed, unpack in (
        (pack_keys(x, 4, 10, halves=True), unpack_keys),
        (pack_values(x, 4, 16, halves=True), lambda r, like: unpack_values(r, like, len(x))),
    ):
        assert packed.scale is not None
        assert packed.codes.dtype == torch.uint8
        assert packed.fine is not None
        assert packed.codes.shape == packed.fine.shape == (len(x), D // 2)
        widest = float(packed.scale.max())
        assert (unpack(packed, x) - x).abs().max() <= widest * (1 / 32 + 0.01)
        assert widest / 8 < (unpack(packed.coarse, x) - x).abs().max() <= widest * (1 / 2 + 0.01)


def test_a_group_of_equal_numbers_and_one_far_from_zero_are_met() -> None:
    x = torch.cat([torch.full((8, D), 7.25), 4000 + torch.arange(8 * D).view(8, D) / D])
    got = unpack_keys(pack_keys(x, 4, 8, halves=True), x)
    assert (got - x).abs().max() <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("rotate", ["none", "hadamard"])
def test_rows_read_what_the_halves_say(dtype: torch.dtype, window: int | None, rotate: str) -> None:
    tier, q, pos = filled(dtype, rotate), numbers(2 * K, 5, D, dtype=dtype) / 8, range(S, S + 5)
    sight = AttentionParams(D**-0.5, window=window)
    s = tier.slots(0)
    mask = None if window is None else s.pos.unsqueeze(1) > torch.tensor([p - window for p in pos]).view(1, -1, 1)
    want = attend(q.double(), s.k.double(), s.v.double(), sight.scale, mask=mask)
    (got,) = tier.attend(0, q, sight, pos)
    torch.testing.assert_close(
        got.out.double(), want.out.double(), atol=0.15 if dtype.itemsize < 4 else 1e-4, rtol=0.05
    )
    (coarse,) = tier.attend(0, q, AttentionParams(D**-0.5, window=window, is_draft=True), pos)
    assert (coarse.out - got.out).abs().max() > 1e-2


def test_a_row_alone_has_the_bits_of_one_in_a_batch() -> None:
    tier, q = filled(torch.bfloat16), numbers(2 * K, 5, D, dtype=torch.bfloat16) / 8
    for is_draft in (False, True):
        sight = AttentionParams(D**-0.5, is_draft=is_draft)
        (every,) = tier.attend(0, q, sight, range(S, S + 5))
        (one,) = tier.attend(0, q[:, 3:4], sight, [S + 3])
        assert torch.equal(one.out, every.out[:, 3:4])
    assert not tier.batch_variant_reason


def test_what_stays_of_a_broken_group_keeps_its_halves() -> None:
    tier, other = filled(), filled()
    mask = torch.rand(K, S, generator=torch.Generator().manual_seed(1)) > 0.5  # some groups stay, others are made anew
    before = tier.slots(0)
    tier.evict_except(0, mask)
    found = tier.slots(0)
    for j in range(K):
        held = found.pos[j] >= 0
        order = found.pos[j, held].long()
        assert sorted(order.tolist()) == before.pos[j][mask[j]].tolist()
        torch.testing.assert_close(found.k[j, held], before.k[j, order], atol=0.2, rtol=0)
        assert torch.equal(found.v[j, held], before.v[j, order])
    other.restore(SnapshotReader(tier.snapshot(), S))
    assert torch.equal(other.slots(0).k, found.k)
    at = torch.tensor([[0, 7, -1]]).expand(K, -1)
    assert torch.equal(other.gather(0, at).k[:, :2], other.slots(0).k[:, [0, 7]])


def test_a_slot_takes_little_more_than_half() -> None:
    tier = make.quantized((1, 4, 64), dtype=torch.bfloat16, halves=True)
    tier.take(0, Slots(numbers(4, 1024, 64), numbers(4, 1024, 64), run_of(0, 1024, 4, torch.device("cpu"))))
    assert sum(use.nbytes for use in tier.usage()) <= 0.55 * (2 * 4 * 64 * 2 * 1024)


@pytest.mark.parametrize("sampling", ["sample.temperature=0", "sample.temperature=0.9"])
def test_drafts_over_the_upper_half_change_nothing(sampling: str) -> None:
    sets = ["kv.split_codes=true", "kv.residual=20", "kv.group=16", "prefill.chunk=37", sampling]
    mine = ["spec.method=self", "spec.adaptive=false", "spec.copies=false", "spec.branches=1"]
    texts, counted = [], []
    for drafting in (["spec.method=off"], mine):
        found, stats = session(lm(), load_profile("balanced", sets=[*sets, *drafting])), Stats()
        run_to_end(found.read(families.prompt(150)))
        for step in iterate_events(found.stream(40)):
            stats.add_step(step)
        texts.append(found.ids)
        counted.append(stats)
    assert texts[0] == texts[1]
    assert 0 < counted[1].acceptance_rate < 1


def test_halves_need_eight_bits() -> None:
    with pytest.raises(BadConfig) as refused:
        load_profile("lean", sets=["kv.split_codes=true"])
    assert "has no effect while not both are 8" in "".join(refused.value.lines)
