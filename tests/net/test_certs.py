import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from semisfl.net.tls import certs, credentials
from semisfl.net.tls.certs import CertError, Credentials
from semisfl.net.tls.ledger import revoked_serials
from tests.disk import largest_file

NOW = datetime.now(UTC)


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
    with pytest.raises(CertError, match=r"client\.key cannot be read: No such file"):
        certs.load_client_credentials(folder)


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
