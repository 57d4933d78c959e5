"""Rows of data sets as texts and chats."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sparsellm.errors import BadText
from sparsellm.texts.rows import Conversation, document_fields, document_of, row_documents

QUESTION, ANSWER = {"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}
CHAT = [QUESTION, ANSWER]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        (CHAT, CHAT),
        ({"messages": CHAT}, CHAT),
        ({"conversations": CHAT}, CHAT),
        ({"conversations": [{"from": "human", "value": "why"}, {"from": "gpt", "value": "so"}]}, CHAT),
        ({"conversations": [{"from": "user", "value": "why"}, {"from": "observation", "value": "1"}]}, [
            QUESTION, {"role": "tool", "content": "1"},
        ]),
        ({"system": "be brief", "conversations": [{"from": "human", "value": "why"}]}, [
            {"role": "system", "content": "be brief"}, QUESTION,
        ]),
        ({"system": " ", "messages": CHAT}, CHAT),
        ({"system": "other", "messages": [{"role": "system", "content": "own"}, QUESTION]}, [
            {"role": "system", "content": "own"}, QUESTION,
        ]),
        ({"prompt": "why", "completion": "so"}, CHAT),
        ({"prompt": [QUESTION], "completion": [ANSWER]}, CHAT),
        ({"instruction": "why", "output": "so"}, CHAT),
        ({"instruction": "why", "input": "", "output": "so"}, CHAT),
        ({"instruction": "sum", "input": "1, 2", "output": "3"}, [
            {"role": "user", "content": "sum\n\n1, 2"}, {"role": "assistant", "content": "3"},
        ]),
        ({"messages": [QUESTION, CALL]}, [QUESTION, CALL]),
        ({"messages": [{"role": "user", "content": "why", "name": None, "tool_calls": None}]}, [QUESTION]),
    ],
)  # fmt: skip
def test_chats(row: Any, messages: list[dict[str, Any]]) -> None:
    """Each form of a chat gives messages with `role` and `content`; what is null, as tables have it, is left out."""
    found = document_of("a, line 1,", row, None)
    assert isinstance(found, Conversation)
    assert list(found.messages) == messages
    assert found.tools is None


@pytest.mark.parametrize("tools", [[{"name": "f"}], json.dumps([{"name": "f"}])])
def test_tools_of_a_row(tools: Any) -> None:
    """They go to the template, also where a table has them as JSON; none are none."""
    found = document_of("a", {"messages": CHAT, "tools": tools}, None)
    assert isinstance(found, Conversation)
    assert found.tools == [{"name": "f"}]
    for nothing in ([], None, "", "[]"):
        found = document_of("a", {"messages": CHAT, "tools": nothing}, "messages")
        assert isinstance(found, Conversation)
        assert found.tools is None


@pytest.mark.parametrize(
    "row",
    [
        None, "", " \n", [], {"text": None}, {"text": ""}, {"messages": []}, {"messages": None, "tools": [1]},
        {"instruction": "", "output": None, "input": "more"}, {"conversations": [], "system": "be brief"},
    ],
)  # fmt: skip
def test_empty_rows(row: Any) -> None:
    """They are no documents, and are counted."""
    assert document_of("a", row, None) is None
    assert list(row_documents("a", [("1", row), ("2", "text")], None)) == [None, "text"]


@pytest.mark.parametrize(
    ("row", "field", "named"),
    [
        (7, None, "int"),
        ({"text": 7}, None, "int.*'text'"),
        ({"body": "x"}, None, "'text'.*'body'.*`text_field`"),
        ({"prompt": "only"}, None, "'text'.*'prompt'"),
        ({"text": "x"}, "body", "'body'.*'text'"),
        ([{"content": "no role"}], None, "list"),
        ({"text": "\ud800"}, None, "surrogate"),
        ({"prompt": 3, "completion": "x"}, None, "int.*'prompt'"),
        ({"messages": CHAT, "tools": "{"}, None, "tools.*JSON"),
    ],
)
def test_other_rows_are_refused(row: Any, field: str | None, named: str) -> None:
    with pytest.raises(BadText, match=f"a, line 1, .*{named}"):
        document_of("a, line 1,", row, field)


def test_fields_of_a_document() -> None:
    """The first form of which all fields are there, with those that belong to it; a named one alone, with its tools."""
    assert document_fields("a", ["id", "messages", "text"], None) == ["text"]
    assert document_fields("a", ["id", "tools", "messages"], None) == ["messages", "tools"]
    assert document_fields("a", ["output", "input", "instruction"], None) == ["instruction", "output", "input"]
    assert document_fields("a", ["prompt", "conversations", "system"], None) == ["conversations", "system"]
    assert document_fields("a", ["chat", "tools"], "chat") == ["chat", "tools"]


def test_texts_and_chats_in_one_file() -> None:
    with pytest.raises(BadText, match=r"a, line 2, .*chat"):
        list(row_documents("a", [("line 1", "text"), ("line 2", CHAT)], None))
