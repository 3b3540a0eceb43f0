"""Say why a client cannot take part when another attempt cannot help."""

import grpc

from semisfl.net import messages
from semisfl.net.client.lines import plain

FINAL = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""Answers of a server that another attempt cannot change."""
LONGEST_REASON = 600


class Rejected(ValueError):
    """Raised when this client cannot take part and another attempt cannot help; the message says why."""

    def __init__(self, reason: str, kind: str = "setup") -> None:
        """Take ``kind``: setup (to be fixed on this device), refused, revoked or policy."""
        super().__init__(plain(reason, LONGEST_REASON))
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
        return cls(f"{address} refuses this client: {reason}", kind_of(reason))


def kind_of(reason: str) -> str:
    """Return the kind of a server's refusal."""
    if reason.endswith(messages.REVOKED):
        return "revoked"
    return "policy" if reason.startswith(messages.BY_POLICY) else "refused"
