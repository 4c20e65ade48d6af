"""Trees of a second model's drafts: which passes they take, and what is verified of them."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from itertools import product
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from kvcli.drafts.sources.model_draft import ModelDraft
from kvcli.drafts.sources.prompt_lookup import PromptLookup
from kvcli.drafts.tree.growth import Growth, TreeShape, sequoia
from kvcli.drafts.tree.tree import grow
from kvcli.engine.forward_request import NeededTensors

TARGET = SimpleNamespace(vocab=10**6, clock=lambda: 0.0)


class Says:
    """A draft model that finds each token followed by the same three, and notes the rows of its passes."""

    name, limit, max_depth, n_uncovered, needs = "says", 1 << 20, 1 << 20, 1, NeededTensors()

    def __init__(self, leads: Sequence[float] = (2.0, 1.0)) -> None:
        self.leads = leads
        self.text: list[int] = []
        self.passes: list[tuple[list[int], list[int]]] = []
        self.paths: list[tuple[int, ...]] = []  # of all rows, from the text on

    @property
    def length(self) -> int:
        return len(self.text)

    def start(self, ids: Sequence[int]) -> None:
        self.text = list(ids)

    def catch_up(self, want: int = 1, most: float = 0) -> Generator[None, None, list[list[float]]]:
        yield
        return [self.said(self.text[-1])]

    def continue_from(self, ids: Sequence[int], parents: Sequence[int]) -> Generator[None, None, list[list[float]]]:
        for token, parent in zip(ids, parents, strict=True):
            assert -1 <= parent < len(self.paths)
            self.paths.append((*(self.paths[parent] if parent >= 0 else ()), token))
        self.passes.append((list(ids), list(parents)))
        yield
        return [self.said(token) for token in ids]

    def said(self, token: int) -> list[float]:
        first = 3 * token % 9001
        return [first + 1, first + 2, first + 3, sum(self.leads), self.leads[1], 0.0]


def drafted(
    growth: Growth,
    *,
    pays: int = 99,
    depth: int = 6,
    text: Sequence[int] = (5, 7),
    leads: Sequence[float] = (2.0, 1.0),
    **more: Any,
) -> ModelDraft:
    """As deep as `pays` drafts, where no price is fixed."""
    said = Says(leads)
    chain = ModelDraft(said, TARGET, depth=depth, share=0.1, growth=growth, **more)  # type: ignore[arg-type]
    chain.start(text)
    list(chain.extend_draft(99, lambda chances: len(chances) <= pays, 0.02, lambda n: [1 + 0.02 * i for i in range(n)]))
    assert [said.paths[place.row] for place in chain._places[1:]] == [place.path for place in chain._places[1:]]
    return chain


def rows_of(chain: ModelDraft) -> list[int]:
    return [len(ids) for ids, _ in chain.draft_model.passes]  # type: ignore[attr-defined]


def test_a_chain_takes_a_pass_a_draft_and_trees_take_one_a_level() -> None:
    assert rows_of(drafted(Growth("chain"))) == [1] * 5
    assert rows_of(drafted(Growth("opt", wide=5))) == [3, 5, 5, 5, 5]
    assert rows_of(drafted(Growth("best", wide=4), pays=3)) == [3, 4, 4]
    assert rows_of(drafted(Growth("cape", branches=7))) == [1] * 5


def test_the_likeliest_place_may_be_a_level_above() -> None:
    """Where a second choice is as good as the first, it is likelier than what comes behind that."""
    unsure = {"leads": (0.1, 0.1), "pays": 2}
    passes = {kind: drafted(Growth(kind, wide=1), **unsure).draft_model.passes for kind in ("best", "opt")}  # type: ignore[attr-defined,arg-type]
    assert [parents for _, parents in passes["best"][:2]] == [[-1], [-1]]
    assert [parents for _, parents in passes["opt"][:2]] == [[-1], [0]]


@pytest.mark.parametrize("kind", ["chain", "opt", "best"])
def test_nothing_is_drafted_behind_an_end(kind: Any) -> None:
    first, *others = (int(token) for token in Says().said(7)[:3])
    passes = drafted(Growth(kind), ends=[first]).draft_model.passes  # type: ignore[attr-defined]
    assert all(first not in ids for ids, _ in passes)
    assert [ids for ids, _ in passes[:1]] == ([] if kind == "chain" else [others])


@pytest.mark.parametrize("kind", ["opt", "best", "sequoia", "cape"])
def test_what_the_last_pass_said_is_verified(kind: Any) -> None:
    """The release of SpecExtend throws its newest level away."""
    chain = drafted(Growth(kind, branches=3, wide=2, nodes=40), depth=4)
    newest = max(len(place.path) for place in chain._places)
    guesses = grow([chain], 200, 99, 3, 0.0)
    depths: list[int] = []
    for guess in guesses:
        depths.append(1 if guess.parent < 0 else depths[guess.parent] + 1)
    assert max(depths) == newest + 1
    every = {(*place.path, token) for place in chain._places for token in place.ids[: len(place.chances)]}
    assert len(guesses) == len(every)


def test_a_fixed_price_ends_the_growth() -> None:
    """Each level promises less than the one before it, down to what another pass has to promise."""
    sums = []
    for least in (1.9, 0.9, 0.3, 0.1):
        growth = Growth("opt", least=least, nodes=50)
        chain = drafted(growth)
        deep = [[place for place in chain._places if len(place.path) <= depth] for depth in range(7)]
        promised = [growth.promised(places) for places in deep if places]
        gains = [b - a for a, b in zip([0.0, *promised], promised, strict=False)][: 1 + len(rows_of(chain))]
        assert all(gain > least for gain in gains[:-1])
        assert gains[-1] <= least or len(gains) == 6
        sums.append(len(rows_of(chain)))
    assert sums == sorted(sums)
    assert sums[0] < sums[-1]


def test_the_unsure_place_has_more_alternatives() -> None:
    growth = Growth("cape", branches=7)
    assert [growth.offered(chance, None) for chance in (0.95, 0.7, 0.5, 0.1)] == [1, 3, 5, 7]


def forests(n: int, levels: int, ranks: int) -> Iterator[tuple[TreeShape, ...]]:
    """All ways to have n nodes below one, so deep and no deeper, children of the first ranks."""
    if not n:
        yield ()
    elif levels and ranks:
        for mine in range(1, n + 1):
            for down, beside in product(forests(mine - 1, levels - 1, RANKS), forests(n - mine, levels, ranks - 1)):
                yield (TreeShape(down), *beside)


RANKS = 3


def value(shape: TreeShape, rates: Sequence[float]) -> float:
    return sum(rate * (1 + value(below, rates)) for rate, below in zip(rates, shape.below, strict=False))


def height(shape: TreeShape) -> int:
    return max((1 + height(below) for below in shape.below), default=0)


def nodes(shape: TreeShape) -> int:
    """Behind its root."""
    return sum(1 + nodes(below) for below in shape.below)


@pytest.mark.parametrize("seed", range(6))
def test_the_dynamic_programme_finds_the_best_of_all_shapes(seed: int) -> None:
    random = Random(seed)
    rates = sorted((random.uniform(0.02, 0.8) for _ in range(RANKS)), reverse=True)
    each, slope = random.choice([0.02, 0.1, 0.4]), random.choice([0.01, 0.1, 0.3])
    costs = [1 + slope * i for i in range(7)]

    def speed(shape: TreeShape) -> float:
        return (1 + value(shape, rates)) / (height(shape) * each + costs[nodes(shape)])

    every = [TreeShape(below) for n in range(1, 7) for below in forests(n, 4, RANKS)]
    assert speed(sequoia(rates, 6, 4, each, costs)) == pytest.approx(max(map(speed, every)))


@pytest.mark.parametrize("depth", [1, 3, 6])
@pytest.mark.parametrize(("kind", "branches"), [("chain", 1), ("chain", 3), ("sequoia", 3)])
def test_a_shape_that_is_known_before_is_that_of_the_tree_that_grows(kind: Any, branches: int, depth: int) -> None:
    growth = Growth(kind, branches=branches, wide=4, nodes=3 * depth)
    chain = drafted(growth, depth=depth)
    shape = growth.fixed(depth, chain._planned, 32)
    assert shape is not None
    paths = [path_of(chain, shape, row) for row in range(len(shape.rows()))]
    assert sorted(place.path for place in chain._places) == sorted(paths)
    assert len(grow([chain], 99, 99, branches, 0.0)) == nodes(shape)
    assert height(shape) <= depth


def path_of(chain: ModelDraft, shape: TreeShape, row: int) -> tuple[int, ...]:
    """Of the choices down to a row of a shape."""
    above, rank, _ = shape.rows()[row]
    return () if above < 0 else (*(path := path_of(chain, shape, above)), int(Says().said((7, *path)[-1])[rank]))


def test_which_shapes_are_not_known_before() -> None:
    fan = TreeShape((TreeShape((TreeShape(),)),) * 3)  # two nodes of a level have nodes below
    assert Growth("sequoia", branches=3, wide=3).fixed(2, fan, 32) == fan
    assert Growth("sequoia", branches=3, wide=2).fixed(2, fan, 32) is None, "the likeliest two are expanded"
    assert Growth("sequoia", branches=3, wide=3).fixed(2, fan, 2) is None, "a row has no third choice"
    assert [Growth(kind).fixed(2, None, 32) for kind in ("opt", "best", "cape", "sequoia")] == [None] * 4


def test_a_cascade_has_copies_checked_in_one_pass() -> None:
    said = Says()
    run = [7]
    for _ in range(6):
        run.append(int(said.said(run[-1])[0]))
    copies = PromptLookup(1, 32)
    text = [*run, 8001, *run, 8002, 7]  # what followed 7 twice is what is drafted
    copies.start(text)
    chain = drafted(Growth("chain"), text=text, cascade=(copies, 3))
    assert rows_of(chain) == [4, 1]
    assert [ids for ids, _ in chain.draft_model.passes] == [run[1:5], run[5:6]]  # type: ignore[attr-defined]
    assert [guess.id for guess in grow([chain], 6, 99, 1, 0.0)] == run[1:]
    drafted(Growth("best", wide=3), text=text, cascade=(copies, 3))  # copies behind the first of several drafts
    wrong = [*run[:3], 8000, *run[4:]]  # the copy goes astray behind two tokens: what the model says counts
    text = [*wrong, 8001, *wrong, 8002, 7]
    copies.start(text)
    chain = drafted(Growth("chain"), text=text, cascade=(copies, 3))
    assert [guess.id for guess in grow([chain], 6, 99, 1, 0.0)] == run[1:]


def test_copies_go_on_where_the_model_ends() -> None:
    said = Says()
    run = [7, *(int(said.said(7)[:1][0]) for _ in range(1))]
    run.append(int(said.said(run[-1])[0]))
    copies = PromptLookup(1, 32)
    text = [4, *run, 31, 32, 33, 8001, 7]
    copies.start(text)
    chain = drafted(Growth("chain"), text=text, depth=2)
    alone = grow([chain], 9, 99, 1, 0.0)
    both = grow([chain, copies], 9, 5, 1, 0.0, (1, copies.behind))
    assert [guess.id for guess in alone] == run[1:]
    assert [guess.id for guess in both][:5] == [*run[1:], 31, 32, 33]
