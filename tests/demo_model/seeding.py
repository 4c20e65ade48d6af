"""Write working circuits for copying and swapping into a network's initial weights, so that training starts with them.

Copying is continuing the longest match: find the place where the last eight tokens stood before, say what came next
(induction heads, Olsson and others, arXiv 2209.11895). Left alone, a small network does not find this in millions of
tokens. Four layers can be written down by hand, and everything is trained from the first step on:

    residual stream, D = 320     0..95    what the token is: a random code per token, read by the tied output layer;
                                          the first 22 numbers alone are its sketch
                                 96       a constant
                                 97..272  eight slots of 22: the sketches of the 1st .. 8th token before
                                 273..319 a second code per token, left alone by layers 0 to 2

    layer 0   head h looks back by exactly h + 1 tokens and writes that token's sketch to slot h.
    layer 1   two heads look back by exactly 4 tokens and copy that token's slots 0..3 on to slots 4..7.
    layer 2   two heads compare the last eight tokens (own sketch, slots 0..6) with each place's slots 0..7
              and add the code of the token at the best place: the candidate, which the output layer would say.
    layer 3   one head swaps names. In "replace Varholt by Brunmar" each half of the new name stands three tokens
              behind the same half of the old one, close behind a "by". The head looks for such a place whose slot 2
              is the candidate and says its second code louder; where there is none it rests on the first token.

Looking back by an exact distance needs no content: with query and key fixed, a rotary score is the sum over
frequencies of cos(frequency * (distance - wanted)), which peaks at the wanted distance. It uses the fast rotations.
Matching by content must not care for distance; it uses the rotations that hardly turn over 8k tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.demo_model.network import Attention, Network
from tests.demo_model.tokenizer import BOS

SLOT = 22


@dataclass(frozen=True)
class Layout:
    """What stands where in the residual stream."""

    n_code: int = 96
    n_slots: int = 8

    @property
    def constant(self) -> int:
        return self.n_code

    def slot(self, i: int) -> slice:
        start = self.n_code + 1 + SLOT * i
        return slice(start, start + SLOT)


LAYOUT = Layout()
SECOND = slice(LAYOUT.slot(LAYOUT.n_slots).start, 320)
FIRST_MARK = 319  # set on the first token alone
FAST = 14  # rotations used to tell distance; the others stand nearly still and carry content
# later matches a little more than earlier ones
MATCH = (1.2, 1.15, 1.1, 1.0, 1.0, 0.9, 0.9, 0.8)


def pace(name: str) -> float:
    """How fast a parameter learns compared with the rest: at full speed the circuits are gone within 50 steps."""
    if "embed_tokens" in name:
        return 0.2
    if any(f"layers.{i}.self_attn" in name or f"layers.{i}.mlp" in name for i in (0, 1)):
        return 0.1
    return 0.3 if any(f"layers.{i}.self_attn" in name for i in (2, 3)) else 1.0


def spread_codes(n: int, width: int, generator: torch.Generator) -> Tensor:
    """Random rows of equal length [n, width], entries of about 1: no token is louder than another."""
    rows = torch.randn(n, width, generator=generator)
    codes: Tensor = rows * (width**0.5 / rows.norm(dim=1, keepdim=True))
    return codes


def orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """[rows, columns] with orthonormal columns, or rows where those are fewer."""
    tall = torch.randn(max(rows, columns), min(rows, columns), generator=generator)
    q: Tensor = torch.linalg.qr(tall)[0]
    return q if rows >= columns else q.T


def look_back(attention: Attention, layout: Layout, head: int, distance: int, gain: float) -> None:
    """Make a head attend to the token exactly `distance` before, and its key head offer itself to that."""
    s = attention.shape
    d, half = s.head_width, s.head_width // 2
    frequency = s.rope_theta ** (-torch.arange(half).float() / half)[:FAST]
    q = attention.q_proj.weight[head * d : (head + 1) * d]  # [d, D]
    k = attention.k_proj.weight[head // 2 * d : (head // 2 + 1) * d]
    q.mul_(0.1)
    k.mul_(0.1)
    q[:FAST, layout.constant] = gain * torch.cos(frequency * distance)
    q[half : half + FAST, layout.constant] = -gain * torch.sin(frequency * distance)
    k[:FAST, layout.constant] = gain
    k[half : half + FAST, layout.constant] = 0
    # the slowest rotation takes the peak's height off again, or the small differences in the constant between places
    # (the norm before the layer makes them) would outweigh the difference between one distance and the next
    q[half - 1, layout.constant] = -gain * FAST**0.5
    k[half - 1, layout.constant] = gain * FAST**0.5


@torch.no_grad()
def seed_circuits(network: Network, by: int, seed: int = 1) -> None:
    """Write the circuits into layers 0 to 3; `by` is the token that stands before the new name."""
    s = network.shape
    assert (s.width, s.head_width, s.heads, s.key_heads) == (320, 64, 4, 2), "the circuits are laid out for this shape"
    generator = torch.Generator().manual_seed(seed)
    attention = quiet(network)
    code = network.model.embed_tokens.weight
    write_codes(code, LAYOUT, SLOT - 1, generator)
    write_marks(code, by, generator)
    write_near(attention[0], LAYOUT)
    write_far(attention[1], LAYOUT)
    write_match(attention[2], LAYOUT, generator)
    write_swap(attention[3])


def quiet(network: Network) -> list[Attention]:
    """The attention of each layer, after turning all layers down: what is not written must not drown what is."""
    layers = network.model.blocks()
    for layer in layers:
        layer.self_attn.o_proj.weight.mul_(0.1)
        layer.mlp.down_proj.weight.mul_(0.1)
    return [layer.self_attn for layer in layers]


def write_codes(code: Tensor, layout: Layout, n_sketch: int, generator: torch.Generator) -> None:
    code.mul_(0.2)
    code[:, :n_sketch] = 0.1 * spread_codes(len(code), n_sketch, generator)
    code[:, SLOT : layout.n_code] = 0.1 * spread_codes(len(code), layout.n_code - SLOT, generator)
    code[:, layout.constant] = 0.5


def write_marks(code: Tensor, by: int, generator: torch.Generator) -> None:
    """What the swap needs: second codes, and a place of their own for the two tokens that it looks for."""
    code[:, SECOND] = 0.1 * spread_codes(len(code), SECOND.stop - SECOND.start, generator)
    code[:, [SLOT - 1, FIRST_MARK]] = 0
    code[by, :SLOT] = 0
    code[by, SLOT - 1] = 0.1 * SLOT**0.5
    code[BOS, :SLOT] = 0
    code[BOS, SECOND] = 0
    code[BOS, FIRST_MARK] = 0.5


def write_near(first: Attention, layout: Layout) -> None:
    """Every token learns the sketches of the four before it. Gains undo the norms on the way."""
    d = first.shape.head_width
    for head in range(4):
        look_back(first, layout, head, head + 1, gain=1.3)
        first.v_proj.weight[head // 2 * d : head // 2 * d + SLOT] = 0
        first.v_proj.weight[head // 2 * d : head // 2 * d + SLOT, :SLOT] = torch.eye(SLOT)
        first.o_proj.weight[layout.slot(head), head * d : head * d + SLOT] += 0.083 * torch.eye(SLOT)


def write_far(second: Attention, layout: Layout) -> None:
    """And of the four before those."""
    d = second.shape.head_width
    for key_head, head in ((0, 0), (1, 2)):
        look_back(second, layout, head, 4, gain=1.8)
        second.v_proj.weight[key_head * d : key_head * d + 2 * SLOT] = 0
        for i in range(2):
            rows = slice(key_head * d + i * SLOT, key_head * d + (i + 1) * SLOT)
            second.v_proj.weight[rows, layout.slot(2 * key_head + i)] = torch.eye(SLOT)
            columns = slice(head * d + i * SLOT, head * d + (i + 1) * SLOT)
            second.o_proj.weight[layout.slot(2 * key_head + i + 4), columns] += 0.094 * torch.eye(SLOT)


def still_rows(attention: Attention) -> Tensor:
    """The rows of a head that hardly turn."""
    half = attention.shape.head_width // 2
    return torch.cat((torch.arange(FAST, half), torch.arange(FAST, half) + half))


def write_match(
    third: Attention, layout: Layout, generator: torch.Generator, sharpness: float = 1.5, loudness: float = 0.6
) -> None:
    """Find the place whose tokens before, a slot each, are the last ones, and add the code of the token there."""
    d, still = third.shape.head_width, still_rows(third)
    for key_head, head in ((0, 0), (1, 2)):
        mixer = orthonormal(len(still), layout.n_slots * SLOT, generator)  # [content rows, slots]
        mixer *= sharpness * (layout.n_slots * SLOT / len(still)) ** 0.5
        third.k_proj.weight[key_head * d : (key_head + 1) * d] *= 0.1
        third.q_proj.weight[head * d : (head + 1) * d] *= 0.1
        for i, strength in enumerate(MATCH[: layout.n_slots]):
            part = mixer[:, SLOT * i : SLOT * (i + 1)]
            third.k_proj.weight[key_head * d + still, layout.slot(i)] += part
            source = slice(0, SLOT) if i == 0 else layout.slot(i - 1)
            third.q_proj.weight[head * d + still, source] += strength * part
        carry = orthonormal(layout.n_code, d, generator)  # [code, d]
        third.v_proj.weight[key_head * d : (key_head + 1) * d] = 0
        third.v_proj.weight[key_head * d : (key_head + 1) * d, : layout.n_code] = carry.T
        third.o_proj.weight[: layout.n_code, head * d : (head + 1) * d] += loudness * carry


def write_swap(fourth: Attention, match: float = 10.0, gate: float = 3.3, bar: float = 26.0, out: float = 8.0) -> None:
    """Layer 3, head 0: where slot 2 is the candidate and a "by" stood just before, say the token there instead.

    Scores are about 16 for the match and 16 for the "by", less 20 everywhere but on the first token, which has 0.
    The bar is part of the key, so that it shrinks and grows with the other two under the norm before the layer.
    """
    d, still = fourth.shape.head_width, still_rows(fourth)
    q, k = fourth.q_proj.weight, fourth.k_proj.weight
    q[:d] *= 0.1
    k[:d] *= 0.1
    for i in range(SLOT - 1):
        q[still[i], i] += match**0.5
        k[still[i], LAYOUT.slot(2).start + i] += match**0.5
    q[still[SLOT], LAYOUT.constant] = 4.0
    k[still[SLOT]] = 0
    for i in (0, 1):
        k[still[SLOT], LAYOUT.slot(i).stop - 1] = gate * SLOT**0.5
    k[still[SLOT], LAYOUT.constant] = -bar
    k[still[SLOT], FIRST_MARK] = bar
    n_second = FIRST_MARK - SECOND.start
    fourth.v_proj.weight[:d] = 0
    fourth.v_proj.weight[:n_second, SECOND.start : FIRST_MARK] = torch.eye(n_second)
    fourth.o_proj.weight[SECOND.start : FIRST_MARK, :n_second] += out * torch.eye(n_second)
