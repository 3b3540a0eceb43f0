"""Check the addresses HOST:PORT of servers. Plaintext is for this machine's own loopback alone."""

from semisfl.fleet.setup import NetworkOptions
from semisfl.settings.addresses import is_loopback, split_address
from semisfl.settings.config import ConfigError

SCHEMES = {"dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock"}
"""Prefixes that make gRPC read an address as one of another kind."""


def require_loopback(address: str) -> None:
    """Refuse to speak plaintext over anything but this machine's own loopback."""
    if not is_loopback(_split(address)[0]):
        raise ConfigError(
            f"{address} is not a loopback address, so plaintext is refused; "
            "leave out --insecure-loopback and give certificates (`semisfl certs`)"
        )


def check_listen(network: NetworkOptions) -> None:
    """Refuse a bad address to listen on, and plaintext that is not allowed or leaves the loopback."""
    if network.certificates is None and not network.insecure_loopback:
        raise ConfigError("a server needs certificates; make them with `semisfl certs`")
    _split(network.listen)
    if network.insecure_loopback:
        require_loopback(network.listen)


def check_target(address: str, certified: bool, insecure_loopback: bool) -> None:
    """Refuse a server's address that a client with or without a certificate may not speak to."""
    if insecure_loopback or not certified:
        require_loopback(address)
    if not certified and not insecure_loopback:
        raise ConfigError(
            "a client needs a certificate; give its folder, or ask for --insecure-loopback"
        )
    if not _split(address)[1]:
        raise ConfigError(f"{address!r}: nothing listens on port 0; name the port of the server")


def _split(address: str) -> tuple[str, int]:
    host, port = split_address(address)
    if host in SCHEMES:
        raise ConfigError(f"{address!r} is not HOST:PORT: gRPC reads {host!r} as a kind of address")
    return host, port
