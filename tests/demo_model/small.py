"""A smaller sibling of the demo model, which drafts for it: the same recipe with fewer of its circuits.

residual stream, D = 160     0..63    what the token is, its sketch first
                             64       a constant
                             65..152  four slots: the sketches of the 1st .. 4th token before
                             153..159 free

layer 0   head h looks back by exactly h + 1 tokens and writes that token's sketch to slot h.
layer 1   two heads find where the last four tokens stood before and add the code of what came next there.
"""

import torch

from tests.demo_model.network import Network, Shape
from tests.demo_model.seeding import SLOT, Layout, quiet, write_codes, write_match, write_near

SHAPE = Shape(width=160, layers=2, ffn=160)
LAYOUT = Layout(n_code=64, n_slots=4)


def pace(name: str) -> float:
    """How fast a parameter learns: as of the demo model, what is written must not be gone at once."""
    if "embed_tokens" in name:
        return 0.2
    if "layers.0.self_attn" in name:
        return 0.1
    return 0.3 if "layers.1.self_attn" in name else 1.0


@torch.no_grad()
def seed_circuits(network: Network, seed: int = 1) -> None:
    """Write the circuits into both layers."""
    generator = torch.Generator().manual_seed(seed)
    attention = quiet(network)
    write_codes(network.model.embed_tokens.weight, LAYOUT, SLOT, generator)
    write_near(attention[0], LAYOUT)
    write_match(attention[1], LAYOUT, generator)
