"""A server of split inference in this process, and its clients."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from semisfl.fleet.setup import NetworkOptions
from semisfl.net.client.identity import Target
from semisfl.net.client.owner import Owner
from semisfl.net.tls import certs
from semisfl.use.classifier import Classifier
from semisfl.use.model_client import ModelClient
from semisfl.use.model_server import ModelServer
from tests.net.harness import AcceptsAll


@contextlib.contextmanager
def served(model: Classifier, authority: Path, **how: Any) -> Iterator[ModelServer]:
    server = ModelServer(model, NetworkOptions("127.0.0.1:0", authority), **how)
    try:
        yield server
    finally:
        server.close()


def connect(address: str, authority: Path, name: str = "camera", **how: Any) -> ModelClient:
    owner = how.pop("owner", None) or Owner(approval=AcceptsAll())
    target = Target(address, certs.load_client_credentials(authority, name))
    return ModelClient(target, owner=owner, **how)
