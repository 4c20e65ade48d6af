"""Structured output: the grammar of --schema, --grammar or --json-object, read before a model loads."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcli.errors import BadInput, UsageError
from kvcli.models.grammar import Grammar
from kvcli.settings.small_file import Unfit, parse_object, read_small

if TYPE_CHECKING:
    from kvcli.api import Turn
    from kvcli.chat.model import Model
    from kvcli.engine.sequence.constraint import Constraint
    from kvcli.environment import Environment
    from kvcli.render.terminal.screen import Screen

LARGEST = 1 << 20  # bytes of a schema or a grammar, at most


@dataclass(frozen=True, slots=True)
class AnswerConstraint:
    """The constraint on the answers of this run."""

    name: str
    constraint: Constraint
    stops: Collection[int]

    def missed(self, turn: Turn) -> str:
        """Return a note if the length limit cut the answer before it was complete; else ""."""
        from kvcli.engine.sequence.constraint import is_whole

        if turn.finish != "length" or is_whole(self.constraint, turn.ids, self.stops):
            return ""
        return f"the answer was cut before it was all of {self.name}; --max-new-tokens allows a longer one"


def constrain(model: Model, grammar: Grammar, screen: Screen) -> AnswerConstraint:
    """Constrain the model's answers to the grammar."""
    from kvcli.render.turn.turn_view import busy_word

    with busy_word(screen, "reading the vocabulary"):
        return AnswerConstraint(grammar.name, model.constraint(grammar), model.lm.stop_ids)


def read_grammar(world: Environment, schema: str | None, rules: str | None, json_object: bool) -> Grammar | None:
    """Return the grammar of the options, if there is one."""
    typed = [flag for flag, value in (("--schema", schema), ("--grammar", rules)) if value is not None]
    typed += ["--json-object"] if json_object else []
    if len(typed) > 1:
        raise UsageError(f"{' and '.join(typed)} exclude each other", try_=["one of them"])
    if schema is not None:
        raw = _read(world, schema, "bad_schema")
        try:
            return Grammar.of_schema(parse_object(raw), schema)
        except Unfit as error:
            raise BadInput(f"{schema} {error}", code="bad_schema") from None
    if rules is not None:
        raw = _read(world, rules, "bad_grammar")
        try:
            return Grammar.of_text(raw.decode("utf-8-sig"), rules)
        except UnicodeDecodeError as error:
            raise BadInput(f"{rules} is not UTF-8: at byte {error.start:,}", code="bad_grammar") from None
    return Grammar.json_object() if json_object else None


def _read(world: Environment, name: str, code: str) -> bytes:
    try:
        return read_small(world.cwd / os.path.expanduser(name), LARGEST)
    except Unfit as error:
        raise BadInput(f"{name} {error}", code=code) from None
