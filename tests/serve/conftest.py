"""Servers inside the process."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tiny_servers import tiny_engine

from outrider import Engine
from outrider.serve.app import create_app
from outrider.serve.settings import ServerSettings


@pytest.fixture
def client_of() -> Iterator[Callable[..., TestClient]]:
    """Makes a client of a server that runs until the test ends."""
    with ExitStack() as stack:

        def make(engine: Engine | None = None, **settings: Any) -> TestClient:
            app = create_app(engine or tiny_engine(), ServerSettings(**settings))
            return stack.enter_context(TestClient(app, raise_server_exceptions=False))

        yield make


@pytest.fixture
def client(client_of: Callable[..., TestClient]) -> TestClient:
    """A client of a server with the default settings."""
    return client_of()
