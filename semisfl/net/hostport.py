"""Check the addresses HOST:PORT of servers. Plaintext is for this machine's own loopback alone.

`split_address` raises `ConfigError` for what is not HOST:PORT, so every function here does too.
"""

from semisfl.fleet.setup import NetworkOptions
from semisfl.settings.addresses import is_loopback, split_address
from semisfl.settings.config import ConfigError


def require_loopback(address: str) -> None:
    """Raise `ConfigError` unless ``address`` is this machine's own loopback."""
    if not is_loopback(split_address(address)[0]):
        raise ConfigError(
            f"{address} is not a loopback address, so plaintext is refused; "
            "leave out --insecure-loopback and give certificates (`semisfl certs`)"
        )


def check_listen(network: NetworkOptions) -> None:
    """Raise `ConfigError` for a bad address to listen on, or for plaintext that leaves the loopback."""
    if network.certificates is None and not network.insecure_loopback:
        raise ConfigError("a server needs certificates; make them with `semisfl certs`")
    split_address(network.listen)
    if network.insecure_loopback:
        require_loopback(network.listen)


def check_target(address: str, certified: bool, insecure_loopback: bool) -> None:
    """Raise `ConfigError` for a server's address that a device may not speak to.

    ``certified``: whether the device has a certificate. ``insecure_loopback``: whether it asked for plaintext.
    """
    if insecure_loopback or not certified:
        require_loopback(address)
    if not certified and not insecure_loopback:
        raise ConfigError(
            "a client needs a certificate; give its folder, or ask for --insecure-loopback"
        )
    if not split_address(address)[1]:
        raise ConfigError(f"{address!r}: nothing listens on port 0; name the port of the server")
