"""``/methods``: the methods that requests may choose."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.methods import METHODS, Method
from outrider.serve.documented import errors
from outrider.serve.errors import json_response
from outrider.serve.service import Service

router = APIRouter()


@router.get("/methods", responses=errors())
async def methods(http: Request) -> Response:
    """The server's own method and γ, and the methods that requests may choose instead.

    ``governed`` says whether a governor chooses the draft lengths, up to γ.
    """
    service: Service = http.app.state.service
    able = [each for each in METHODS.values() if service.pool.may_choose(each)]
    return json_response(
        {
            "object": "list",
            "default": service.engine.method.name,
            "num_speculative_tokens": service.engine.num_speculative_tokens,
            "governed": service.engine.governor is not None,
            "data": [_described(each) for each in able],
        }
    )


def _described(method: Method) -> dict[str, object]:
    return {
        "id": method.name,
        "object": "method",
        "summary": method.summary,
        "paper": method.paper,
        "lossless": method.lossless,
        "greedy_only": method.recipe().greedy_only,
        "has_budget": "budget" in method.options,
    }
