"""The paths of the public listener: nothing else can be reached from there.

A path that is not here is 404 before any other work, so a backend's
``/slots``, ``/props``, ``/metrics`` or ``/models/load`` cannot be reached.
The path sent upstream is the route's own, never the client's bytes.
"""

from __future__ import annotations

from msgspec import Struct

from llmgw.errors import MethodNotAllowed, NotFound

ANTHROPIC = "anthropic"
OPENAI = "openai"
OLLAMA = "ollama"


class Route(Struct, frozen=True):
    """One path.

    :param path: the client's path, which is also its name in metrics and logs.
    :param upstream: the path at the backend.
    :param dialect: how ``core.meter`` reads the answer.
    :param errors: the form of errors: ``openai``, ``anthropic`` or ``ollama``.
    :param methods: allowed methods, besides OPTIONS.
    :param body: ``json``, ``multipart``, or ``""`` for none.
    :param assembled: a call without ``stream`` may be sent upstream as a stream.
    :param exempt: long arrays are common here, so commas are not limited.
    :param needs_model: the body must name a model; if not, the only one there is is meant.
    :param local: answered by the gateway itself: ``models``, ``model``, ``tags``, ``health``.
    """

    path: str
    upstream: str = ""
    dialect: str = "other"
    errors: str = OPENAI
    methods: tuple[str, ...] = ("POST",)
    body: str = "json"
    assembled: bool = False
    exempt: bool = False
    needs_model: bool = True
    local: str = ""


def _post(
    *paths: str,
    upstream: str = "",
    dialect: str = "other",
    errors: str = OPENAI,
    body: str = "json",
    assembled: bool = False,
    exempt: bool = False,
    needs_model: bool = True,
) -> list[Route]:
    return [
        Route(
            path=path,
            upstream=upstream or path,
            dialect=dialect,
            errors=errors,
            body=body,
            assembled=assembled,
            exempt=exempt,
            needs_model=needs_model,
        )
        for path in paths
    ]


_READ = ("GET", "HEAD")

ROUTES: dict[str, Route] = {
    route.path: route
    for route in [
        *_post("/v1/chat/completions", "/chat/completions", dialect="chat", assembled=True),
        *_post("/v1/completions", dialect="completion", assembled=True, exempt=True),
        *_post(
            "/completion", "/completions", dialect="native", assembled=True, exempt=True, needs_model=False
        ),
        *_post("/infill", dialect="native", assembled=True, needs_model=False),
        *_post("/v1/embeddings", "/embeddings", dialect="embedding", exempt=True),
        *_post("/embedding", dialect="embedding", exempt=True, needs_model=False),
        *_post("/v1/rerank", "/v1/reranking", "/rerank", "/reranking", dialect="embedding", exempt=True),
        *_post("/v2/rerank", upstream="/v1/rerank", dialect="embedding", exempt=True),
        *_post("/v1/responses", "/responses", upstream="/v1/responses", dialect="responses"),
        *_post("/v1/messages", "/v1/messages/count_tokens", dialect="messages", errors=ANTHROPIC),
        *_post("/v1/audio/transcriptions", dialect="other", body="multipart"),
        *_post("/tokenize", "/apply-template", needs_model=False),
        *_post("/detokenize", exempt=True, needs_model=False),
        *_post("/api/chat", "/api/generate", dialect="other", errors=OLLAMA),
        Route("/api/tags", methods=_READ, body="", errors=OLLAMA, local="tags"),
        Route("/v1/models", methods=_READ, body="", local="models"),
        Route("/models", methods=_READ, body="", local="models"),
        Route("/health", methods=_READ, body="", local="health"),
    ]
}

_OLLAMAS = frozenset(
    f"/api/{name}"
    for name in (
        *("chat", "copy", "create", "delete", "embed", "embeddings", "generate"),
        *("ps", "pull", "push", "show", "tags", "version"),
    )
)
"""All that an Ollama has, and its clients ask for."""

MODEL_PREFIX = "/v1/models/"
MODEL = Route("/v1/models/{id}", methods=_READ, body="", local="model")


def find(method: str, path: str) -> Route:
    """The route of ``path``.

    :raise NotFound: no such path.
    :raise MethodNotAllowed: the path exists, the method is not its.
    """
    route = ROUTES.get(path)
    if route is None:
        if not path.startswith(MODEL_PREFIX) or len(path) == len(MODEL_PREFIX):
            raise NotFound(f"no such path: {path[:256]}")
        route = MODEL
    if method not in route.methods and method != "OPTIONS":
        error = MethodNotAllowed(f"{method} is not allowed on {route.path}")
        error.headers.append(("allow", ", ".join((*route.methods, "OPTIONS"))))
        raise error
    return route


def errors_of(path: str) -> str:
    """The form of errors on any path: whose client asks there.

    That of an unknown one, too, also if its base URL has a ``/v1`` too many or too few.
    """
    route = ROUTES.get(path)
    if route is not None:
        return route.errors
    while path.startswith("/v1/"):
        path = path[3:]
    if path in _OLLAMAS:
        return OLLAMA
    return ANTHROPIC if path.startswith("/messages") else OPENAI
