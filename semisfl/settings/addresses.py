"""Read an address HOST:PORT."""

import ipaddress

from semisfl.settings.sections import ConfigError


def split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of ``host:port``."""
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    odd = not bare or any(c.isspace() or c == "/" for c in bare)
    if odd or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"{address!r} is not HOST:PORT, e.g. 192.0.2.7:8443; ports end at 65535")
    if (":" in bare) != (host == f"[{bare}]"):
        raise ConfigError(f"{address!r} is not HOST:PORT; IPv6 is written as [2001:db8::7]:8443")
    return bare, int(port)


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine's own loopback."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
