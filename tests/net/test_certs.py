import contextlib
import hashlib
import shutil
import ssl
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from semisfl.net.tls import certs, credentials
from semisfl.net.tls.certs import CertError, Credentials
from semisfl.net.tls.ledger import revoked_serials
from tests.disk import largest_file

NOW = datetime.now(UTC)
PAST: dict[str, Any] = {
    "valid_from": NOW - timedelta(days=9),
    "valid_until": NOW - timedelta(days=1),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs")
    certs.make_authority(directory)
    certs.make_server(directory, ["localhost", "127.0.0.1", "::1", "lab.example.org"])
    certs.make_client(directory, "cam-1")
    return directory


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another authority, with the same names."""
    directory = tmp_path_factory.mktemp("stranger")
    certs.make_authority(directory)
    certs.make_server(directory, ["localhost"])
    certs.make_client(directory, "cam-1")
    return directory


@pytest.fixture(scope="module")
def signed_by_a_device(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder in which a device's certificate serves as the authority, with whole chains."""
    forged, own = tmp_path_factory.mktemp("forged"), home / "clients" / "cam-1"
    for kind in ("crt", "key"):
        (forged / f"authority.{kind}").write_bytes((own / f"client.{kind}").read_bytes())
    certs.make_server(forged, ["localhost"])
    certs.make_client(forged, "cam-2")
    for leaf in (forged / "server.crt", forged / "clients" / "cam-2" / "client.crt"):
        leaf.write_bytes(leaf.read_bytes() + (own / "client.crt").read_bytes())
    return forged


def met(server: Path, client: Path, trusted: bytes, host: str = "localhost") -> str | None:
    """Return whom gRPC lets in; None if these two do not talk. Each path is without its ending."""
    seen: list[str] = []

    def answer(request: bytes, call: grpc.ServicerContext) -> bytes:
        peer = call.auth_context()
        seen.append(certs.identity(peer))
        return request

    handler = grpc.unary_unary_rpc_method_handler(answer)
    serving = grpc.server(ThreadPoolExecutor(1))
    serving.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", {"a": handler}),))
    keys, chains = (
        [place.with_name(f"{place.name}.{kind}").read_bytes() for place in (server, client)]
        for kind in ("key", "crt")
    )
    secure = grpc.ssl_server_credentials([(keys[0], chains[0])], trusted, require_client_auth=True)
    port = serving.add_secure_port("127.0.0.1:0", secure)
    serving.start()
    mine = grpc.ssl_channel_credentials(trusted, keys[1], chains[1])
    try:
        with grpc.secure_channel(f"{host}:{port}", mine) as channel:
            channel.unary_unary("/t/a")(b"hi", timeout=20)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        serving.stop(0).wait(10)
    return seen[0] if seen else None


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_mutual_tls_names_the_client(home: Path, host: str) -> None:
    trusted = (home / "authority.crt").read_bytes()
    assert met(home / "server", home / "clients/cam-1/client", trusted, host) == "cam-1"


def test_nobody_trusts_whom_a_device_or_a_stranger_signed_nor_one_in_the_role_of_the_other(
    home: Path, stranger: Path, signed_by_a_device: Path, tmp_path: Path
) -> None:
    trusted = (home / "authority.crt").read_bytes()
    server, client = home / "server", home / "clients" / "cam-1" / "client"
    shutil.copytree(home, tmp_path / "copy")
    certs.make_client(tmp_path / "copy", "localhost")  # a device may have the name of a host
    certs.make_client(tmp_path / "copy", "old", **PAST)
    certs.make_server(tmp_path / "copy", ["localhost"], overwrite=True, **PAST)
    for false in (
        signed_by_a_device / "server",
        stranger / "server",
        tmp_path / "copy" / "server",
        tmp_path / "copy" / "clients" / "localhost" / "client",
    ):
        assert met(false, client, trusted) is None, false
    for false in (
        signed_by_a_device / "clients" / "cam-2" / "client",
        stranger / "clients" / "cam-1" / "client",
        tmp_path / "copy" / "clients" / "old" / "client",
        server,
    ):
        assert met(server, false, trusted) is None, false


@pytest.mark.parametrize(
    ("begins", "ends", "state", "days", "warning"),
    [
        (-1.0, 1.5 / 24, "valid", 0, "expires today"),  # on its last day
        (-1.0, -1 / 1440, "expired", -1, None),
        (1.0, 9.0, "not yet valid", 8, "expires in 8 days"),
        (-1.0, 40.0, "valid", 39, None),
    ],
)
def test_a_certificate_is_valid_to_its_last_moment(
    begins: float, ends: float, state: str, days: int, warning: str | None, tmp_path: Path
) -> None:
    now = datetime.now(UTC)
    since, until = now + timedelta(days=begins), now + timedelta(days=ends)
    certs.make_authority(tmp_path, valid_from=now - timedelta(days=9))
    certs.make_client(tmp_path, "cam-1", valid_from=since, valid_until=until)
    entry, own = certs.listing(tmp_path)[-1], certs.load_client_credentials(tmp_path, "cam-1")
    assert (entry.state, entry.days_left) == (state, days)
    assert (credentials.expired(own) is not None) == (state == "expired")
    assert (warning or "") in (soon := credentials.soon(own) or "") and bool(soon) == bool(warning)
    certs.revoke(tmp_path, "cam-1")
    assert certs.listing(tmp_path)[-1].state == "revoked"


def test_extensions(home: Path) -> None:
    def load(path: Path) -> x509.Certificate:
        return x509.load_pem_x509_certificate(path.read_bytes())

    authority, server = load(home / "authority.crt"), load(home / "server.crt")
    client = load(home / "clients" / "cam-1" / "client.crt")
    constraints = authority.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert constraints.value.ca
    assert constraints.value.path_length == 0
    assert authority.not_valid_after_utc - NOW > timedelta(days=3640)
    for leaf, usage in (
        (server, ExtendedKeyUsageOID.SERVER_AUTH),
        (client, ExtendedKeyUsageOID.CLIENT_AUTH),
    ):
        leaf.verify_directly_issued_by(authority)
        assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        assert list(leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [usage]
        assert timedelta(days=360) < leaf.not_valid_after_utc - NOW < timedelta(days=366)


def test_a_leaf_does_not_outlive_its_authority(tmp_path: Path) -> None:
    end = NOW.replace(microsecond=0) + timedelta(days=20)
    certs.make_authority(tmp_path, valid_until=end)
    assert certs.make_client(tmp_path, "cam-1").valid_until == end
    with pytest.raises(CertError, match="make a new authority"):
        certs.make_client(tmp_path, "cam-2", valid_from=end + timedelta(days=1))


def test_files_are_for_the_owner_only_and_complete(home: Path) -> None:
    files = {path for path in home.rglob("*") if path.is_file()}
    assert {str(path.relative_to(home)) for path in files} == {
        *("authority.crt", "authority.key", "server.crt", "server.key", "issued.txt"),
        *("revoked.txt", "clients/cam-1/authority.crt", "clients/cam-1/client.crt"),
        "clients/cam-1/client.key",
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    makers: dict[str, Callable[..., Any]] = {
        "authority.key": lambda **more: certs.make_authority(tmp_path, **more),
        "server.key": lambda **more: certs.make_server(tmp_path, ["localhost"], **more),
        "clients/a/client.key": lambda **more: certs.make_client(tmp_path, "a", **more),
    }
    for make in makers.values():
        make()
    for name, make in makers.items():
        before = (tmp_path / name).read_bytes()
        ledger = (tmp_path / "issued.txt").read_bytes()
        with pytest.raises(CertError, match="exists: "):
            make()
        assert (tmp_path / name).read_bytes() == before
        assert (tmp_path / "issued.txt").read_bytes() == ledger
    makers["clients/a/client.key"](overwrite=True)
    certs.load_client_credentials(tmp_path, "a")
    assert [entry.name for entry in certs.listing(tmp_path)].count("a") == 2


@pytest.mark.parametrize("make", [certs.make_client, certs.renew_client])
def test_two_commands_at_once_leave_one_certificate_with_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]
) -> None:
    certs.make_authority(tmp_path)
    renews = make is certs.renew_client
    if renews:
        certs.make_client(tmp_path, "cam-1")
    write_file, both = certs.write_file, threading.Barrier(2)

    def slowly(path: Path, content: bytes) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)
        write_file(path, content)

    monkeypatch.setattr(certs, "write_file", slowly)
    with ThreadPoolExecutor(2) as commands:
        attempts = [commands.submit(make, tmp_path, "cam-1") for _ in range(2)]
    errors = [str(one.exception()) for one in attempts if one.exception()]
    assert len(errors) == (0 if renews else 1) and all("exists: " in text for text in errors)
    assert len(certs.clients_named(tmp_path, "cam-1")) == (3 if renews else 1)
    certs.load_client_credentials(tmp_path, "cam-1")


