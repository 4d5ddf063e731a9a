"""Property: whatever the body, the status is one of the documented ones and no row stays."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from tiny_servers import calling_engine

from benchmarks.serve_fuzz import DOCUMENTED, PATHS, check, earlier_parts, requests
from outrider.serve.app import create_app
from outrider.serve.settings import ServerSettings


@pytest.fixture(scope="module")
def server() -> Iterator[TestClient]:
    app = create_app(calling_engine(context=384), ServerSettings(max_methods=3))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(requests())
def test_only_documented_status_codes(server: TestClient, request_: tuple[str, Any]) -> None:
    check(server, *request_)
    assert server.app.state.service.num_open == 0  # type: ignore[attr-defined]


def test_the_schema_documents_the_statuses_that_may_occur(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    for path in PATHS:
        responses = paths[path]["post"]["responses"]
        told = {int(status) for status in responses}
        assert "422" not in responses
        assert {200, 400, 401, 404, 413} <= told
        for status in told - {200}:
            schema = responses[str(status)]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/ErrorResponse"}
    generating = paths["/v1/chat/completions"]["post"]["responses"]
    assert {int(status) for status in generating} == DOCUMENTED | {401, 500}
    assert "text/event-stream" in generating["200"]["content"]
    assert "text/plain" in paths["/metrics"]["get"]["responses"]["200"]["content"]


def test_an_interrupted_run_goes_on_and_a_finished_one_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "fuzz.json"
    assert earlier_parts(path, 0, 2) == []
    path.write_text(json.dumps({"seed": 0, "parts": [{"statuses": {}}]}))
    assert len(earlier_parts(path, 0, 2)) == 1
    assert earlier_parts(path, 1, 2) == []  # another seed
    assert earlier_parts(path, 0, 1) == []
