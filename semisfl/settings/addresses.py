"""Read an address HOST:PORT, and tell whether it is this machine's alone.

Servers that other machines can reach need certificates or a token; `is_loopback` decides who can.
"""

import ipaddress

from semisfl.settings.sections import ConfigError


def split_address(address: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port of ``host:port`` or ``[ipv6]:port``.

    Raises `ConfigError` for any other text. A port of 0 lets the system choose one.
    """
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    odd = not bare or any(c.isspace() or c == "/" for c in bare)
    if odd or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"{address!r} is not HOST:PORT, e.g. 192.0.2.7:8443; ports end at 65535")
    if (":" in bare) != (host == f"[{bare}]"):
        raise ConfigError(f"{address!r} is not HOST:PORT; IPv6 is written as [2001:db8::7]:8443")
    return bare, int(port)


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine's own loopback: ``localhost``, 127.0.0.0/8 or ::1. No name is looked up."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