def test_revocation(tmp_path: Path) -> None:
    certs.make_authority(tmp_path)
    first = certs.make_client(tmp_path, "cam-1")
    second = certs.make_client(tmp_path, "cam-1", overwrite=True)
    other = certs.make_client(tmp_path, "cam-10")
    assert first.serial not in revoked_serials(tmp_path)
    assert certs.revoke(tmp_path, "cam-1") == [first.serial, second.serial]
    assert certs.revoke(tmp_path, "cam-1") == []
    assert first.serial in revoked_serials(tmp_path)
    assert second.serial in revoked_serials(tmp_path)
    assert other.serial not in revoked_serials(tmp_path)
    assert [entry.revoked for entry in certs.listing(tmp_path)] == [False, True, True, False]
    third = certs.make_client(tmp_path, "cam-1", overwrite=True)
    assert third.serial not in revoked_serials(tmp_path)
    with pytest.raises(CertError, match=r"'cam-2' was never issued.*cam-1, cam-10"):
        certs.revoke(tmp_path, "cam-2")


def test_a_revocation_that_the_disk_refuses_is_said_and_leaves_no_half_a_line(
    tmp_path: Path,
) -> None:
    certs.make_authority(tmp_path)
    client = certs.make_client(tmp_path, "cam-1")
    path = tmp_path / "revoked.txt"
    before = path.read_bytes()
    with (
        largest_file(len(before) + 12),
        pytest.raises(CertError, match=r"revoked.txt cannot be written: No space left"),
    ):
        certs.revoke(tmp_path, "cam-1")
    assert path.read_bytes() == before
    assert certs.revoke(tmp_path, "cam-1") == [client.serial]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_damaged_or_missing_list_lets_nobody_in(tmp_path: Path) -> None:
    certs.make_authority(tmp_path)
    client = certs.make_client(tmp_path, "cam-1")
    path = tmp_path / "revoked.txt"
    path.write_text(f"# by hand\n\n{client.serial:X}\n")
    assert client.serial in revoked_serials(tmp_path)
    path.write_text("ff\nnot a number\n")
    with pytest.raises(CertError, match="line 2 is not a hexadecimal serial"):
        revoked_serials(tmp_path)
    path.unlink()
    with pytest.raises(CertError, match=r"revoked.txt cannot be read"):
        revoked_serials(tmp_path)


