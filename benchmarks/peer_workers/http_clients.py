"""Clients of a server with OpenAI's interface, in a process of their own.

    python -m benchmarks.peer_workers.http_clients http://127.0.0.1:8000 '{"cache_prompt": false}'

The second argument is sent with every request. Each client sends one request after the other, as
streams.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx

from benchmarks.peer_workers.protocol import Batch, serve


class HttpClients:
    """The clients.

    Args:
        url: of the server, without ``/v1``.
        more: fields of each request.
    """

    def __init__(self, url: str, more: dict[str, Any]) -> None:
        self._url = url
        self._more = more

    def decode_all(self, prompts: Sequence[Sequence[int]], clients: int, num_tokens: int) -> Batch:
        body = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, **self._more}
        return Batch(asyncio.run(self._run(list(prompts), clients, body)))

    def close(self) -> None:
        pass

    async def _run(self, waiting: list[Sequence[int]], clients: int, body: dict[str, Any]) -> float:
        limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
        async with httpx.AsyncClient(base_url=self._url, timeout=None, limits=limits) as http:

            async def client() -> None:
                while waiting:
                    request = {**body, "prompt": list(waiting.pop(0)), "stream": True}
                    try:
                        await complete(request)
                    except httpx.RemoteProtocolError:
                        await complete(request)  # a server may close a connection between requests

            async def complete(request: dict[str, Any]) -> None:
                async with http.stream("POST", "/v1/completions", json=request) as response:
                    if response.status_code != 200:
                        raise RuntimeError((await response.aread()).decode())
                    output = b"".join([part async for part in response.aiter_bytes()])
                    if b'"length"' not in output:  # the finish reason of a whole output
                        raise RuntimeError(f"an output ended early: {output[-300:].decode()}")

            await http.get("/health")
            began = time.perf_counter()
            await asyncio.gather(*[client() for _ in range(clients)])
            return time.perf_counter() - began


if __name__ == "__main__":
    serve(HttpClients(sys.argv[1], json.loads(sys.argv[2])))
