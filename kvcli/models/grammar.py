"""Grammars for structured output, from a JSON schema or from rules, for any model.

Grammars are parsed by llguidance (https://github.com/guidance-ai/llguidance), which the extra `schema` installs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcli.errors import BadInput
from kvcli.installing import EXTRAS, pip
from kvcli.models.refusals import blame_files

# White space between JSON symbols, as in llama.cpp. With all that JSON allows, a small model may indent forever.
SPACE = r" |\n[ \t]{0,20}"


@dataclass(frozen=True, slots=True)
class Grammar:
    """Grammar in llguidance's notation. `name`: its name in errors."""

    text: str
    name: str

    @staticmethod
    def of_schema(schema: Mapping[str, Any], name: str = "the schema", *, is_compact: bool = False) -> Grammar:
        """Grammar of the JSON that fits a schema, properties in order. Raises BadInput for unsupported keywords.

        `is_compact`: a space after colons and commas, and no other white space.
        """
        matcher = library().LLMatcher
        space = {"whitespace_flexible": False} if is_compact else {"whitespace_pattern": SPACE}
        with blame_files(lambda said: refused(name, said, "bad_schema")):
            try:
                text = matcher.grammar_from_json_schema(json.dumps(schema), space)
            except ValueError as error:  # of a library in Rust, such as one about depth
                raise refused(name, str(error), "bad_schema") from None
        return _checked(text, name, "bad_schema")

    @staticmethod
    def of_text(text: str, name: str = "the grammar") -> Grammar:
        """Grammar from GBNF (llama.cpp, rule `root`) or Lark (llguidance, rule `start`). Raises BadInput."""
        matcher = library().LLMatcher
        from llguidance.gbnf_to_lark import any_to_lark

        if not text.strip():
            raise refused(name, "it is empty", "bad_grammar")
        with blame_files(lambda said: refused(name, said.partition(": ")[2], "bad_grammar")):
            lark = any_to_lark(text)
        return _checked(matcher.grammar_from_lark(lark), name, "bad_grammar")

    @staticmethod
    def json_object() -> Grammar:
        """Grammar of any JSON object."""
        return Grammar.of_schema({"type": "object"}, "a JSON object")


def library() -> Any:
    """Return the module llguidance, or raise BadInput with the command to install it."""
    try:
        import llguidance
    except ImportError as error:
        raise BadInput(
            "schemas and grammars need llguidance, which is not installed",
            code="missing_extra",
            lines=[str(error)],
            try_=[pip(*EXTRAS["schema"])],
        ) from None
    return llguidance


def refused(name: str, said: str, code: str) -> BadInput:
    """Return a BadInput with llguidance's message, its `3(14): ` spelled out."""
    first, *more = re.sub(r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: ", said).rstrip().split("\n")
    return BadInput(f"{name} cannot be used: {first}", code=code, lines=more)


def _checked(text: str, name: str, code: str) -> Grammar:
    is_bad, said = library().LLMatcher.validate_grammar_with_warnings(text)
    if is_bad:
        raise refused(name, said[0], code)
    return Grammar(text, name)
