"""schemathesis against a server's ``/openapi.json``: responses as the schema documents them.

    python -m venv runs/peers/schemathesis && runs/peers/schemathesis/bin/pip install schemathesis
    python -m benchmarks.serve_schema                           # 40 requests per route and phase
    python -m benchmarks.serve_schema --max-examples 1000

schemathesis has an environment of its own. It sends bodies that fit the schema and bodies that do
not, and checks status codes, media types, errors' bodies and that wrong bodies are refused. The
check that all bodies that fit are accepted is left out: a schema cannot say that a prompt fits the
context, or that two fields exclude each other. Fails if schemathesis does.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import uvicorn

PROGRAM = Path("runs/peers/schemathesis/bin/schemathesis")
LEFT_OUT = "ignored_auth,positive_data_acceptance"


@contextmanager
def tiny_server() -> Iterator[str]:
    """A server of a tiny random model; its URL."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from tiny_servers import calling_engine

    from outrider.serve.app import create_app
    from outrider.serve.settings import ServerSettings

    app = create_app(calling_engine(context=384), ServerSettings(max_methods=3, request_timeout=60))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="on"))
    thread = Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            thread.join(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def main(arguments: list[str] | None = None) -> int:
    """Runs schemathesis; its exit status."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--max-examples", type=int, default=40)
    options.add_argument("--schemathesis", type=Path, default=PROGRAM)
    given = options.parse_args(arguments)
    if not given.schemathesis.exists():
        print(f"not installed: there is no {given.schemathesis}; the first lines of this file")
        return 2
    with tiny_server() as url:
        command = [str(given.schemathesis), "run", f"{url}/openapi.json", "--no-color"]
        command += ["--phases", "examples,coverage,fuzzing", "--continue-on-failure"]
        command += ["--max-examples", str(given.max_examples), "--request-timeout", "60"]
        command += ["--checks", "all", "--exclude-checks", LEFT_OUT]
        return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
