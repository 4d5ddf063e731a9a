"""The web page: what is served, and that a browser can use it.

The browser is the system's Chromium, by Playwright; where either is missing, the tests in it are
skipped.
"""

import json
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import pytest
import uvicorn
from fastapi.testclient import TestClient
from tiny_servers import tiny_engine

from outrider import Engine
from outrider.serve.app import create_app
from outrider.serve.page import CONTENT_SECURITY_POLICY, FILES
from outrider.serve.settings import ServerSettings

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
KEY = "secret"


@pytest.mark.parametrize("path", FILES)
def test_is_served_without_a_key_and_names_no_other_host(
    client_of: Callable[..., TestClient], path: str
) -> None:
    answer = client_of(api_keys=(KEY,)).get(path)
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert answer.content
    urls = re.findall(r"(?:https?:)?//[\w.-]+\.\w+", answer.text)
    assert [url for url in urls if not url.endswith("www.w3.org")] == []  # SVG's namespace


def test_the_policy_allows_this_server_alone() -> None:
    sources = [part.split()[1:] for part in CONTENT_SECURITY_POLICY.split(";")]
    assert all(each in (["'self'"], ["'none'"]) for each in sources)


def test_the_page_has_nothing_that_the_policy_forbids(client: TestClient) -> None:
    html = client.get("/").text
    assert re.findall(r"<script(?![^>]*\ssrc=)", html) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=", html) == []


def test_every_control_has_a_label(client: TestClient) -> None:
    html = client.get("/").text
    controls = re.findall(r'<(?:input|select|textarea)[^>]*\sid="([\w-]+)"', html)
    assert len(controls) >= 9
    assert set(controls) <= set(re.findall(r'<label[^>]*\sfor="([\w-]+)"', html))


def test_output_is_never_read_as_html(client: TestClient) -> None:
    script = client.get("/page.js").text
    assert (
        re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script) == []
    )


# ------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs the extra 'browser'")
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page of a server of its own; fails if the page logged an error."""
    closers: list[Callable[[], object]] = []
    errors: list[str] = []

    def open_(engine: Engine, *, width: int = 1280, **settings: Any) -> Any:
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(create_app(engine, ServerSettings(**settings)), log_config=None)
        server = uvicorn.Server(config)
        thread = Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()

        def close() -> None:
            server.should_exit = True
            thread.join()
            listener.close()

        context = browser.new_context(viewport={"width": width, "height": 800})
        closers.extend((close, context.close))
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        return page

    yield open_
    for close in reversed(closers):
        close()
    assert errors == []


def ready(page: Any) -> None:
    page.wait_for_selector("#send:not([disabled])")


def ask(page: Any, prompt: str) -> None:
    """Sends a prompt by the keyboard and waits for the end of the output."""
    ready(page)
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")
    page.wait_for_selector("#status:has-text('Done')", state="attached")


def drafted_token(text: str, parent: int | None, outcome: str) -> dict[str, Any]:
    chance: dict[str, Any] = {"p": 0.5, "q": 0.5, "logprob": -1.0, "acceptance": None}
    return chance | {"token_id": 1, "token": text, "parent": parent, "outcome": outcome}


def answer_with(page: Any, choice: dict[str, Any]) -> None:
    """Answers the page's requests by a stream of one chunk, in place of the server."""
    body = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))


def text_of(page: Any, selector: str) -> str:
    return str(page.text_content(selector))


def test_tokens_are_coloured_and_counted(open_page: Callable[..., Any]) -> None:
    page = open_page(tiny_engine())
    ready(page)
    page.fill("#length", "30")
    page.fill("#seed", "1")
    page.evaluate("document.getElementById('temperature').value = 1")
    ask(page, "hello")
    for origin in ("accepted", "bonus"):
        assert page.query_selector_all(f".message .token.{origin}")
    accepted, drafted = map(int, text_of(page, "#accepted").split(" / "))
    assert 0 < accepted <= drafted
    num_rounds = int(page.get_attribute("#round", "max"))
    assert float(text_of(page, "#per-round")) > 1
    assert accepted < 30 <= accepted + num_rounds


def test_one_round_is_shown_by_click_and_by_keyboard(open_page: Callable[..., Any]) -> None:
    page = open_page(tiny_engine())
    ask(page, "hello")
    page.click(".message .token >> nth=0")
    assert text_of(page, "#round-title").startswith("Round 1 of")
    assert page.query_selector_all(".message .token.chosen")
    rows = page.query_selector_all("#drafted tbody tr")
    assert len(rows) == 5  # γ, and the target's own token
    p, q = (float(cell.text_content()) for cell in rows[0].query_selector_all("td.number"))
    assert 0 <= p <= 1
    assert 0 <= q <= 1
    page.focus("#after")
    page.keyboard.press("Enter")
    assert text_of(page, "#round-title").startswith("Round 2 of")


