"""A server of split inference in this process, and its clients."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from semisfl.fleet.setup import NetworkOptions
from semisfl.net.client.connection import Target
from semisfl.net.client.owner import Approval, Owner
from semisfl.net.tls import certs
from semisfl.use.classifier import Classifier
from semisfl.use.model_server import ModelServer
from semisfl.use.split_inference import ModelClient


@contextlib.contextmanager
def served(model: Classifier, authority: Path) -> Iterator[ModelServer]:
    server = ModelServer(model, NetworkOptions("127.0.0.1:0", authority))
    try:
        yield server
    finally:
        server.close()


def connect(server: ModelServer, authority: Path, name: str = "camera", **how: Any) -> ModelClient:
    owner = how.pop("owner", None) or Owner(approval=accepting(server))
    credentials = certs.load_client_credentials(authority, name)
    return ModelClient(Target(f"localhost:{server.port}", credentials), owner=owner, **how)


def accepting(server: ModelServer) -> Approval:
    """Return the approval of an owner who has accepted the server's terms."""
    return Approval([server.served.digest])


def lie(server: ModelServer, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what the server says about its model."""
    plain = json.loads(server.served.model_dump_json())
    change(plain)
    text, digest = json.dumps(plain), server.served.digest
    server.served = SimpleNamespace(**plain, digest=digest, model_dump_json=lambda: text)  # type: ignore[assignment]


def overheard(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return the list in which a server keeps the features that it gets."""
    rows: list[Tensor] = []
    honest = server._model.answer

    def look(features: Tensor) -> Tensor:
        rows.append(features.clone())
        return honest(features)

    monkeypatch.setattr(server._model, "answer", look)
    return rows
