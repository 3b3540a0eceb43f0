"""Check the addresses HOST:PORT of servers. Plaintext is for this machine's own loopback alone."""

import ipaddress

from semisfl.fleet.setup import NetworkOptions
from semisfl.settings.config import ConfigError

SCHEMES = {"dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock"}
"""Prefixes that make gRPC read an address as one of another kind."""


def require_loopback(address: str) -> None:
    """Refuse to speak plaintext over anything but this machine's own loopback."""
    host = split_address(address)[0]
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise ConfigError(
            f"{address} is not a loopback address, so plaintext is refused; "
            "leave out --insecure-loopback and give certificates (`semisfl certs`)"
        )


def check_listen(network: NetworkOptions) -> None:
    """Refuse a bad address to listen on, and plaintext that is not allowed or leaves the loopback."""
    if network.certificates is None and not network.insecure_loopback:
        raise ConfigError("a server needs certificates; make them with `semisfl certs`")
    split_address(network.listen)
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
    if not split_address(address)[1]:
        raise ConfigError(f"{address!r}: nothing listens on port 0; name the port of the server")


def split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of ``host:port``."""
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    odd = not bare or any(c.isspace() or c == "/" for c in bare)
    if odd or not port.isdigit() or int(port) > 65535 or host in SCHEMES:
        raise ConfigError(f"{address!r} is not HOST:PORT, e.g. 192.0.2.7:8443; ports end at 65535")
    if (":" in bare) != (host == f"[{bare}]"):
        raise ConfigError(f"{address!r} is not HOST:PORT; IPv6 is written as [2001:db8::7]:8443")
    return bare, int(port)
