"""One process of a split model: runs profiles of the demo, and writes the tokens of each as JSON.

test_ranks.py starts it by torchrun or alone.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from kvcli import assemble
from kvcli.chat.model import load
from kvcli.engine.engine import run_to_end
from kvcli.engine.forward_request import ForwardRequest, Rows
from kvcli.engine.sequence.sampler import Sampler
from kvcli.errors import KvcliError
from kvcli.kv.tiers.dense import Dense
from kvcli.settings.profile import load_profile


def tokens_of(lm, name, ids):
    session = assemble.session(lm, load_profile(name))
    session.start_answer(ids, Sampler())

    def answer():
        while (yield from session.prefill_chunk(ids)):
            pass
        new = []
        while len(new) < 24:
            new += (yield from session.step(most=24 - len(new))).new
        return new

    return run_to_end(answer())


def differing(lm, rank):
    """Return the error of a pass over other tokens on each rank."""
    request = ForwardRequest(lm, Rows.chain([1, 2 + rank], 0), Dense(lm.shapes, lm.dtype, lm.device), want=[1])
    try:
        run_to_end(one(request))
    except KvcliError as error:
        return error.code
    return "none"


def one(request):
    yield request


if __name__ == "__main__":
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    rank = 0
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    lm = load("demo", load_profile("exact").replace(load={"dtype": "fp32"}), cache=folder).lm
    ids = torch.randint(0, lm.vocab, (100,), generator=torch.Generator().manual_seed(1)).tolist() * 3
    found = {name: tokens_of(lm, name, ids) for name in names}
    found |= {"differ": differing(lm, rank), "heads": [lm.shapes[0].n_kv_heads, lm.info.kv_heads]}
    (folder / f"{'split' if 'RANK' in os.environ else 'whole'}-{rank}.json").write_text(json.dumps(found))