def test_a_tree_lists_each_token_above_its_descendants(open_page: Callable[..., Any]) -> None:
    page = open_page(tiny_engine())
    ready(page)
    drafted = [
        drafted_token("a", None, "accepted"), drafted_token("b", None, "skipped"),
        drafted_token("a1", 0, "rejected"), drafted_token("b1", 1, "skipped"),
        drafted_token("a2", 0, "rejected"),
    ]  # fmt: skip
    own = {"token_id": 9, "token": "c", "p": 0.5, "logprob": -1.0, "origin": "correction"}
    answer_with(page, {
        "token_ids": [1, 9], "rounds": [{"drafted": drafted, "next": own}],
        "pieces": [{"text": "a", "origin": "accepted"}, {"text": "c", "origin": "correction"}],
    })  # fmt: skip
    ask(page, "hello")
    names = page.eval_on_selector_all("#drafted td.name", "all => all.map(e => e.textContent)")
    assert names == ["a", "a1", "a2", "b", "b1", "c"]
    kinds = page.eval_on_selector_all("#drafted tbody tr", "all => all.map(e => e.className)")
    assert kinds == ["accepted", "rejected", "rejected", "skipped", "skipped", "correction"]
    assert text_of(page, "#accepted") == "1 / 5"


def test_plain_decoding_beside_it(open_page: Callable[..., Any]) -> None:
    page = open_page(tiny_engine())
    ask(page, "hello")
    page.click("#compare")
    page.wait_for_selector("#comparison:has-text('equal')")
    assert float(text_of(page, "#plain-speed")) > 0


def test_escape_stops(open_page: Callable[..., Any]) -> None:
    page = open_page(tiny_engine())
    ready(page)
    page.route("**/v1/chat/completions", lambda route: None)  # never answered
    page.fill("#prompt", "hello")
    page.press("#prompt", "Enter")
    page.wait_for_selector("#stop:not([disabled])")
    page.keyboard.press("Escape")
    page.wait_for_selector("#status:has-text('Stopped.')", state="attached")
    ready(page)


def test_markup_in_an_output_stays_text(open_page: Callable[..., Any]) -> None:
    page = open_page(tiny_engine())
    ready(page)
    markup = "<img src=x onerror=alert(1)>"
    own = {"token_id": 5, "token": markup, "p": 1.0, "logprob": 0.0, "origin": "plain"}
    answer_with(page, {
        "token_ids": [5], "rounds": [{"drafted": [], "next": own}],
        "pieces": [{"text": markup, "origin": "plain"}],
    })  # fmt: skip
    ask(page, "<b>bold</b>")
    assert text_of(page, ".message.user") == "<b>bold</b>"
    assert text_of(page, ".message .token") == markup
    assert text_of(page, "#drafted td.name").startswith("<img")
    assert page.query_selector_all("img, b") == []


def test_an_error_is_shown_and_the_prompt_kept(open_page: Callable[..., Any]) -> None:
    page = open_page(tiny_engine(), max_prompt_tokens=10)
    ready(page)
    page.fill("#prompt", "a long prompt")
    page.press("#prompt", "Enter")
    page.wait_for_selector("#error:not([hidden])")
    assert "reads at most 10" in text_of(page, "#error")
    assert page.input_value("#prompt") == "a long prompt"


def test_the_key_is_asked_for_and_kept(open_page: Callable[..., Any]) -> None:
    page = open_page(tiny_engine(), api_keys=(KEY,))
    page.wait_for_selector("#error:not([hidden])")
    assert "API key" in text_of(page, "#error")
    assert page.evaluate("document.activeElement.id") == "key"
    page.fill("#key", KEY)
    page.press("#key", "Tab")
    ask(page, "hello")
    page.reload()
    ready(page)


def test_a_model_without_a_template_continues_text(open_page: Callable[..., Any]) -> None:
    engine = tiny_engine()
    assert engine.target.tokenizer is not None
    engine.target.tokenizer.chat_template = None
    page = open_page(engine)
    ask(page, "def f(x):")
    assert text_of(page, "#prompt-label") == "Text to continue"
    assert text_of(page, ".message .given") == "def f(x):"


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_window(open_page: Callable[..., Any], width: int) -> None:
    page = open_page(tiny_engine(), width=width)
    ask(page, "hello " * 5)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_colours_follow_the_switch(open_page: Callable[..., Any]) -> None:
    page = open_page(tiny_engine())
    ready(page)
    grounds = []
    for theme in ("light", "dark"):
        page.select_option("#theme", theme)
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds[0] != grounds[1]
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == grounds[1]


def test_every_control_is_reached_by_tab_with_its_focus_visible(
    open_page: Callable[..., Any],
) -> None:
    page = open_page(tiny_engine())
    ask(page, "hello")
    page.focus("#theme")
    reached = []
    for _ in range(30):
        reached.append(page.evaluate("document.activeElement.id"))
        page.keyboard.press("Tab")
        width = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
        assert width != "0px"
    wanted = ["prompt", "clear", "send", "compare", "round", "method", "temperature", "key"]
    assert [each for each in reached if each in wanted][: len(wanted)] == wanted
