"""The page at `/`: files of the package, sent as they are, allowed to load and ask nothing but this server."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent.parent / "data" / "page"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PATHS = {
    "/": "index.html",
    **{f"/page/{path.name}": path.name for path in sorted(FOLDER.iterdir()) if path.name != "index.html"},
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


async def file(request: Request) -> Response:
    """One file of the page."""
    path = FOLDER / PATHS[request.url.path]
    return Response(path.read_bytes(), media_type=KINDS[path.suffix], headers=HEADERS)
