"""The options of a command as a dataclass: parameters in the order of its fields, groups in their place."""

from __future__ import annotations

import pytest
import typer

from kvcli.commands.common.flags import tokens
from kvcli.commands.common.options import Options, choice, command, flag
from kvcli.errors import BadConfig, UsageError
from kvcli.settings.profile import load_profile


class Inner(Options):
    depth: int = choice("-d", default=3, help="Depth.")


class Outer(Options):
    first_name: str | None = choice(help="First.")
    inner: Inner
    all_: bool = flag(help="All.")
    check: bool = choice("--check/--no-check", default=True, help="Check.")


def _ran(*args: str) -> tuple[object, Outer]:
    app, seen = typer.Typer(), []

    @command(app)
    def run(world: object, options: Outer) -> int:
        """Run."""
        seen.append((world, options))
        return 0

    found = typer.main.get_command(app)
    assert [param.opts[0] for param in found.params][:4] == ["--first-name", "--depth", "--all", "--check"]
    with found.make_context("run", list(args), obj="the world") as context:
        assert found.invoke(context) == 0
    return seen[0]


def test_fields_are_options_in_their_order_and_groups_are_objects():
    world, options = _ran("--first-name", "a", "-d", "5", "--all", "--no-check")
    assert world == "the world"
    assert (options.first_name, options.inner.depth, options.all_, options.check) == ("a", 5, True, False)
    assert options.values() == {"first_name": "a", "depth": 5, "all_": True, "check": False}


def test_defaults_are_those_of_the_fields():
    _, options = _ran()
    assert options == Outer(inner=Inner(depth=3), first_name=None, all_=False, check=True)
    assert options.typed == {}


def test_an_option_that_has_no_effect_is_refused_even_with_its_default():
    _, options = _ran("-d", "3", "--all")
    options.refuse_others("--all", {"all_", "depth"})
    with pytest.raises(UsageError, match="--all excludes --depth") as caught:
        options.refuse_others("--all", {"all_"})
    assert caught.value.try_ == ("leave out --depth",)


@pytest.mark.parametrize("number", ["2147483648", "99999999999999999999"])
def test_a_number_without_a_limit_of_its_own_has_one_that_the_error_names(number):
    assert _ran("-d", "2147483647")[1].inner.depth == 2147483647
    with pytest.raises(UsageError, match=r"--depth is [0-9,]+, and at most 2,147,483,647"):
        _ran("--depth", number)
    for text in (number, f"{number}k"):
        with pytest.raises(UsageError, match="at most 2,147,483,647"):
            tokens(text, "-n")
    for key in ("max_new_tokens", "top_k", "dry_range"):
        with pytest.raises(BadConfig) as raised:
            load_profile("exact", sets=[f"sample.{key}={number}"])
        assert "at most 2,147,483,647" in str(raised.value)
    assert load_profile("exact", sets=[f"sample.seed={2**63 - 1}"]).sample.seed == 2**63 - 1
