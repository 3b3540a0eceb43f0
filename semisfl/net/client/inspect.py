"""Read a server's terms without joining its run."""

from collections.abc import Collection
from typing import Any

import grpc

from semisfl.net import chunks, hostport, messages
from semisfl.net.client.diagnosis import explained
from semisfl.net.client.identity import open_channel
from semisfl.net.client.rejection import Rejected
from semisfl.net.headers import WireError
from semisfl.net.terms import Terms, placed_model
from semisfl.net.tls.credentials import Credentials
from semisfl.settings import lookup

SECONDS = 20.0
"""Longest wait for the answer."""


class NoTerms(ValueError):
    """Raised for a server that has no terms of training; it may serve a model."""


def read_terms(
    address: str,
    credentials: Credentials | None,
    *,
    insecure_loopback: bool = False,
    allow_methods: Collection[str] = (),
) -> Terms:
    """Return the terms that ``address`` has for devices; raise `ValueError` or `OSError` if it has none."""
    hostport.check_target(address, credentials is not None, insecure_loopback)
    # gRPC keeps what a server sends after its answer until the window is full, and what came around it.
    options = chunks.options(messages.SMALL, **{"http2.lookahead_bytes": messages.SMALL})
    with open_channel(address, None if insecure_loopback else credentials, options) as channel:
        try:
            text = channel.stream_unary(chunks.TERMS)(iter(()), timeout=SECONDS)
        except grpc.RpcError as error:
            raise _reason(error, address, credentials) from error
    methods = frozenset(lookup.METHODS.names()) | frozenset(allow_methods)
    try:
        terms = Terms.from_json(text.decode("utf-8", "replace"), methods)
        placed_model(terms.config.model, terms.shape, terms.classes)  # or a WireError, as in `join`
        return terms
    except WireError as error:
        raise Rejected(str(error), "refused") from error


def _reason(error: Any, address: str, credentials: Credentials | None) -> Exception:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return NoTerms(f"{address} has no terms; is it `semisfl serve` of this version?")
    return explained(error, address, credentials)
