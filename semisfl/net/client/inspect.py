"""Read a server's terms without joining its run.

`semisfl inspect` shows them to the owner of a device, who accepts them by their digest before the device joins.
"""

from collections.abc import Collection

import grpc

from semisfl.net import chunks, hostport, messages
from semisfl.net.client.connection import open_channel
from semisfl.net.client.rejection import Rejected, explained
from semisfl.net.frames import WireError
from semisfl.net.terms import Terms, placed_model
from semisfl.net.tls.credentials import Credentials
from semisfl.settings import catalog

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
    """Return the terms that a server has for devices.

    Args:
        address: the server's HOST:PORT.
        credentials: this device's certificate; None with ``insecure_loopback``, which connects without TLS.
        allow_methods: methods of other packages that terms may name, as in `join`.

    Raises `NoTerms` if the server trains nothing, `Rejected` if it refuses this device or if its terms cannot be
    read, and `OSError` if it cannot be reached.
    """
    hostport.check_target(address, credentials is not None, insecure_loopback)
    options = chunks.options(messages.SMALL)
    with open_channel(address, None if insecure_loopback else credentials, options) as channel:
        try:
            text = channel.stream_unary(chunks.TERMS)(iter(()), timeout=SECONDS)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise NoTerms(
                    f"{address} has no terms; is it `semisfl serve` of this version?"
                ) from error
            raise explained(error, address, secure=not insecure_loopback) from error
    methods = frozenset(catalog.METHODS) | frozenset(allow_methods)
    try:
        terms = Terms.from_json(text.decode("utf-8", "replace"), methods)
        placed_model(terms.config.model, terms.shape, terms.classes)  # or a WireError, as in `join`
        return terms
    except WireError as error:
        raise Rejected(str(error), "refused") from error
