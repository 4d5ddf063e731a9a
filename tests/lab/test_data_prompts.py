"""Prompts by the chat template or as texts; data sets of the hub without a network."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from outrider.core.errors import InvalidParameterError
from outrider.lab.data import DataSet, Example, Turn, as_prompts, read_data

CHAT = Example(({"role": "user", "content": "Why?"},), id="chat")
TWO = Example(CHAT.prompt, id="two", later=(Turn("And?"),))
TEXT = Example("def f(", id="text")
WITH: Any = SimpleNamespace(
    tokenizer=SimpleNamespace(chat_template="{{ messages }}"), name="instruct"
)
WITHOUT: Any = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=None), name="base")


def of(*examples: Example) -> DataSet:
    return DataSet("name", examples, "hash", "source", "prompts")


def test_auto_keeps_what_the_data_set_has() -> None:
    data = of(CHAT, TWO, TEXT)
    assert as_prompts(data, "auto", WITH) == data


def test_auto_gives_single_messages_to_a_model_without_a_template_as_texts() -> None:
    chat, text = as_prompts(of(CHAT, TEXT), "auto", WITHOUT)
    assert (chat.prompt, text.prompt) == ("Why?", "def f(")
    with pytest.raises(InvalidParameterError, match=r"'two' is a conversation.*prompts='text'"):
        as_prompts(of(TWO), "auto", WITHOUT)


def test_chat_makes_conversations() -> None:
    _, text = as_prompts(of(CHAT, TEXT), "chat", WITH)
    assert text.prompt == ({"role": "user", "content": "def f("},)
    with pytest.raises(InvalidParameterError, match="base has no chat template"):
        as_prompts(of(TEXT), "chat", WITHOUT)


def test_text_keeps_the_first_message_alone() -> None:
    (two,) = as_prompts(of(TWO), "text", WITH)
    assert (two.prompt, two.later) == ("Why?", ())


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A module ``datasets`` whose answer can be set."""
    answer: dict[str, Any] = {"rows": [], "calls": []}

    def load_dataset(*arguments: Any, **keywords: Any) -> Any:
        answer["calls"].append((arguments, keywords))
        if isinstance(answer["rows"], Exception):
            raise answer["rows"]
        return answer["rows"]

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return answer


def test_hub_fields_and_configurations(hub: dict[str, Any]) -> None:
    hub["rows"] = [{"text": "one", "label": 1}, {"text": "two", "label": 0}]
    data = read_data("hf:owner/name@main:test:text")
    assert hub["calls"] == [(("owner/name", "main"), {"split": "test"})]
    assert [each.prompt for each in data] == ["one", "two"]
    assert data.examples[0].extra == {"label": 1}
    hub["rows"] = [{"text": "one", "label": 1}, {"text": "three", "label": 0}]
    assert read_data("hf:owner/name@main:test:text").sha256 != data.sha256


def test_hub_layouts_without_a_field(hub: dict[str, Any]) -> None:
    hub["rows"] = [{"question": "1+1?", "answer": "#### 2"}]
    assert read_data("hf:openai/gsm8k@main:test").layout == "gsm8k"


def test_hub_errors(hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    hub["rows"] = ConnectionError("Couldn't reach the hub\nmore")
    with pytest.raises(InvalidParameterError, match=r"Couldn't reach the hub; without a network"):
        read_data("hf:name:test:text")
    hub["rows"] = [{"content": "x"}]
    with pytest.raises(InvalidParameterError, match=r"no field 'text'; there are content"):
        read_data("hf:name:test:text")
    with pytest.raises(InvalidParameterError, match="write hf:NAME:SPLIT:FIELD"):
        read_data("hf:name")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InvalidParameterError, match=r"pip install 'outrider\[data\]'"):
        read_data("hf:name:test:text")
