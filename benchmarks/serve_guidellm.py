"""guidellm, a load generator for OpenAI's interface, against a server of the embedded pair.

    python -m benchmarks.serve_guidellm --guidellm /path/to/environment/bin/guidellm

Text completions of synthetic prompts, streamed, at several numbers of clients. Every request must
succeed and have as many tokens as were asked for, by guidellm's own count. guidellm 0.8 needs
some forty packages, so that it runs in an environment of its own (``pip install guidellm``). Writes
``benchmarks/results/serve_guidellm.json``. The speeds include the processor time that guidellm
itself takes.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.page import about, parser
from benchmarks.peer_workers.pairs import embedded
from benchmarks.serve_process import serving

PROMPT_TOKENS, OUTPUT_TOKENS = 32, 24


def command(
    program: str, url: str, target: Path, clients: int, requests: int, out: Path
) -> list[str]:
    """guidellm's command line."""
    parts = {
        "backend": f"kind=openai_http,target={url},request_format=/v1/completions,stream=true",
        "profile": f"kind=concurrent,streams={clients}",
        "constraint": f"kind=max_requests,count={requests}",
        "tokenizer": f"kind=huggingface_auto,model={target.absolute()}",
        "data": f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "output": f"kind=json,path={out}",
    }
    options = [word for name, value in parts.items() for word in (f"--{name}", value)]
    return [program, "run", *options, "--disable-console"]


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """What guidellm found, of its one benchmark."""
    metrics = report["benchmarks"][0]["metrics"]

    def mean(name: str) -> float:
        return float(metrics[name]["successful"]["mean"])

    return {
        "requests": metrics["request_totals"],
        "output_tokens_per_request": mean("output_token_count"),
        "output_tokens_per_second": mean("output_tokens_per_second"),
        "time_to_first_token_ms": mean("time_to_first_token_ms"),
        "inter_token_latency_ms": mean("inter_token_latency_ms"),
    }


def is_complete(found: dict[str, Any]) -> bool:
    """Whether every request succeeded, with all of its tokens."""
    totals = found["requests"]
    whole = found["output_tokens_per_request"] == OUTPUT_TOKENS
    return bool(totals["successful"] == totals["total"] > 0 and whole)


def main(arguments: list[str] | None = None) -> int:
    """Runs guidellm; the exit status says whether every request succeeded."""
    made = parser(__doc__)
    made.add_argument("--guidellm", default="guidellm", help="the program")
    made.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8])
    made.add_argument("--requests", type=int, default=24, help="at each number of clients")
    made.add_argument("--exports", type=Path, default=Path("runs/peers/exports"))
    given = made.parse_args(arguments)
    target = embedded(given.exports).target
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    by_clients: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "guidellm.json", Path(folder) / "serve.log"
        with serving(["--dtype", "float32"], log, given.threads) as server:
            for clients in given.clients:
                asked = command(given.guidellm, server.url, target, clients, given.requests, out)
                subprocess.run(asked, check=True, env=environment, stdout=subprocess.DEVNULL)
                by_clients[str(clients)] = summary(json.loads(out.read_text()))
                print(f"{clients} clients: {by_clients[str(clients)]}", flush=True)
    line = " ".join(["python -m benchmarks.serve_guidellm", *(arguments or sys.argv[1:])])
    report = {"about": about(line, threads=given.threads), "by_clients": by_clients}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "serve_guidellm.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(map(is_complete, by_clients.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
