"""Clients of a server with OpenAI's interface, in a process of their own.

    python -m benchmarks.peer_workers.http_clients http://127.0.0.1:8000 '{"cache_prompt": false}'

The second argument is sent with every request. Each client sends one request after the other, as
streams. The clients read bytes and parse no event, since what they do may take the processor from
the server: a client library takes several milliseconds per request.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from benchmarks.peer_workers.protocol import Batch, serve

END = b"\r\n0\r\n\r\n"  # of a body in chunks, which no event ends with


class HttpClients:
    """The clients.

    Args:
        url: of the server, without ``/v1``.
        more: fields of each request.
    """

    def __init__(self, url: str, more: dict[str, Any]) -> None:
        self._address = urlsplit(url)
        self._more = more
        self._shares_processor = len(os.sched_getaffinity(0)) == 1

    def decode_all(self, prompts: Sequence[Sequence[int]], clients: int, num_tokens: int) -> Batch:
        body = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, **self._more}
        bodies = [{**body, "prompt": list(prompt), "stream": True} for prompt in prompts]
        waiting = [self._request(each) for each in bodies]
        return asyncio.run(self._run(waiting, clients))

    def close(self) -> None:
        pass

    def _request(self, body: dict[str, Any]) -> bytes:
        document = json.dumps(body).encode()
        head = [
            "POST /v1/completions HTTP/1.1",
            f"Host: {self._address.netloc}",
            "Content-Type: application/json",
            f"Content-Length: {len(document)}",
        ]
        return "\r\n".join([*head, "", ""]).encode() + document

    async def _run(self, waiting: list[bytes], clients: int) -> Batch:
        began, spent = time.perf_counter(), time.process_time()
        await asyncio.gather(*[self._client(waiting) for _ in range(clients)])
        seconds, spent = time.perf_counter() - began, time.process_time() - spent
        return Batch(seconds, spent if self._shares_processor else 0.0)

    async def _client(self, waiting: list[bytes]) -> None:
        connection = _Connection(self._address.hostname, self._address.port)
        try:
            while waiting:
                output = await connection.answer(waiting.pop(0))
                if b'"length"' not in output:  # the finish reason of a whole output
                    raise RuntimeError(f"an output ended early: {output[-300:].decode()}")
        finally:
            await connection.close()


class _Connection:
    """A connection that is kept, and opened anew where the server has closed it."""

    def __init__(self, host: str | None, port: int | None) -> None:
        self._host = host
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def answer(self, request: bytes) -> bytes:
        """The body of the response; raises RuntimeError with it if the status is not 200."""
        try:
            return await self._answer(request)
        except (asyncio.IncompleteReadError, ConnectionError):
            await self.close()
            return await self._answer(request)

    async def close(self) -> None:
        if self._streams is not None:
            _, writer = self._streams
            self._streams = None
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)

    async def _answer(self, request: bytes) -> bytes:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=2**24)
        reader, writer = self._streams
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        fields = dict(line.split(": ", 1) for line in head[1:] if ": " in line)
        if "content-length" in fields:
            body = await reader.readexactly(int(fields["content-length"]))
        else:
            body = await _chunks(reader)
        if head[0].split()[1] != "200":
            raise RuntimeError(body.decode())
        return body


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    """A body in chunks, with the lines that part them."""
    parts = [b"\r\n"]
    tail = b""
    while not tail.endswith(END):
        part = await reader.read(2**16)
        if not part:
            raise asyncio.IncompleteReadError(b"".join(parts), None)
        parts.append(part)
        tail = (tail + part)[-len(END) :]
    return b"".join(parts)


if __name__ == "__main__":
    serve(HttpClients(sys.argv[1], json.loads(sys.argv[2])))
