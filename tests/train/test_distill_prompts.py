"""Prompts from files and folders, and those that the target writes itself."""

import json

import pytest
from tiny_distillation import target, tokenizer

from outrider.core.errors import InvalidParameterError, PromptError
from outrider.train.distill import self_prompts
from outrider.train.distill.answers import ground_truth, plain_engine
from outrider.train.distill.prompts import Reader, distinct, split
from outrider.train.distill.self_prompts import user_turn, write_prompts


def reader(chat=True, **settings):
    return Reader(tokenizer(chat), "target", **settings)


def text_of(tokens):
    return tokenizer().decode(list(tokens))


def write(tmp_path, name, lines):
    path = tmp_path / name
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return path


def test_a_string_is_a_users_message_if_the_target_chats(tmp_path):
    path = write(tmp_path, "p.txt", ["print(x)", "", "  print(x) ", "return y"])
    texts = {text_of(prompt.tokens) for prompt in reader().read(path)}
    assert texts == {"<user>print(x)<eos><assistant>", "<user>return y<eos><assistant>"}
    plain = {text_of(prompt.tokens) for prompt in reader(as_text=True).read(path)}
    assert (
        plain
        == {"print(x)", "return y"}
        == {text_of(prompt.tokens) for prompt in reader(chat=False).read(path)}
    )


def test_json_lines_of_every_form(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "print(w)"}]
    path = write(
        tmp_path,
        "p.jsonl",
        [
            '"print(x)"',
            {"prompt": "print(y)", "answer": "return y"},
            {"messages": [*chat, {"role": "assistant", "content": "hello"}]},
            chat[1:],
        ],
    )
    found = {text_of(p.tokens): p.answer for p in reader().read(path)}
    answers = {
        prompt: None if answer is None else text_of(answer) for prompt, answer in found.items()
    }
    assert answers == {
        "<user>print(x)<eos><assistant>": None,
        "<user>print(y)<eos><assistant>": "return y<eos>",
        "<system>Be brief.<eos><user>print(w)<eos><assistant>": "hello<eos>",
        "<user>print(w)<eos><assistant>": None,
    }


def test_the_loss_is_on_the_answer_alone(tmp_path):
    path = write(tmp_path, "p.jsonl", [{"prompt": "print(y)", "answer": "return y"}])
    (prompt,) = reader().read(path)
    (sample,) = ground_truth([prompt], 64)
    assert text_of(sample.tokens[: sample.first]) == "<user>print(y)<eos><assistant>"
    assert text_of(sample.tokens[sample.first :]) == "return y<eos>"


def test_a_template_that_rewrites_the_conversation_has_no_answer_tokens(tmp_path):
    words = tokenizer()
    words.chat_template = "{{ messages | length }}{{ messages[-1]['content'] }}"
    path = write(tmp_path, "p.jsonl", [{"prompt": "x", "answer": "y"}])
    with pytest.raises(PromptError, match="differently once it has its answer"):
        Reader(words, "target").read(path)


def test_documents_are_windows_of_which_the_first_tokens_are_the_prompt(tmp_path):
    text = "".join(f"print({i})\n" for i in range(30))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text(text)
    (tmp_path / "copy.txt").write_text(text)
    (tmp_path / "ignored.bin").write_text("x" * 500)
    found = reader(window=40, prompt_tokens=8).read(tmp_path)
    ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert len(found) in (len(ids) // 40, len(ids) // 40 + 1)
    assert {len(prompt.tokens) for prompt in found} == {8}
    assert len({prompt.key for prompt in found}) == 1  # a document is not divided between splits
    joined = {prompt.tokens + prompt.answer for prompt in found}
    assert tuple(ids[:40]) in joined


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no prompts"),
        (["{"], "line 1: not JSON"),
        (['"x"', "7"], "line 2: 7 is no prompt"),
        ([{"prompt": "x", "answer": 3}], "answer=3: must be a string"),
        ([[{"role": "user"}]], "must be a string"),
    ],
)
def test_a_file_without_prompts(tmp_path, lines, message):
    with pytest.raises(PromptError, match=message):
        reader().read(write(tmp_path, "p.jsonl", lines))


