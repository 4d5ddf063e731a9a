"""``outrider serve`` in a process of its own: it starts, and SIGTERM lets it finish what runs."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import Result

Run = Callable[..., Result]


@pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal")
def test_sigterm_finishes_what_runs(pair: tuple[Path, Path]) -> None:
    """The signal arrives behind the first piece of a stream, of which the rest still comes."""
    target, draft = pair
    program = "from outrider.cli import main; main()"
    models = ("--draft", str(draft), "--dtype", "float32", "--device", "cpu")
    server = subprocess.Popen(
        [sys.executable, "-c", program, "serve", str(target), *models, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert server.stderr is not None
        first = server.stderr.readline()
        assert first.startswith("serving target by method speculative at http://127.0.0.1:")
        url = first.split(" at ")[1].split(": ")[0]
        body = {"prompt": "def f3(x):", "max_tokens": 60, "stream": True, "ignore_eos": True}
        body |= {"stream_options": {"include_usage": True}}
        with httpx.stream("POST", f"{url}/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            server.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 60
        _, log = server.communicate(timeout=120)
        assert server.returncode == 0
        events = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
        (line,) = [each for each in events if each["event"] == "request"]
        assert line["completion_tokens"] == 60
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["embedded", "--speculation-metrics", "all"], "must be summary or detailed"),
        (["a", "--target", "b", "--draft", "c"], "name the target once"),
        (["--api-key", ""], "empty key"),
        (["--max-body-size", "much"], "--max-body-size much: must be a number of bytes"),
        (["nobody/nothing"], "needs a draft model"),
        (["--ssl-keyfile", "key.pem"], "set --ssl-certfile, too"),
        (["--ssl-certfile", "nothing.pem"], "cannot use the certificate nothing.pem"),
        (["--allowed-origins", "chat.example.org"], "must be * or a scheme and a host"),
        (["--allowed-origins", "https://a.org/page"], "must be * or a scheme and a host"),
    ],
)
def test_wrong_options(run: Run, options: list[Any], message: str) -> None:
    done = run("serve", *options)
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_port_that_is_taken(run: Run, pair: tuple[Path, Path]) -> None:
    from outrider.serve.run import _listen

    target, draft = pair
    listener = _listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    done = run("serve", str(target), "--draft", str(draft), "--port", port)
    listener.close()
    assert done.exit_code == 2
    assert f"cannot listen at 127.0.0.1:{port}" in done.stderr


def test_without_the_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.cli.serve.find_spec", lambda name: None)
    done = run("serve")
    assert done.exit_code == 2
    assert "pip install 'outrider[serve]'" in done.stderr
