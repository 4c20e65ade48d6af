"""Process that renders a model's chat template: jinja2, set up as in transformers. See template.py."""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from kvcli.sandbox import preload, serve, set_limits


def main(parent: int, limits: dict[str, Any], file: None) -> int:
    """Render each request line of standard input."""
    set_limits(parent, limits)
    preload("jinja2", "encodings")
    return serve(rendered)


def rendered(asked: dict[str, Any] | None) -> dict[str, str]:
    """Return {"text": ...}, or {"refused": ...} with the template's own message."""
    if asked is None:
        return {}
    try:
        now = datetime.fromisoformat(asked["now"])  # passed in, because the sandbox blocks the time zone table
        return {"text": compiled(asked["template"]).render(**asked["variables"], strftime_now=now.strftime)}
    except (TemplateSyntaxError, SecurityError):
        raise
    except TemplateError as error:
        return {"refused": str(error)}


@lru_cache
def compiled(source: str) -> Template:
    """Compile a template as transformers.utils.chat_template_utils does; tests compare the two."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "dict": Dict(), "namespace": Attributes}
    return environment.from_string(source)


class Generation(Extension):
    """Tag `{% generation %}`, which marks answers for training and has no effect here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inner"), [], [], body).set_lineno(line)

    def _inner(self, caller: Macro) -> str:
        return caller()


class Dict:
    """`dict` without the attributes of the class."""

    def __call__(self, *pairs: Any, **named: Any) -> dict[Any, Any]:
        return dict(*pairs, **named)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


class Attributes(Namespace):
    """`namespace` that refuses private names."""

    def __init__(*pairs: Any, **named: Any) -> None:
        self, *rest = pairs
        found = dict(*rest, **named)
        for name in found:
            _refuse_private(name)
        Namespace.__init__(self, found)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"chat templates cannot keep private attributes: {name!r}")


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