def test_a_path_without_prompts(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b"\xe9")
    with pytest.raises(InvalidParameterError, match=r"p\.jsonl is not UTF-8 text \(byte 0\)"):
        reader().read(tmp_path / "p.jsonl")
    with pytest.raises(PromptError, match="no such file or folder"):
        reader().read(tmp_path / "nothing.txt")
    with pytest.raises(PromptError, match=r"holds no text files .* nothing to train on"):
        reader().read(tmp_path)


def test_a_conversation_needs_a_chat_template(tmp_path):
    path = write(tmp_path, "p.jsonl", [[{"role": "user", "content": "hello"}]])
    with pytest.raises(PromptError, match="has no chat template"):
        reader(chat=False).read(path)


def test_prompts_without_answers_are_no_ground_truth(tmp_path):
    found = reader().read(write(tmp_path, "p.txt", ["hello"]))
    with pytest.raises(PromptError, match=r"none of 1 prompts .* there is no ground truth"):
        ground_truth(found, 64)


def test_a_prompt_stays_in_its_split_when_others_join():
    read = reader(as_text=True)
    first = distinct(read.encode(f"prompt {i}") for i in range(400))
    train, held_out = split(first)
    assert (
        8 <= len(held_out) <= 40
    )  # one in twenty; outside with probability 1e-4 for a random hash
    assert len(train) + len(held_out) == 400
    more = distinct([*first, *(read.encode(f"other {i}") for i in range(100))])
    again, held_again = split(more)
    assert {p.key for p in held_out} <= {p.key for p in held_again}
    assert {p.key for p in train} <= {p.key for p in again}


def test_few_prompts_are_split_too():
    read = reader(as_text=True)
    few = distinct(read.encode(f"prompt {i}") for i in range(10))
    train, held_out = split(few)
    assert len(held_out) >= 2
    assert not {p.key for p in train} & {p.key for p in held_out}
    with pytest.raises(PromptError, match="leave nothing to train on"):
        split(few[:1])


def test_the_target_writes_prompts_after_an_empty_user_turn(tmp_path):
    engine = plain_engine(target(), 32)
    assert text_of(user_turn(engine.target.tokenizer, "target")) == "<user>"
    told = []
    found = write_prompts(engine, 20, 0, tmp_path, lambda *what: told.append(what))
    assert len(set(found)) == len(found) == 20
    assert told[-1][1:] == (20, 20)
    assert "<eos>" not in "".join(found)
    assert write_prompts(engine, 20, 0, tmp_path) == found


def test_prompts_are_kept_between_interrupted_calls(tmp_path, monkeypatch):
    engine = plain_engine(target(), 32)
    write_prompts(engine, 20, 0, tmp_path)
    monkeypatch.setattr(engine, "generate", lambda *_, **__: pytest.fail("was kept"))
    assert len(write_prompts(engine, 20, 0, tmp_path)) == 20


def test_a_target_that_cannot_write_prompts(tmp_path):
    with pytest.raises(PromptError, match="has no chat template, so it cannot write prompts"):
        write_prompts(plain_engine(target(chat=False), 8), 4, 0, tmp_path)
    words = tokenizer()
    words.chat_template = "always the same"
    with pytest.raises(PromptError, match="writes nothing before a user's message"):
        user_turn(words, "target")


def test_a_target_that_finishes_too_few_prompts(tmp_path, monkeypatch):
    """A message of one token is finished only if it is empty."""
    monkeypatch.setattr(self_prompts, "MESSAGE_TOKENS", 1)
    with pytest.raises(PromptError, match="finished only 0 distinct messages in 64 attempts"):
        write_prompts(plain_engine(target(), 64), 16, 0, tmp_path)
