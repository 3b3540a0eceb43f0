"""Why a device cannot take part or connect, in one printable line."""

from typing import Any

import grpc

from semisfl.files import printable
from semisfl.net import messages

FINAL = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""Answers of a server that another attempt cannot change."""
LONGEST = 600
"""Characters of a reason."""
TLS_CAUSES = (
    "if the server runs: a certificate or clock is wrong (`semisfl certs list`), the server's certificate has "
    "another host name or authority, or this is not the port of `semisfl serve`"
)
"""gRPC reports little of a failed TLS handshake, so a device names the usual causes."""


class Rejected(ValueError):
    """Raised when this device cannot take part and another attempt cannot help; the message says why."""

    def __init__(self, reason: str, kind: str = "setup") -> None:
        """Take ``kind``: setup (to be fixed on this device), refused, revoked or policy."""
        super().__init__(plain(reason))
        self.kind = kind

    @classmethod
    def by_server(cls, address: str, code: grpc.StatusCode, reason: str) -> "Rejected":
        """Return the error for a server's refusal; its reason tells the kind."""
        if code is grpc.StatusCode.UNIMPLEMENTED:  # a server of another kind
            return cls(
                f"{address} trains nothing; is it `semisfl serve` of this version? For a trained model use "
                "`semisfl classify`",
                "refused",
            )
        kind = "policy" if reason.startswith(messages.BY_POLICY) else "refused"
        kind = "revoked" if reason.endswith(messages.REVOKED) else kind
        return cls(f"{address} refuses this client: {reason}", kind)


def plain(text: str, longest: int = LONGEST) -> str:
    """Return a server's ``text`` as one printable line of at most ``longest`` characters.

    A longer text loses its middle: its end says what to do.
    """
    if len(text) > longest:
        end = longest // 3
        text = text[: longest - end - 1] + "…" + text[-end:]
    return printable(" ".join(text.split()))


def explained(error: Any, address: str, *, secure: bool) -> Exception:
    """Return the exception to raise for the failed call ``error`` (a `grpc.RpcError`) to ``address``.

    `OSError` if the server could not be reached, also where a TLS handshake failed (``secure``: the call
    used TLS); `Rejected` if the server refused.
    """
    code, details = error.code(), error.details() or ""
    if code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return Rejected.by_server(address, code, details)
    causes = f" ({TLS_CAUSES})" if secure else ""
    return OSError(plain(f"no answer from {address}: {details}") + causes)
