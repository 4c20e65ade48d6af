"""The table of exactness for methods of another package: `pytest tests/exact --method PACKAGE`."""

from __future__ import annotations

from importlib import metadata
from itertools import product

import pytest

from kvcli.methods.drafts.off import Off
from kvcli.settings.profile import Profile
from kvcli.settings.schema import GROUP, registries
from tests.exact import table

KINDS = ("policy", "kv_format", "spec")
STORAGES = ("dense", "sliding", "checked", "disk", "mustafar")
POLICIES = ("all", "ragged", "window")
DRAFTERS = ("ngram", "fafo", "model", "right", "wrong", "moody")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    package = metafunc.config.getoption("--method")
    points = metadata.distribution(package).entry_points.select(group=GROUP)
    metafunc.parametrize("point", [pytest.param(p, id=p.name) for p in points if p.name.split(".")[0] in KINDS])


def test_the_text_is_that_of_plain_decoding_in_its_rows_of_the_table(point: metadata.EntryPoint) -> None:
    kind, _, name = point.name.partition(".")
    assert registries()[kind][name] == point.value
    table.add(kind, name, point.load())
    storages = [(name, "fp32")] if kind == "kv_format" else [(s, "fp32") for s in STORAGES]
    policies = [name] if kind == "policy" else POLICIES
    drafters = [name] if kind == "spec" else DRAFTERS
    for (storage, dtype), policy, sampler in product(storages, policies, ("greedy", "sampled", "penalty")):
        want = table.plain(storage, policy, sampler, dtype)
        for drafter in drafters:
            made = table.DRAFTERS[drafter](want)
            assert table.decode(storage, policy, sampler, dtype, made) == want, (storage, policy, drafter, sampler)


def test_it_does_what_its_kind_is_for(point: metadata.EntryPoint) -> None:
    kind, _, name = point.name.partition(".")
    table.add(kind, name, point.load())
    drafter = table.DRAFTERS[name]([]) if kind == "spec" else Off()
    storage, policy = (name if kind == "kv_format" else "dense"), (name if kind == "policy" else "all")
    session = table.opened(storage, policy, "greedy", "fp32", drafter)
    table.run_to_end(table.written(session, storage))
    if kind == "policy":
        assert sum(use.slots for use in session.cache.usage() if use.layer == 1) < session.committed
    elif kind == "kv_format":
        assert "rounded" in session.approximations
    else:
        assert sum(drafter.report().accepted_by.values())


def test_a_profile_names_it_and_whose_it_is(point: metadata.EntryPoint) -> None:
    kind, _, name = point.name.partition(".")
    key = "name" if kind == "policy" else "method"
    bits = {"kv": {"k_bits": 4, "v_bits": 4}} if kind == "kv_format" else {}
    profile = Profile.load("exact").replace(exactness="approx", **{kind: {key: name}}, **bits)
    assert profile.foreign == [f'{kind}.{key} = "{name}" is code of {point.dist.name} {point.dist.version}']
