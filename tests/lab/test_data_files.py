"""Data files: each layout as published, and each error with its line."""

import gzip
import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from outrider.core.errors import InvalidParameterError
from outrider.lab.data import builtin_names, chosen, read_data

Write = Callable[..., str]

SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite it."]},
    {
        "question_id": 101,
        "category": "reasoning",
        "turns": ["Who is first?", "And last?"],
        "reference": ["Ann.", "Bob."],
    },
    {
        "question_id": 200,
        "category": "translation",
        "turns": ["Translate German to English: Hallo"],
        "reference": ["Hello"],
    },
]
SPEED_BENCH = {
    "question_id": "a1",
    "category": "coding",
    "sub_category": "python",
    "turns": ["Sort a list."],
    "source": "somewhere",
    "src_id": "7",
    "difficulty": "",
    "multiturn": False,
}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def one():\n",
    "entry_point": "one",
    "canonical_solution": "    return 1\n",
    "test": "def check(candidate):\n    assert candidate() == 1\n",
}
GSM8K = {"question": "What is 1,000 + 1?", "answer": "1,000+1=<<1000+1=1001>>.\n#### 1,001"}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes records as JSON lines, or a text as it is; returns the path."""

    def call(name: str, content: Any) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(record) + "\n" for record in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return call


def test_json_lines_with_prompts(write: Write) -> None:
    """A line separator that is no line break in JSON stays within its prompt."""
    text = "one\u2028two"
    source = write(
        "mine.jsonl",
        '\n{"prompt": "' + text + '", "reference": "r", "task": "t", "level": 3}\n'
        '{"prompt": "b", "id": "x"}\n',
    )
    data = read_data(source)
    first, second = data
    assert (first.prompt, first.reference, first.task, first.id) == (text, "r", "t", "0")
    assert first.extra == {"level": 3}
    assert (second.prompt, second.reference, second.id) == ("b", None, "x")
    assert (data.name, data.layout) == ("mine", "prompts")
    assert data.sha256 == sha256(Path(source).read_bytes()).hexdigest()


def test_conversations(write: Write) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    (example,) = read_data(write("a.jsonl", [{"messages": messages, "reference": "Hello"}]))
    assert example.messages == tuple(messages)
    assert example.reference == "Hello"


def test_spec_bench_counts_the_categories_of_mt_bench_as_one_task(write: Write) -> None:
    data = read_data(write("spec_bench/question.jsonl", SPEC_BENCH))
    assert (data.name, data.layout) == ("spec_bench", "spec-bench")
    assert [each.task for each in data] == ["mt_bench", "mt_bench", "translation"]
    assert [each.extra["category"] for each in data] == ["writing", "reasoning", "translation"]
    writing, reasoning, translation = data
    assert writing.messages == ({"role": "user", "content": "Write."},)
    assert [turn.text for turn in writing.later] == ["Rewrite it."]
    assert (writing.reference, writing.later[0].reference) == (None, None)
    assert (reasoning.reference, reasoning.later[0].reference) == ("Ann.", "Bob.")
    assert (translation.reference, translation.later) == ("Hello", ())
    assert data.num_turns == 5


def test_references_with_alternatives_and_empty_ones(write: Write) -> None:
    rag = {**SPEC_BENCH[2], "category": "rag", "reference": [["one", "two"]]}
    stem = {**SPEC_BENCH[0], "category": "stem", "reference": ["The radius grows.", ""]}
    first, second = read_data(write("question.jsonl", [rag, stem]))
    assert first.reference == "one"
    assert first.extra["reference"] == [["one", "two"]]
    assert (second.reference, second.later[0].reference) == ("The radius grows.", None)


@pytest.mark.parametrize("place", ["reference_answer/gpt-4", "reference_answer_gpt-4"])
def test_mt_bench_has_its_reference_answers_beside_it(write: Write, place: str) -> None:
    name = "mt_bench/question.jsonl"
    before = read_data(write(name, SPEC_BENCH[:2]))
    answers = [
        {"question_id": 81, "choices": [{"index": 0, "turns": ["A text.", 7]}]},
        {"question_id": 101, "choices": [{"index": 0, "turns": ["Not this."]}]},
    ]
    file = Path(write(f"mt_bench/{place}.jsonl", answers))
    data = read_data(write(name, SPEC_BENCH[:2]))
    writing, reasoning = data
    assert (writing.reference, writing.later[0].reference) == ("A text.", "7")
    assert (reasoning.reference, reasoning.later[0].reference) == ("Ann.", "Bob.")
    assert data.sha256 != before.sha256
    file.write_text('{"question_id": 81, "choices": []}\n')
    with pytest.raises(InvalidParameterError, match=r"gpt-4.jsonl', line 1: a reference answer"):
        read_data(write(name, SPEC_BENCH[:2]))


def test_mt_bench_keeps_its_categories(write: Write) -> None:
    data = read_data(write("question.jsonl", SPEC_BENCH[:2]))
    assert [each.task for each in data] == ["writing", "reasoning"]
    vicuna = {"question_id": 1, "category": "generic", "turns": ["Why?"]}
    data = read_data(write("question.jsonl", [vicuna, SPEC_BENCH[0]]))
    assert [each.task for each in data] == ["generic", "writing"]


def test_the_next_turn_has_the_answer_before_it(write: Write) -> None:
    _, example, _ = read_data(write("question.jsonl", SPEC_BENCH))
    second = example.after("Carl.")
    assert [message["content"] for message in second.messages] == [
        "Who is first?",
        "Carl.",
        "And last?",
    ]
    assert [message["role"] for message in second.messages] == ["user", "assistant", "user"]
    assert (second.reference, second.later) == ("Bob.", ())


def test_speed_bench(write: Write) -> None:
    (example,) = read_data(write("qualitative.jsonl", [SPEED_BENCH]))
    assert (example.task, example.id) == ("coding", "a1")
    assert example.extra["sub_category"] == "python"


def test_speed_bench_as_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "test-00000-of-00001.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([SPEED_BENCH]), path)
    data = read_data(str(path))
    assert data.layout == "speed-bench"
    assert data.examples[0].messages[0]["content"] == "Sort a list."


def test_placeholders_of_speed_bench_are_an_error(write: Write) -> None:
    hole = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    source = write("a.jsonl", [SPEED_BENCH, {**SPEED_BENCH, "turns": [hole]}])
    with pytest.raises(InvalidParameterError, match=r"line 2: .*placeholder.*prepare_data\.py"):
        read_data(source)


def test_humaneval_compressed(write: Write) -> None:
    content = gzip.compress(json.dumps(HUMANEVAL).encode())
    data = read_data(write("HumanEval.jsonl.gz", content))
    (example,) = data
    assert (data.name, data.layout) == ("HumanEval", "humaneval")
    assert (example.prompt, example.reference) == ("def one():\n", "    return 1\n")
    assert (example.id, example.extra["entry_point"]) == ("HumanEval/0", "one")
    assert data.sha256 == sha256(content).hexdigest()


def test_gsm8k(write: Write) -> None:
    (example,) = read_data(write("gsm8k/test.jsonl", [GSM8K]))
    assert example.messages[0]["content"] == GSM8K["question"]
    assert example.reference == GSM8K["answer"]
    assert example.extra == {"answer": "1001"}


def test_csv_with_quotes_and_line_breaks(write: Write) -> None:
    data = read_data(write("a.csv", 'act,prompt\nx,"one ""two""\nthree"\ny,four\n'))
    assert [each.prompt for each in data] == ['one "two"\nthree', "four"]
    assert data.examples[0].extra == {"act": "x"}


def test_text_has_a_prompt_per_line(write: Write) -> None:
    data = read_data(write("a.txt", "  one\r\n\n two \n"))
    assert [each.prompt for each in data] == ["  one", " two "]


@pytest.mark.parametrize("name", builtin_names())
def test_builtin_sets(name: str) -> None:
    data = read_data(f"builtin:{name}")
    assert (data.name, data.layout) == (name, "prompts")
    assert len(data) >= 6
    assert {each.task for each in data} == {name}
    assert all(each.reference for each in data) == (name == "copy")


def test_a_limit_spreads_over_each_task(write: Write) -> None:
    rows = [{"prompt": f"{task}{i}", "task": task} for task in "ab" for i in range(6)]
    data = read_data(write("a.jsonl", rows))
    assert [each.prompt for each in chosen(data, limit=2)] == ["a0", "a3", "b0", "b3"]
    assert [each.prompt for each in chosen(data, ["b"], 1)] == ["b0"]
    assert chosen(data, limit=9).examples == data.examples
    with pytest.raises(InvalidParameterError, match=r"no such task; it has a, b"):
        chosen(data, ["c"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "x"}\n{"prompt"', r"line 2: no JSON"),
        ("a.jsonl", "[1]\n", r"line 1: a JSON list, where an object is needed"),
        ("a.jsonl", '{"text": "x"}\n', r"line 1: fields text: no layout"),
        ("a.jsonl", '{"prompt": "x"}\n\n{"text": "x"}\n', r"line 3: no field 'prompt'"),
        ("a.jsonl", '{"prompt": ""}\n', r"line 1: 'prompt' is ''"),
        ("a.jsonl", '{"prompt": 5}\n', r"line 1: 'prompt' is 5"),
        ("a.jsonl", '{"prompt": "x", "reference": 5}\n', r"line 1: 'reference' is 5"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}\n', r"line 1: messages\[0\]\['content'\]"),
        ("a.jsonl", '{"messages": []}\n', r"line 1: the conversation has no messages"),
        ("a.jsonl", [SPEC_BENCH[0], {"question_id": 1, "turns": ["x"]}], r"line 2: .*'category'"),
        ("a.jsonl", [{**SPEC_BENCH[0], "turns": []}], r"line 1: 'turns' is empty"),
        ("a.jsonl", [{**SPEC_BENCH[0], "turns": "x"}], r"line 1: 'turns' is 'x': must be a list"),
        (
            "a.jsonl",
            [{**SPEC_BENCH[1], "reference": [3]}],
            r"line 1: 'reference' is \[3\]: must be",
        ),
        ("a.jsonl", [HUMANEVAL, {"prompt": "x"}], r"line 2: no field 'canonical_solution'"),
        ("a.jsonl", [{"question": "x", "answer": "18"}], r"line 1: 'answer' is '18'.*#### 18"),
        ("a.jsonl", "", r"has no prompts: it is empty"),
        ("a.jsonl", b"\xff\xfe", r"not UTF-8 text \(byte 0\)"),
        ("a.jsonl.gz", b"no gzip", r"not a complete gzip file"),
        ("a.csv", "prompt,task\nx\n", r"line 2: it has not as many fields as the header, 2"),
        ("a.csv", 'prompt\n"x\n', r"line 1: no CSV \(unexpected end"),
        ("a.csv", "text\nx\n", r"line 2: fields text: no layout"),
        ("a.yaml", "x", r"the suffix must be one of \.jsonl, \.csv, \.parquet, \.txt"),
    ],
)
def test_bad_files(write: Write, name: str, content: Any, message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        read_data(write(name, content))


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match=r"cannot read data file .*No such file"):
        read_data(str(tmp_path / "none.jsonl"))
    with pytest.raises(InvalidParameterError, match="there are builtin:code, builtin:copy"):
        read_data("builtin:none")
