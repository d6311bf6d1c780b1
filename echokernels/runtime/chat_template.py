"""Chat templates: a model's own Jinja program that lays out a conversation as one prompt.

A template comes with the model file, so it is run in Jinja's sandbox. The names it may use are
those of the Hugging Face convention: `messages`, `add_generation_prompt`, `bos_token`, `eos_token`,
`raise_exception`, `strftime_now`, the filter `tojson`, and the tag `generation`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class ChatTemplate:
    """A template's `source`, compiled when first used.

    `special_tokens` maps names that the template may print, such as `bos_token`, to their text.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt for `messages`, a list of {"role": str, "content": str}.

        `add_generation_prompt` ends it with the beginning of the assistant's turn. Keys beyond
        these two are handed to the template as they are. Raises ValueError for messages of another
        form, for what the template itself refuses, and for a template that is not valid Jinja.
        """
        check_messages(messages)
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except Exception as exc:  # a template is foreign code and may raise anything
            raise ValueError(f"the chat template failed on these messages: {exc}") from exc

    @cached_property
    def _template(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as exc:
            raise ValueError(
                f"the chat template is not valid Jinja: {exc} (line {exc.lineno})"
            ) from exc


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError unless `messages` is one or more {"role": str, "content": str}."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(
            f"messages is {_shorten(messages)}; it must be a list of one or more messages"
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(
                f"messages[{i}] is {_shorten(message)}; it must be a mapping with role and content"
            )
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(
                    f"messages[{i}][{key!r}] is {_shorten(message.get(key))}; it must be a string"
                )


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: marks the assistant's words for training."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own convention)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.LoopControlExtension],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """Plain JSON. Jinja's own filter would escape `<`, `>`, `&` for HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(date_format: str) -> str:
    return datetime.datetime.now().strftime(date_format)
