"""Chats as the templates of different kinds of models write them."""

from __future__ import annotations

from typing import Any

import pytest

from sparsellm.texts.rows import Conversation
from sparsellm.texts.tokenized import DoesNotFit, write_conversation
from tests.conftest import byte_tokenizer

STRINGS = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}"
    "{% for t in m.tool_calls or [] %}{{ t.name }}{% endfor %}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endfor %}"
)
TOOLS = "{% if tools %}[{{ tools[0].name }}]{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
UPPER = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"


def write(template: str, *messages: dict[str, Any], tools: list[Any] | None = None) -> str:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return write_conversation(Conversation(messages, tools), tokenizer)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
IN_PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("template", "messages", "written"),
    [
        (STRINGS, [user("hi"), CALL], "<user>hi<assistant>f"),
        (STRINGS, [user(IN_PARTS)], "<user>one\ntwo"),
        (STRINGS, [user(["one", "two"])], "<user>one\ntwo"),
        (PARTS, [user(IN_PARTS)], "<user>one\ntwo"),
        (PARTS, [user("hi"), CALL], "<user>hi<assistant>"),
        (UPPER, [user("hi")], "HI"),
        ("{{ messages[0].content.strip() }}", [user("  hi ")], "hi"),
    ],
)
def test_the_form_that_a_template_takes(template: str, messages: list[dict[str, Any]], written: str) -> None:
    """Contents as strings or as lists, null or empty: the form whose result has the question in it."""
    assert write(template, *messages) == written


def test_tools_reach_the_template() -> None:
    tools = [{"type": "function", "name": "weather"}]
    assert write(TOOLS, user("hi"), tools=tools) == "[weather]hi"
    assert write(TOOLS, user("hi")) == "hi"


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        ("{{ raise_exception('no system here') }}", [user("hi")], "no system here"),
        (STRINGS, [user([{"type": "image", "url": "x"}])], "content that is not text: image"),
        (STRINGS, [user(7)], "content that is not text"),
        ("{{ 1 / 0 }}", [user("hi")], "division by zero"),
        ("{{ 2.0 ** 9999 }}", [user("hi")], "out of range"),
        ("{{ [1][5:].pop() }}", [user("hi")], "pop"),
        ("{{ 'x' * 10 ** 18 }}", [user("hi")], "MemoryError"),
        ("{% macro again(x) %}{{ again(x) }}{% endmacro %}{{ again(1) }}", [user("hi")], "recursion"),
    ],
)
def test_what_is_refused(template: str, messages: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(DoesNotFit, match=reason):
        write(template, *messages)
