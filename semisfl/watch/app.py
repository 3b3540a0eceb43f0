"""Serve the page over HTTP: check who may see it, and answer read-only requests."""

import hmac
import json
import re
import secrets
from collections.abc import Callable
from importlib.resources import files
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semisfl.watch.views import Plain, Runs

LOOPBACK_HOST = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?", re.IGNORECASE)
COOKIE = "semisfl-watch"
SCRIPTS = (
    *("tools.js", "charts.js", "tables.js", "parts.js", "views.js", "settings.js", "log.js"),
    *("details.js", "page.js"),
)
"""In the order they are loaded."""
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "style-src-attr 'unsafe-inline'; "  # the charts' library sets attributes of what it draws
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}

PROBES = ("/healthz", "/readyz")
"""Answered without a token: they say only that the process lives, and that it is ready."""

LEAVE = {"connection": "close"}
"""Close the connection of a refused browser."""


def page_file(name: str) -> str:
    """Return one of the page's own files."""
    return (files("semisfl.watch") / "page" / name).read_text(encoding="utf-8")


def plotly_script() -> str:
    """Return the script of the chart library."""
    return (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def page_html(library: str) -> str:
    """Return the page, with elements that keep the chart library from adding styles for maps.

    The page draws no maps, and its security policy would refuse these styles with an error. The library
    adds one only if no element has its id.
    """
    ids = dict.fromkeys(re.findall(r'getElementById\("([0-9a-f]{40,64})"\)', library))
    styles = "".join(f'<div hidden id="{name}"></div>' for name in ids)
    return page_file("page.html").replace("<!-- styles --><!-- /styles -->", styles)


def probes(ready: Callable[[], bool]) -> list[Route]:
    """Return the answers to an orchestrator: 200, and 503 from /readyz while it is not ``ready``."""

    # Not in a thread: all of them may be at work.
    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        return PlainTextResponse("ready\n") if ready() else PlainTextResponse("not ready\n", 503)

    return [
        Route(path, answer, methods=["GET"])
        for path, answer in zip(PROBES, (healthz, readyz), strict=True)
    ]


def make_app(runs: Runs) -> Starlette:
    def answer(view: Callable[[Request], Plain]) -> Callable[[Request], Response]:
        def endpoint(request: Request) -> Response:
            try:
                content = view(request)
            except KeyError:
                return PlainTextResponse("there is no such run here", 404)
            except ValueError as error:
                return PlainTextResponse(f"bad question: {error}", 400)
            text = json.dumps(content, allow_nan=False, default=str)
            headers = {"cache-control": "no-store"}
            return Response(text, media_type="application/json", headers=headers)

        return endpoint

    def static(name: str, read: Callable[[], str | bytes]) -> Route:
        kind = TYPES[name[name.rindex(".") :]]

        def endpoint(request: Request) -> Response:
            return Response(read(), media_type=kind, headers={"cache-control": "no-cache"})

        return Route("/" if name == "page.html" else f"/{name}", endpoint, methods=["GET"])

    script = plotly_script()  # megabytes: read once
    html, library = page_html(script), script.encode()
    views: dict[str, Callable[[Request], Plain]] = {
        "runs": lambda request: runs.listing(),
        "rounds": lambda request: runs.rounds(_have(request.query_params.get("have", ""))),
        "clients": lambda request: runs.clients(request.query_params["run"]),
        "devices": lambda request: runs.devices(request.query_params["run"]),
        "settings": lambda request: runs.settings(),
        "log": lambda request: runs.log(
            request.query_params["run"], int(request.query_params.get("from", "-1"))
        ),
    }
    own = ("page.css", *SCRIPTS)
    return Starlette(
        routes=[
            static("page.html", lambda: html),
            *(static(name, lambda name=name: page_file(name)) for name in own),  # type: ignore[misc]
            static("plotly.min.js", lambda: library),
            *probes(lambda: True),  # it costs nothing: strangers may ask
            *(Route(f"/api/{name}", answer(view), methods=["GET"]) for name, view in views.items()),
        ]
    )


def _have(text: str) -> dict[str, tuple[int, int]]:
    """Parse ``id.epoch.count,...``: the rounds that a browser has of each run."""
    have = {}
    for part in filter(None, text.split(",")):
        key, epoch, count = part.split(".")
        have[key] = (int(epoch), int(count))
    return have


class Guard:
    """Check who may see the page, and tell browsers what they may do with it.

    With a token, a browser needs it or the cookie that replaced it. Without one the page is on loopback; a request
    under another host name (DNS rebinding), and one that another site's page makes, are refused.
    """

    def __init__(self, app: ASGIApp, token: str | None, secure: bool) -> None:
        self._app, self._token, self._secure = app, token, secure
        self._session = secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(key.encode(), value.encode()) for key, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *more]
            await send(message)

        response = self._refusal(Request(scope))
        await (response or self._app)(scope, receive, guarded)

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a refused request, or to one that just showed the token; None: let it in."""
        # Nothing here asks `request.url`, which is made of the header "host": anybody can write anything there.
        path = request.scope["path"]
        if path in PROBES:
            return None
        if self._token is None:
            if not LOOPBACK_HOST.fullmatch(request.headers.get("host", "")):
                return PlainTextResponse("this page answers to localhost only", 403, LEAVE)
            if _from_another_site(request):
                return PlainTextResponse("this page answers to itself only", 403, LEAVE)
            return None
        if _same(_cookie(request.headers.get("cookie", "")), self._session):
            return None
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _same(credentials, self._token):
            return None
        token = parse_qs(request.scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if path == "/" and _same(token, self._token):
            # Remove the token from the address bar, and from links copied out of it.
            response = Response(status_code=303, headers={"location": "/"})
            response.set_cookie(
                COOKIE, self._session, httponly=True, samesite="strict", secure=self._secure
            )
            return response
        return PlainTextResponse(
            "this page wants a token: open it as /?token=TOKEN",
            401,
            {"www-authenticate": "Bearer", **LEAVE},
        )


def _from_another_site(request: Request) -> bool:
    """Return whether another site's page asks for more than to open this one. Every browser says so."""
    asker = request.headers.get("sec-fetch-site", "none")
    opens = request.headers.get("sec-fetch-mode") == "navigate"
    return asker not in ("none", "same-origin") and not opens


def _cookie(header: str) -> str:
    """Return the value of our cookie, or an empty text.

    Python's own reader of cookies takes half a minute for a quoted one of 60 KB, before 3.11.10 and 3.12.6.
    """
    cookies = (part.strip().partition("=") for part in header.split(";"))
    return next((value for name, _, value in cookies if name == COOKIE), "")


def _same(token: str, right: str) -> bool:
    return hmac.compare_digest(token.encode(), right.encode())
