"""The official client against a real server on the loopback interface."""

import asyncio
from collections.abc import Iterator
from threading import Thread
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import uvicorn
from tiny_servers import tiny_engine

from outrider import Engine, Sampling
from outrider.serve.app import create_app
from outrider.serve.run import _listen, _url
from outrider.serve.settings import ServerSettings

KEY = "secret"
MESSAGES = [{"role": "user", "content": "print(hello)"}]
EXTRA = {"ignore_eos": True}


@pytest.fixture(scope="module")
def served() -> Iterator[SimpleNamespace]:
    engine = tiny_engine()
    listener = _listen("127.0.0.1", 0)
    app = create_app(engine, ServerSettings(api_keys=(KEY,)))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
    thread = Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    url = _url(listener)
    yield SimpleNamespace(url=url, reference=tiny_engine(), service=app.state.service)
    server.should_exit = True
    thread.join()
    listener.close()


@pytest.fixture
def client(served: SimpleNamespace) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def expected(engine: Engine, prompt: Any, **settings: Any) -> str:
    return engine.generate([prompt], Sampling(ignore_eos=True, **settings))[0].text


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_completions_are_the_engines_own(
    client: openai.OpenAI, served: SimpleNamespace, temperature: float
) -> None:
    prompts = ["def f(x):", "hello"]
    done = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=12, temperature=temperature, seed=5,
        extra_body=EXTRA,
    )  # fmt: skip
    settings = {"temperature": temperature, "seed": 5, "max_new_tokens": 12}
    assert [choice.text for choice in done.choices] == [
        expected(served.reference, prompt, **settings) for prompt in prompts
    ]
    assert [choice.index for choice in done.choices] == [0, 1]
    assert done.usage is not None
    assert done.usage.completion_tokens == 24
    assert {choice.finish_reason for choice in done.choices} == {"length"}


def test_a_stream_adds_up_to_the_whole(client: openai.OpenAI, served: SimpleNamespace) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=15, seed=1, stream=True, n=2,
        stream_options={"include_usage": True}, logprobs=True, top_logprobs=2, extra_body=EXTRA,
    )  # fmt: skip
    texts, reasons, tokens, usage = ["", ""], [None, None], [0, 0], None
    for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            tokens[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
    assert texts[0] == expected(served.reference, MESSAGES, seed=1, max_new_tokens=15)
    assert texts[1] != texts[0]
    assert reasons == ["length", "length"]
    assert tokens == [15, 15]
    assert usage is not None
    assert usage.completion_tokens == 30


def test_responses(client: openai.OpenAI, served: SimpleNamespace) -> None:
    settings = {"model": "tiny", "input": "print(hello)", "max_output_tokens": 9}
    extra = EXTRA | {"seed": 2}
    whole = client.responses.create(**settings, extra_body=extra)
    assert whole.output_text == expected(served.reference, MESSAGES, seed=2, max_new_tokens=9)
    assert whole.status == "incomplete"
    assert whole.usage is not None
    assert whole.usage.output_tokens == 9
    events = list(client.responses.create(**settings, extra_body=extra, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == (
        whole.output_text
    )
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [e.type for e in events if "delta" not in e.type] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.incomplete",
    ]  # fmt: skip


def test_a_predicted_output_is_copied(client: openai.OpenAI, served: SimpleNamespace) -> None:
    settings: Any = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 20,
                     "temperature": 0, "extra_body": EXTRA}  # fmt: skip
    ids = served.reference.encode(MESSAGES)
    sampling = Sampling(temperature=0, max_new_tokens=20, ignore_eos=True)
    text = served.reference.generate([ids], sampling)[0].text
    done = client.chat.completions.create(
        **settings, prediction={"type": "content", "content": "def f(x):\n    return x + 1\n"}
    )
    assert done.choices[0].message.content == text
    counts = done.usage.completion_tokens_details
    assert counts.rejected_prediction_tokens > 0
    without = client.chat.completions.create(**settings)
    assert without.usage.completion_tokens_details.rejected_prediction_tokens == 0


def test_asynchronous_clients_share_batches(served: SimpleNamespace) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY) as client:

            async def one(number: int) -> str:
                stream = await client.completions.create(
                    model="tiny", prompt=f"def f{number}", max_tokens=24, temperature=0.9,
                    seed=number, stream=True, extra_body=EXTRA,
                )  # fmt: skip
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*[one(number) for number in range(20)])

    found = asyncio.run(run())
    for number, text in enumerate(found):
        settings = {"temperature": 0.9, "seed": number, "max_new_tokens": 24}
        assert text == expected(served.reference, f"def f{number}", **settings)


def test_errors_are_the_clients_own(client: openai.OpenAI, served: SimpleNamespace) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong").models.list()


def test_leaving_a_stream_frees_its_row(client: openai.OpenAI, served: SimpleNamespace) -> None:
    """Nothing stays of it; ``test_operation.py`` counts the rounds until then."""
    stream = client.completions.create(
        model="tiny", prompt=[[5]] * 8, max_tokens=126, stream=True, extra_body=EXTRA
    )
    next(iter(stream))
    stream.close()
    worker = served.service.worker
    for _ in range(50):
        client.completions.create(model="tiny", prompt="x", max_tokens=1)
        if served.service.num_open == 0:
            break
    assert served.service.num_open == 0
    assert worker.num_running == worker.num_waiting == 0
