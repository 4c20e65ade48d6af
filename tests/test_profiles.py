"""The shipped profiles, and the page that documents the keys."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

from kvcli.errors import BadConfig
from kvcli.methods.drafts.mix import Sources
from kvcli.settings.config import builtin_files
from kvcli.settings.profile import load_profile
from kvcli.settings.schema import TABLES, Header, Model, Top, registries
from kvcli.settings.values import comments_of, expected, keys_of

ROOT = Path(__file__).parents[1]
NAMED = {where: resolve_name(where) for names in registries().values() for where in names.values()}
SHIPPED = [file.profile for file in builtin_files()]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_profile_is_sound_and_says_what_it_is_for(name: str) -> None:
    profile = load_profile(name)

    assert profile.description
    assert len(profile.description) < 70
    assert profile.spec.rows >= 1


def test_the_shipped_profiles() -> None:
    exact = ["draft", "exact", "fafo", "fafo-paper", "gpu", "lookahead", "ngram", "specextend", "specextend-paper"]
    approx = ["balanced", "cpu", "expected", "fastgen", "fastgen-paper", "kvzip", "lean", "max-context", "offload"]
    approx += ["snap", "budget", "streaming", "lazy", "lazy-fast", "lazy-paper"]
    assert sorted(SHIPPED) == sorted(exact + approx)
    assert [name for name in sorted(SHIPPED) if load_profile(name).exactness == "exact"] == exact
    assert load_profile("exact").spec.method == "off"


@pytest.mark.parametrize("table", [Header, Top, Model, *TABLES.values(), *NAMED.values()])
def test_every_key_has_a_comment(table: type) -> None:
    assert keys_of(table).keys() - comments_of(table).keys() == set()


def test_the_page_has_the_keys_as_they_are() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    page = (ROOT / "docs" / "reference" / "profile-keys.md").read_text(encoding="utf-8")
    guide = page + (ROOT / "docs" / "profiles.md").read_text(encoding="utf-8")

    part = re.search(r"<!-- generated: keys -->\n(.*?)<!-- end -->", page, re.DOTALL)

    assert part is not None
    assert part[1].rstrip() == generate.keys("").rstrip(), "run python docs/generate.py"
    for table in (Header, Top, Model):
        assert [name for name in keys_of(table) if f"`{name}`" not in guide and f"{name} =" not in guide] == []


def test_a_list_of_words_names_the_words() -> None:
    assert expected(Sources) == 'a list of "prompt-lookup", "lookahead", "stand" or "token-recycling"'


@pytest.mark.parametrize(
    ("name", "sets", "key", "other"),
    [
        ("fafo", ["view=all", "recent=9"], "recent", 'view is "all"'),
        ("fafo", ["page=9"], "page", 'view is "stream"'),
        ("fafo", ['sources=["stand"]', "window=5"], "window", 'sources is ["stand"]'),
        ("fafo", ['sources=["lookahead"]', "min_match=2"], "min_match", 'sources is ["lookahead"]'),
        ("lookahead", ["sinks=9"], "sinks", 'view is "all"'),
        ("ngram", ["adaptive=false", "min_speedup=0.5"], "min_speedup", "adaptive is false"),
        ("draft", ["chunk=8"], "chunk", 'retrieval is "off"'),
        ("draft", ["working=0", "sinks=8"], "sinks", "working is 0"),
        ("draft", ["tree_width=8"], "tree_width", 'tree is "chain"'),
        ("draft", ["risk=0.5"], "risk", 'stop is "marginal"'),
        ("draft", ["copies=false", "max_match=9"], "max_match", "copies is false"),
        ("exact", ["method=self", "skipped=0.3"], "skipped", 'skip is "none"'),
    ],
)
def test_a_drafting_key_that_nothing_reads_is_refused(name: str, sets: list[str], key: str, other: str) -> None:
    typed = [f"spec.{one}" for one in sets]
    with pytest.raises(BadConfig) as refused:
        load_profile(name, sets=typed)
    said = str(refused.value) + "".join(refused.value.lines)
    assert f"spec.{key}: " in said
    assert f"has no effect while spec.{other}" in said
    load_profile(name, sets=[one for one in typed if not one.startswith(f"spec.{key}=")])


def test_what_a_shipped_profile_says_goes_with_what_is_laid_over_it() -> None:
    assert load_profile("specextend", sets=["spec.retrieval=off"]).spec.scored_layers == 4


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_profile_says_nothing_in_vain(name: str) -> None:
    profile = load_profile(name)
    known = keys_of(type(profile.spec.settings))
    for key, other in profile.spec.ignored_keys().items():
        assert {key, other} <= known.keys()
        assert getattr(profile.spec, key) == known[key].default