def test_listing_gives_the_fingerprints(home: Path) -> None:
    entries = certs.listing(home)
    assert [(entry.role, entry.name) for entry in entries] == [
        *(("authority", "authority"), ("server", "localhost"), ("client", "cam-1")),
    ]
    der = ssl.PEM_cert_to_DER_cert((home / "server.crt").read_text())
    assert entries[1].fingerprint == hashlib.sha256(der).hexdigest()


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "../a", "a\\b", "a b", "a\n", "é", "-a", ".a", "a" * 64, "a\0", "/etc"],
)
def test_client_names_cannot_leave_the_folder(home: Path, name: str) -> None:
    ledger = (home / "issued.txt").read_bytes()
    with pytest.raises(CertError, match="client name") as caught:
        certs.make_client(home, name)
    assert "\n" not in str(caught.value)
    with pytest.raises(CertError, match="client name"):
        certs.load_client_credentials(home, name)
    assert (home / "issued.txt").read_bytes() == ledger


@pytest.mark.parametrize(
    "names", [[], "localhost", ["a b"], ["*.org"], ["é.org"], ["1.2.3"], ["a..b"], ["a\n"], [""]]
)
def test_server_names_are_checked(tmp_path: Path, names: list[str]) -> None:
    certs.make_authority(tmp_path)
    with pytest.raises(CertError, match="server name"):
        certs.make_server(tmp_path, names)
    assert not (tmp_path / "server.key").exists()


