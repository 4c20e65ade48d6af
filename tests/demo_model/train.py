"""Train the demo model: one curriculum in phases, resumable at any step, on one or several single-thread processes.

    OMP_NUM_THREADS=1 python -m tests.demo_model.train RUN_FOLDER [--model demo-small]

The same command resumes. For two processes set WORLD_SIZE=2, RANK=0 and 1, MASTER_ADDR and MASTER_PORT, as torchrun
does; on two cores that is faster than one process of two threads.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer

from kvcli.demo import weights_dir
from tests.demo_model import small
from tests.demo_model.network import Network, Score, Shape
from tests.demo_model.optimizer import Optimizer
from tests.demo_model.packing import Batch, make_batch
from tests.demo_model.seeding import pace, seed_circuits
from tests.demo_model.turns import NAME, ORDINAL, SWAPPED, VALUE

Write = Callable[[str], object]


@dataclass(frozen=True)
class Phase:
    """A stretch of steps on one kind of row; the rate runs in a straight line between its two ends."""

    steps: int
    lengths: tuple[int, ...]  # tokens a row; taken in turn, one a step
    tokens: int = 4_096  # tokens a step and process, unless one row is longer
    rate: tuple[float, float] = (1.0, 1.0)  # scale on the optimizer's rates
    near: float = 0.2  # share of facts that are close distractors
    copy_share: float = 0.05  # share of rows that are copying practice

    @staticmethod
    def from_json(fields: dict[str, Any]) -> "Phase":
        kinds: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
        return Phase(**kinds)


# What the shipped run did, on the generator as it stands; the run itself met earlier forms of it (see the card).
CURRICULUM = (
    Phase(steps=120, lengths=(256, 512, 128), near=0.3, copy_share=0.05, rate=(0.5, 0.5)),
    Phase(steps=130, lengths=(512, 1_024), near=0.3, copy_share=0.03, rate=(0.5, 0.45)),
    Phase(steps=370, lengths=(1_024, 512, 2_048), near=0.35, copy_share=0.01, rate=(0.5, 0.45)),
    Phase(steps=80, lengths=(2_048, 1_024, 4_096, 2_048), near=0.4, copy_share=0.0, rate=(0.45, 0.4)),
    Phase(steps=100, lengths=(4_096, 1_024, 2_048, 4_096, 2_048, 8_192), near=0.4, copy_share=0.0, rate=(0.38, 0.277)),
    Phase(steps=130, lengths=(4_096, 128, 2_048, 1_024, 128, 8_192), near=0.4, copy_share=0.0, rate=(0.277, 0.005)),
)


# of the smaller sibling: far more tokens a second, and no skill that would need them all
SMALL_CURRICULUM = (
    Phase(steps=100, lengths=(256, 512, 128), near=0.3, copy_share=0.1, rate=(0.5, 0.5)),
    Phase(steps=250, lengths=(512, 1_024), near=0.3, copy_share=0.03, rate=(0.5, 0.5)),
    Phase(steps=140, lengths=(1_024, 2_048), near=0.35, copy_share=0.01, rate=(0.5, 0.4)),
    Phase(steps=50, lengths=(4_096, 1_024, 2_048, 4_096), near=0.4, copy_share=0.0, rate=(0.4, 0.2)),
    Phase(steps=10, lengths=(4_096, 128, 2_048, 1_024, 8_192), near=0.4, copy_share=0.0, rate=(0.2, 0.172143)),
    Phase(steps=20, lengths=(2_048, 128, 1_024, 4_096), near=0.4, copy_share=0.0, rate=(0.172143, 0.005)),
)


@dataclass(frozen=True)
class Recipe:
    """What a model is made from."""

    shape: Shape
    seed: Callable[[Network, Tokenizer], None]  # writes its first weights
    pace: Callable[[str], float]  # how fast a parameter learns
    curriculum: Sequence[Phase]
    # processors without instructions for bfloat16 are several times as fast in float32
    dtype: torch.dtype = torch.bfloat16


def seed_demo(network: Network, tokenizer: Tokenizer) -> None:
    seed_circuits(network, by=tokenizer.encode(" by").ids[0])


def seed_small(network: Network, tokenizer: Tokenizer) -> None:
    small.seed_circuits(network)


RECIPES = {
    "demo": Recipe(Shape(), seed_demo, pace, CURRICULUM),
    "demo-small": Recipe(small.SHAPE, seed_small, small.pace, SMALL_CURRICULUM, torch.float32),
}


@dataclass(frozen=True)
class Crew:
    """The processes that train together."""

    rank: int = 0
    size: int = 1

    @staticmethod
    def gather() -> "Crew":
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size > 1:
            # hours, so that a process may be stopped for a while and woken up again
            dist.init_process_group("gloo", timeout=timedelta(hours=3))
        return Crew(int(os.environ.get("RANK", "0")), size)

    def average_gradients(self, network: Network) -> None:
        if self.size == 1:
            return
        gradients = [p.grad for p in network.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        flat /= self.size
        start = 0
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()


def phase_at(curriculum: Sequence[Phase], step: int) -> tuple[int, Phase, int] | None:
    """Number of the phase, the phase and the step within it; None after the last."""
    for number, phase in enumerate(curriculum):
        if step < phase.steps:
            return number, phase, step
        step -= phase.steps
    return None


def batch_at(tokenizer: Tokenizer, phase: Phase, step: int, inner: int, rank: int, seed: int) -> Batch:
    """The batch of a step depends on nothing but its number, so a resumed run sees what it would have seen."""
    length = phase.lengths[inner % len(phase.lengths)]
    rng = Random(f"{seed} {step} {rank}")
    n_rows = max(1, phase.tokens // length)
    return make_batch(tokenizer, rng, n_rows, length, phase.near, phase.copy_share)


def rate_at(phase: Phase, inner: int, step: int, warm_up: int = 30) -> float:
    start, end = phase.rate
    return (start + (end - start) * inner / phase.steps) * min(1.0, (step + 1) / warm_up)


@dataclass
class Tally:
    """What happened since the last line of the log."""

    losses: float = 0.0
    n_losses: int = 0
    hits: dict[str, int] | None = None
    seen: dict[str, int] | None = None

    def add(self, score: Score) -> None:
        self.hits, self.seen = self.hits or {}, self.seen or {}
        kinds = (
            ("value", VALUE, ORDINAL),
            ("ordinal", ORDINAL, NAME),
            ("name", NAME, SWAPPED),
            ("swap", SWAPPED, 99.0),
        )
        self.losses += score.loss.item()
        self.n_losses += 1
        for name, low, high in kinds:
            chosen = (score.weights >= low) & (score.weights < high)
            self.hits[name] = self.hits.get(name, 0) + int(score.hits[chosen].sum())
            self.seen[name] = self.seen.get(name, 0) + int(chosen.sum())

    def line(self) -> str:
        hits, seen = self.hits or {}, self.seen or {}
        shares = " ".join(f"{name} {hits[name] / max(1, seen[name]):.4f}" for name in hits)
        return f"loss {self.losses / max(1, self.n_losses):.4f} {shares}"


class Run:
    """A training run in a folder: network, optimizer and the number of steps done."""

    def __init__(self, folder: Path, recipe: Recipe, tokenizer: Tokenizer, crew: Crew, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.folder, self.tokenizer, self.crew, self.seed = folder, tokenizer, crew, seed
        self.network = Network(recipe.shape, recipe.dtype)
        recipe.seed(self.network, tokenizer)
        self.optimizer = Optimizer(self.network, recipe.pace)
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0
        if self.checkpoint.exists():
            self._load(torch.load(self.checkpoint, weights_only=True))

    @property
    def checkpoint(self) -> Path:
        return self.folder / "last.pt"

    def _load(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state(state["optimizer"])
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]

    def save(self) -> None:
        """Write the checkpoint beside the old one, then swap, so that an interruption never leaves half a file."""
        if self.crew.rank:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "shape": asdict(self.network.shape),
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state(),
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }
        fresh = self.checkpoint.with_suffix(".new")
        torch.save(state, fresh)
        fresh.replace(self.checkpoint)

    def advance(self, phase: Phase, inner: int) -> Score:
        """One step."""
        batch = batch_at(self.tokenizer, phase, self.step, inner, self.crew.rank, self.seed)
        score = self.network.score(torch.from_numpy(batch.ids), torch.from_numpy(batch.weights))
        score.loss.backward()  # type: ignore[no-untyped-call]
        self.crew.average_gradients(self.network)
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 5.0)
        self.optimizer.step(rate_at(phase, inner, self.step))
        self.network.zero_grad()
        self.step += 1
        self.tokens += batch.ids.size * self.crew.size
        return score

    def train(self, curriculum: Sequence[Phase], write: Write, report_every: int = 25, save_every: int = 25) -> None:
        """Go on from the step reached to the end of the curriculum."""
        tally = Tally()
        while (now := phase_at(curriculum, self.step)) is not None:
            number, phase, inner = now
            started = time.monotonic()
            tally.add(self.advance(phase, inner))
            self.seconds += time.monotonic() - started
            is_phase_end = inner + 1 == phase.steps
            if self.step % report_every == 0 or is_phase_end:
                write(
                    f"{self.seconds:7.0f} s  phase {number}  step {self.step}  "
                    f"{self.tokens / 1e6:.2f} M tokens  {tally.line()}\n"
                )
                tally = Tally()
            if self.step % save_every == 0 or is_phase_end:
                self.save()


def main(arguments: Sequence[str] | None = None, write: Write = sys.stdout.write) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.demo_model.train", description=__doc__)
    parser.add_argument("folder", type=Path, help="where checkpoints are kept; an interrupted run resumes from it")
    parser.add_argument("--model", choices=RECIPES, default="demo")
    parser.add_argument("--tokenizer", type=Path, default=weights_dir() / "tokenizer.json")
    parser.add_argument("--curriculum", type=Path, help="JSON list of phases, instead of the built-in one")
    parser.add_argument("--threads", type=int, default=1, help="threads of this process")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    recipe = RECIPES[options.model]
    recipe = replace(recipe, shape=replace(recipe.shape, vocabulary=tokenizer.get_vocab_size()))
    curriculum = recipe.curriculum
    if options.curriculum:
        curriculum = [Phase.from_json(phase) for phase in json.loads(options.curriculum.read_text())]
    crew = Crew.gather()
    run = Run(options.folder, recipe, tokenizer, crew)

    def say(line: str) -> None:
        if crew.rank == 0:
            write(line)
            sys.stdout.flush()

    run.train(curriculum, say)


if __name__ == "__main__":
    main()
