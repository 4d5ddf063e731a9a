"""HTTPS, other origins, and traces."""

import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from shutil import which
from threading import Thread
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi.testclient import TestClient
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tiny_servers import tiny_engine

from outrider.core.errors import OutriderError
from outrider.serve.app import create_app
from outrider.serve.run import Certificate, _listen, _url
from outrider.serve.settings import ServerSettings

BODY = {"prompt": "hello", "max_tokens": 9, "ignore_eos": True, "temperature": 0.5}
ORIGIN = "https://chat.example.org"
needs_openssl = pytest.mark.skipif(which("openssl") is None, reason="needs openssl")


def certificate(folder: Path, name: str = "a") -> Certificate:
    """A certificate that nobody but its owner has signed."""
    key, cert = folder / f"{name}.key", folder / f"{name}.pem"
    command = f"req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {cert} -days 2 -subj"
    names = ["/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", *command.split(), *names], check=True, capture_output=True)
    return Certificate(str(cert), str(key))


@needs_openssl
def test_https(tmp_path: Path) -> None:
    own = certificate(tmp_path)
    own.check()
    listener = _listen("127.0.0.1", 0)
    config = uvicorn.Config(
        create_app(tiny_engine()), log_config=None, lifespan="on",
        ssl_certfile=own.certfile, ssl_keyfile=own.keyfile,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        url = _url(listener, "https")
        trusted = ssl.create_default_context(cafile=own.certfile)
        with httpx.Client(verify=trusted) as client:
            done = client.post(f"{url}/v1/completions", json=BODY, timeout=60)
            assert done.json()["usage"]["completion_tokens"] == 9
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"{url}/health", timeout=60)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@needs_openssl
def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    own, other = certificate(tmp_path), certificate(tmp_path, "b")
    for bad in (
        Certificate(str(tmp_path / "nothing.pem")),
        Certificate(own.certfile),
        Certificate(own.certfile, other.keyfile),
    ):
        with pytest.raises(OutriderError, match="cannot use the certificate"):
            bad.check()


def test_pages_of_allowed_origins_may_call(client_of: Callable[..., TestClient]) -> None:
    asks = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    asks["Access-Control-Request-Headers"] = "authorization, content-type"
    client = client_of(allowed_origins=(ORIGIN,), api_keys=("secret",))
    asked = client.options("/v1/completions", headers=asks)  # a browser sends it without a key
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in asked.headers["access-control-allow-headers"].lower()
    refused = client.post("/v1/completions", json=BODY, headers={"Origin": ORIGIN})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == ORIGIN  # so that the page reads it
    foreign = client.options("/v1/completions", headers=asks | {"Origin": "https://other.org"})
    assert "access-control-allow-origin" not in foreign.headers


def test_without_allowed_origins_no_page_may_call(client: TestClient) -> None:
    answer = client.post("/v1/completions", json=BODY, headers={"Origin": ORIGIN})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def traced(requests: Callable[[TestClient], Any]) -> list[Any]:
    """The spans of some requests."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    app = create_app(tiny_engine(), ServerSettings(model_name="model"), provider)
    with TestClient(app, raise_server_exceptions=False) as client:
        requests(client)
    return list(exporter.get_finished_spans())


@pytest.mark.parametrize("stream", [False, True])
def test_a_span_per_request(stream: bool) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace}-{parent}-01"}
    (span,) = traced(
        lambda client: client.post(
            "/v1/completions", json=BODY | {"stream": stream, "n": 2}, headers=headers
        )
    )
    assert span.name == "POST /v1/completions"
    assert f"{span.context.trace_id:x}" == trace.lstrip("0")
    assert f"{span.parent.span_id:x}" == parent
    told = span.attributes
    assert told["gen_ai.request.model"] == "model"
    assert told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.usage.output_tokens"] == 18
    assert told["gen_ai.response.finish_reasons"] == ("length", "length")
    assert told["http.response.status_code"] == 200
    assert told["outrider.method"] == "speculative"
    assert 0 <= told["outrider.accepted_tokens"] <= told["outrider.drafted_tokens"]
    assert told["gen_ai.response.time_to_first_chunk"] > 0
    assert not [value for value in told.values() if "hello" in str(value)]


def test_spans_of_errors_and_none_of_the_server_itself() -> None:
    def requests(client: TestClient) -> None:
        client.get("/health")
        client.get("/metrics")
        client.post("/v1/completions", json={})
        client.get("/v1/nothing")

    spans = traced(requests)
    assert [span.name for span in spans] == ["POST /v1/completions", "GET"]
    assert [span.attributes["http.response.status_code"] for span in spans] == [400, 404]