def test_periods_are_checked(tmp_path: Path) -> None:
    with pytest.raises(CertError, match="time zone"):
        certs.make_authority(tmp_path, valid_from=datetime(2020, 1, 1))
    with pytest.raises(CertError, match="not after valid_from"):
        certs.make_authority(tmp_path, valid_from=NOW, valid_until=NOW)
    assert not list(tmp_path.iterdir())


def test_loading_finds_what_does_not_fit(home: Path, stranger: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cam"
    folder.mkdir()
    source = home / "clients" / "cam-1"
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    assert certs.load_client_credentials(folder) == certs.load_client_credentials(home, "cam-1")

    (folder / "authority.crt").write_bytes((stranger / "authority.crt").read_bytes())
    with pytest.raises(CertError, match="was not signed by"):
        certs.load_client_credentials(folder)
    (folder / "client.key").write_bytes((stranger / "clients/cam-1/client.key").read_bytes())
    with pytest.raises(CertError, match="does not belong to"):
        certs.load_client_credentials(folder)
    (folder / "client.key").write_bytes(b"rubbish")
    with pytest.raises(CertError, match="is damaged"):
        certs.load_client_credentials(folder)
    (folder / "client.key").unlink()
    with pytest.raises(
        CertError,
        match=r"client.key cannot be read: No such file.*; `semisfl certs client` makes it, in clients/",
    ):
        certs.load_client_credentials(folder)
    (folder / "client.key").write_bytes((home / "clients/cam-1/client.key").read_bytes())
    (folder / "authority.crt").unlink()
    with pytest.raises(CertError, match=r"authority.crt cannot be read: .*; copy it from the auth"):
        certs.load_client_credentials(folder)
    with pytest.raises(CertError, match=r"authority.key is not there"):
        certs.make_client(tmp_path / "nowhere", "cam-1")


def test_a_server_needs_no_authority_key(home: Path, tmp_path: Path) -> None:
    for name in ("authority.crt", "server.crt", "server.key"):
        (tmp_path / name).write_bytes((home / name).read_bytes())
    loaded = certs.load_server_credentials(tmp_path)
    assert loaded.certificate == (home / "server.crt").read_bytes()
    assert "PRIVATE KEY" in loaded.key.decode()
    assert "PRIVATE KEY" not in repr(loaded)


def test_identity_is_only_for_client_certificates(home: Path) -> None:
    client: Credentials = certs.load_client_credentials(home, "cam-1")
    assert certs.identity(client.certificate) == "cam-1"
    assert certs.identity({"x509_pem_cert": [client.certificate]}) == "cam-1"
    for name in ("server.crt", "authority.crt"):
        with pytest.raises(CertError, match="is not a client's"):
            certs.identity((home / name).read_bytes())
    nobodies: list[dict[str, list[bytes]]] = [
        {},
        {"x509_common_name": [b"cam-1"]},
        {"x509_pem_cert": []},
    ]
    for nobody in nobodies:
        with pytest.raises(CertError, match="no certificate"):
            certs.identity(nobody)
    with pytest.raises(CertError, match="not valid PEM"):
        certs.identity(b"rubbish")
