import contextlib
import hashlib
import shutil
import socket
import ssl
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from semisfl.net.tls import certs
from semisfl.net.tls.certs import CertError, Credentials
from semisfl.net.tls.credentials import parse
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


def context(purpose: ssl.Purpose, trusted: Path, own: Path) -> ssl.SSLContext:
    made = ssl.create_default_context(purpose, cafile=str(trusted))
    made.verify_mode = ssl.CERT_REQUIRED
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    made.load_cert_chain(own.with_suffix(".crt"), own.with_suffix(".key"))
    return made


def talk(server: ssl.SSLContext, client: ssl.SSLContext, host: str = "localhost") -> bytes:
    """The client's certificate as the server saw it; ssl.SSLError with what both sides said.

    A TLS 1.3 client finishes its handshake before the server has judged its certificate, so the
    client also waits for a byte.
    """
    seen: list[bytes] = []
    errors: dict[str, Exception] = {}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)

        def serve() -> None:
            try:
                accepted, _ = listener.accept()
                accepted.settimeout(10)
                with accepted, server.wrap_socket(accepted, server_side=True) as tls:
                    seen.append(tls.getpeercert(binary_form=True) or b"")
                    tls.sendall(b"!")
            except OSError as error:
                errors["server"] = error

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            raw = socket.create_connection(listener.getsockname(), timeout=10)
            with raw, client.wrap_socket(raw, server_hostname=host) as tls:
                assert tls.recv(1) == b"!" or "server" in errors
        except OSError as error:
            errors["client"] = error
        thread.join(20)
    assert not any(isinstance(error, TimeoutError) for error in errors.values()), errors
    if errors:
        raise ssl.SSLError(str(errors))
    return seen[0]


def server_side(home: Path, role: str = "server") -> ssl.SSLContext:
    return context(ssl.Purpose.CLIENT_AUTH, home / "authority.crt", home / role)


def client_side(folder: Path, trusted: Path) -> ssl.SSLContext:
    return context(ssl.Purpose.SERVER_AUTH, trusted / "authority.crt", folder / "client")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "lab.example.org"])
def test_mutual_tls_names_the_client(home: Path, host: str) -> None:
    folder = home / "clients" / "cam-1"
    seen = talk(server_side(home), client_side(folder, folder), host)
    pem = ssl.DER_cert_to_PEM_cert(seen).encode()
    assert certs.identity(pem) == "cam-1"
    assert parse(pem).serial_number == certs.listing(home)[-1].serial


def test_a_client_s_certificate_is_none_for_a_server(home: Path) -> None:
    folder = home / "clients" / "cam-1"
    client = client_side(folder, folder)
    client.check_hostname = False  # so that the certificate's purpose alone must stop it
    with pytest.raises(ssl.SSLError, match="purpose"):
        talk(server_side(folder, role="client"), client)


def test_certificates_of_an_expired_authority_are_refused(tmp_path: Path) -> None:
    """Its clients look at the dates themselves, before they connect; this is TLS without them."""
    certs.make_authority(tmp_path, **PAST)
    certs.make_server(tmp_path, ["localhost"], **PAST)
    certs.make_client(tmp_path, "cam-1", **PAST)
    with pytest.raises(ssl.SSLError, match="expired"):
        talk(server_side(tmp_path), client_side(tmp_path / "clients" / "cam-1", tmp_path))


def test_grpc_accepts_the_credentials_and_tells_who_came(home: Path) -> None:
    grpc = pytest.importorskip("grpc")
    seen: list[tuple[str, int]] = []

    def answer(request: bytes, call: object) -> bytes:
        peer = call.auth_context()  # type: ignore[attr-defined]
        seen.append((certs.identity(peer), parse(peer).serial_number))
        return request

    mine, theirs = certs.load_server_credentials(home), certs.load_client_credentials(home, "cam-1")
    server = grpc.server(ThreadPoolExecutor(1))
    handler = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", {"a": handler}),))
    secure = grpc.ssl_server_credentials(
        [(mine.key, mine.certificate)], mine.authority, require_client_auth=True
    )
    port = server.add_secure_port("127.0.0.1:0", secure)
    server.start()
    try:
        channel_credentials = grpc.ssl_channel_credentials(
            theirs.authority, theirs.key, theirs.certificate
        )
        with grpc.secure_channel(f"127.0.0.1:{port}", channel_credentials) as channel:
            assert channel.unary_unary("/t/a")(b"hi", timeout=20) == b"hi"
    finally:
        server.stop(0).wait(10)
    assert seen == [("cam-1", certs.listing(home)[-1].serial)]


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


def grpc_accepts(server: Path, client: Path, trusted: bytes) -> bool:
    """Return whether gRPC, which has its own TLS, lets these two talk; each path is without its ending."""
    grpc = pytest.importorskip("grpc")
    handler = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
    serving = grpc.server(ThreadPoolExecutor(1))
    serving.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", {"a": handler}),))
    keys, chains = (
        [place.with_name(f"{place.name}.{kind}").read_bytes() for place in (server, client)]
        for kind in ("key", "crt")
    )
    pair = [(keys[0], chains[0])]
    port = serving.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials(pair, trusted, require_client_auth=True)
    )
    serving.start()
    mine = grpc.ssl_channel_credentials(trusted, keys[1], chains[1])
    try:
        with grpc.secure_channel(f"localhost:{port}", mine) as channel:
            return bool(channel.unary_unary("/t/a")(b"hi", timeout=20) == b"hi")
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        return False
    finally:
        serving.stop(0).wait(10)


def test_grpc_trusts_nobody_whom_a_device_signed_and_no_device_as_a_server(
    home: Path, stranger: Path, signed_by_a_device: Path, tmp_path: Path
) -> None:
    trusted = (home / "authority.crt").read_bytes()
    server, client = home / "server", home / "clients" / "cam-1" / "client"
    assert grpc_accepts(server, client, trusted)
    shutil.copytree(home, tmp_path / "copy")
    certs.make_client(tmp_path / "copy", "localhost")  # a device may have the name of a host
    for false in (
        signed_by_a_device / "server",
        stranger / "server",
        tmp_path / "copy" / "clients" / "localhost" / "client",
    ):
        assert not grpc_accepts(false, client, trusted), false
    for false in (
        signed_by_a_device / "clients" / "cam-2" / "client",
        stranger / "clients" / "cam-1" / "client",
        server,
    ):
        assert not grpc_accepts(server, false, trusted), false


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


def test_a_half_written_file_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certs.make_authority(tmp_path)
    certs.make_client(tmp_path, "cam-1")
    folder = tmp_path / "clients" / "cam-1"
    good = (folder / "client.crt").read_bytes()

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("semisfl.net.tls.x509_parts.os.replace", full)
    with pytest.raises(CertError, match=r"client.key cannot be written: No space left"):
        certs.make_client(tmp_path, "cam-1", overwrite=True)
    monkeypatch.undo()
    assert (folder / "client.crt").read_bytes() == good
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    certs.load_client_credentials(folder)


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
