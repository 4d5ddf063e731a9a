"""The web page at ``/``: static files, which speak to the server's own interface."""

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

FILES = {
    "/": "index.html",
    "/page.css": "page.css",
    "/page.js": "page.js",
    "/icon.svg": "icon.svg",
}
"""The page's files by path."""

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page loads nothing from other hosts, runs no inline script, and appears in no frame."""

_FOLDER = Path(__file__).parent / "static"
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter()


def _add(path: str, name: str) -> None:
    @router.get(path, include_in_schema=False)
    async def file() -> FileResponse:
        return FileResponse(_FOLDER / name, headers=_HEADERS)


for _path, _name in FILES.items():
    _add(_path, _name)
