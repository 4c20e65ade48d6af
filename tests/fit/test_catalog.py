"""The models that are named to somebody who named none: their sizes add up, and what is offered fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcli.fit import weights
from kvcli.fit.available_memory import AvailableMemory
from kvcli.fit.plan import MeasuredFacts, PlannedModel, plan
from kvcli.models.catalog import CATALOG, TOKENS, choices
from kvcli.models.checkpoint import CheckpointFormat
from kvcli.models.machine import kept_free
from kvcli.settings.profile import Profile

GIB = 1 << 30


def planned(known, quant, available):
    """What `kvcli fit` says of it."""
    stays = known.package is not None and known.package.each < 1
    held = tuple(replace(h, is_gguf=stays, stays=h.packs) for h in weights.of_shape(known.shape))
    subject = PlannedModel(
        known.id, known.shape, held, "bfloat16", CheckpointFormat(), True, False, 2 * known.parameters
    )
    profile = Profile.load("ngram").replace(load={"quant": quant})
    return plan(subject, profile, AvailableMemory("cpu", available), min(TOKENS, known.shape.limit), MeasuredFacts())


@pytest.mark.parametrize("known", CATALOG, ids=lambda known: known.id)
def test_the_sizes_of_a_model_give_the_number_of_its_parameters(known):
    shape = known.shape
    norms = shape.hidden * (2 * shape.layers + 1)
    routers = shape.layers * shape.experts * shape.hidden
    counted = shape.linear + shape.vocab * shape.hidden * (1 if shape.is_tied else 2) + norms + routers
    rel = 2e-4 if known.name.startswith("gemma") else 2e-5  # four norms a layer
    assert counted == pytest.approx(known.parameters, rel=rel)  # but for norms of queries and keys


def test_they_come_by_size_with_a_licence_each():
    assert [k.parameters for k in CATALOG] == sorted(k.parameters for k in CATALOG)
    assert {k.licence for k in CATALOG} == {"Apache-2.0", "MIT", "Gemma"}
    assert len({k.id for k in CATALOG}) == len({k.name for k in CATALOG}) == len(CATALOG)
    assert [k.name for k in CATALOG if k.terms] == [k.name for k in CATALOG if k.licence == "Gemma"]


@pytest.mark.parametrize("gib", [1.5, 2, 3, 5, 7, 8, 11, 16, 24, 64])
def test_what_is_offered_fits_as_fit_plans_it(gib):
    available = int(gib * GIB)
    found = choices(available - kept_free(available))
    assert 1 <= len(found) <= 3
    assert [known.parameters for known, _ in found] == sorted({known.parameters for known, _ in found})
    for known, quant in found:
        needed = planned(known, quant, available)
        assert needed.fits
        assert 1 <= known.needs(quant) / needed.least < 1.25


@pytest.mark.parametrize("known", CATALOG, ids=lambda known: known.name)
@pytest.mark.parametrize("quant", ["none", "int8"])
def test_what_a_model_takes_is_what_fit_plans(known, quant):
    assert 1 <= known.needs(quant) / planned(known, quant, 128 * GIB).least < 1.25


def test_quantized_weights_are_offered_where_more_then_fits():
    assert [quant for _, quant in choices(8 * GIB)] == ["none", "none", "int8"]
    assert {quant for _, quant in choices(64 * GIB)} == {"none"}
    assert {quant for _, quant in choices(8 * GIB, ("int4",))} == {"int4"}


def test_nothing_is_offered_where_nothing_fits():
    assert choices(GIB // 2) == []
