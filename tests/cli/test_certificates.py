"""``semisfl certs`` where the authority is and where it is not: what is done, and what is said."""

import json
import re
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from semisfl.cli.main import main
from semisfl.net.tls import certs
from semisfl.net.tls.certs import CertError
from semisfl.net.tls.credentials import hosts
from semisfl.net.tls.ledger import revoked_serials

NOW = datetime.now(UTC)


@pytest.fixture
def deployed(tmp_path: Path) -> tuple[Path, Path]:
    """Return the authority's folder, and the server's as the documentation makes it."""
    home, server = tmp_path / "home", tmp_path / "server"
    certs.make_authority(home)
    certs.make_server(home, ["localhost"])
    for name in ("cam-1", "cam-2"):
        certs.make_client(home, name)
    server.mkdir()
    for name in ("authority.crt", "server.crt", "server.key", "revoked.txt"):
        (server / name).write_bytes((home / name).read_bytes())
    return home, server


def semisfl(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """Return a command's exit status and all that it prints, in one line."""
    status = main([str(word) for word in words])
    printed = capsys.readouterr()
    return status, " ".join((printed.out + printed.err).split())


def test_a_certificate_is_revoked_on_the_server(
    deployed: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    home, server = deployed
    serials = {entry.name: entry.serial for entry in certs.listing(home)}
    revoke = ("certs", "revoke", "--dir", server)
    status, output = semisfl(capsys, *revoke, "--name", "cam-1")
    assert status == 2
    assert "issued.txt is not there" in output and "--serial HEX or --certificate FILE" in output

    status, output = semisfl(capsys, *revoke, "--serial", f"{serials['cam-1']:X}")
    assert (status, serials["cam-1"] in revoked_serials(server)) == (0, True), output
    assert serials["cam-2"] not in revoked_serials(server)
    file = home / "clients" / "cam-2" / "client.crt"
    status, output = semisfl(capsys, *revoke, "--certificate", file)
    assert (status, serials["cam-2"] in revoked_serials(server)) == (0, True), output
    assert "of cam-2" in output and str(server / "revoked.txt") in output

    before = (server / "revoked.txt").read_text()
    assert semisfl(capsys, *revoke, "--certificate", file)[1].startswith("nothing to do")
    for words, reason in [
        (["--serial", "abcd"], "cut short"),
        (["--serial", "1" * 48], "not the decimal `serial`"),
        (["--serial", "xyz"], "not hexadecimal"),
        (["--certificate", server / "server.crt"], "is not a client's"),
        (["--certificate", server / "server.key"], "not a certificate in PEM"),
        ([], "needs one of --name NAME, --serial HEX, --certificate FILE"),
        (["--name", "cam-1", "--serial", "abcd"], "needs one of"),
    ]:
        status, output = semisfl(capsys, *revoke, *words)
        assert status == 2 and reason in output, output
    assert (server / "revoked.txt").read_text() == before


def test_revoking_one_of_several_by_its_first_digits(deployed: tuple[Path, Path]) -> None:
    home, _ = deployed
    old = certs.listing(home)[2]
    new = certs.renew_client(home, "cam-1")
    assert certs.revoke_serial(home, f"0x{old.serial:X}"[:14]) == (old.serial, True)
    assert certs.revoke_serial(home, f"{old.serial:x}") == (old.serial, False)
    assert new.serial not in revoked_serials(home)
    with pytest.raises(CertError, match="is the server's: only clients"):
        certs.revoke_serial(home, f"{certs.listing(home)[1].serial:x}")


def test_renewing(deployed: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    home, _ = deployed
    folder = home / "clients" / "cam-1"
    before = certs.load_client_credentials(folder)
    status, output = semisfl(capsys, "certs", "renew", "--dir", home, "--name", "cam-1")
    assert status == 0 and "the old certificate stays valid until" in output
    after = certs.load_client_credentials(folder)
    assert after.key != before.key and certs.identity(after.certificate) == "cam-1"
    status, output = semisfl(capsys, "certs", "renew", "--dir", home, "--server")
    assert status == 0 and "to the server" in output
    certs.load_server_credentials(home)
    more = ("--host", "192.0.2.7", "--host", "localhost")
    assert semisfl(capsys, "certs", "renew", "--dir", home, "--server", *more)[0] == 0
    certificate = x509.load_pem_x509_certificate((home / "server.crt").read_bytes())
    assert hosts(certificate) == ["localhost", "192.0.2.7"]
    certs.revoke(home, "cam-2")
    for words, reason in [
        (["--name", "cam-1", "--host", "a"], "needs --name NAME"),
        ([], "needs --name NAME"),
        (["--name", "cam-1", "--server"], "needs --name NAME"),
        (["--name", "cam-3"], "never issued a certificate; those that were: cam-1, cam-2"),
        (["--name", "cam-2"], "every certificate of 'cam-2' is revoked"),
        (["--name", "../cam-1"], "client name '../cam-1'"),
    ]:
        status, output = semisfl(capsys, "certs", "renew", "--dir", home, *words)
        assert status == 2 and reason in output, output


def test_a_devices_key_never_leaves_it(
    deployed: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, device, request = deployed[0], tmp_path / "cam-3", tmp_path / "cam-3" / "cam-3.csr"
    for _ in range(2):  # the second time the certificate is renewed
        status, asked = semisfl(capsys, "certs", "request", "--name", "cam-3", "--dir", device)
        assert status == 0 and (device / "client.key").stat().st_mode & 0o77 == 0
        if (device / "client.crt").exists():
            certs.load_client_credentials(device)  # the old certificate still works
        status, signed = semisfl(capsys, "certs", "sign", request, "--dir", home)
        assert status == 0, signed
        (fingerprint,) = re.findall(r"fingerprint of the key (\w+);", asked)
        assert f"cam-3 has the key with fingerprint {fingerprint}:" in signed
        made = home / "clients" / "cam-3"
        assert sorted(file.name for file in made.iterdir()) == ["authority.crt", "client.crt"]
        for file in made.iterdir():
            (device / file.name).write_bytes(file.read_bytes())
        credentials = certs.load_client_credentials(device)
        assert certs.identity(credentials.certificate) == "cam-3"
    entries = [entry for entry in certs.listing(home) if entry.name == "cam-3"]
    assert [entry.role for entry in entries] == ["client", "client"]
    assert revoked_serials(home) == frozenset()

    # A device of the old way goes on with its key; nobody else gets its name.
    old, other = home / "clients" / "cam-1", tmp_path / "other"
    certs.sign_request(home, certs.make_request(old, "cam-1")[0])
    certs.make_request(other, "cam-1")
    certs.make_request(other, "cam-3")
    (other / "text.csr").write_text("rubbish")
    (other / "broken.csr").write_bytes(request.read_bytes()[:-120] + request.read_bytes()[-90:])
    for file, reason in [
        (other / "cam-1.csr", "'cam-1' has a certificate with another key"),
        (other / "cam-3.csr", "'cam-3' has a certificate with another key"),
        (other / "text.csr", "is no request"),
        (other / "broken.csr", "is no request|is damaged"),
        (other / "missing.csr", "cannot be read"),
        (forged(other, "../cam-3"), "client name '../cam-3'"),
    ]:
        status, output = semisfl(capsys, "certs", "sign", file, "--dir", home)
        assert status == 2 and re.search(reason, output), output
    status, output = semisfl(capsys, "certs", "renew", "--dir", home, "--name", "cam-3")
    assert status == 2 and "the key of 'cam-3' is on the device" in output
    certs.revoke(home, "cam-3")
    with pytest.raises(CertError, match="every certificate of 'cam-3' is revoked"):
        certs.sign_request(home, request)
    shutil.rmtree(home / "clients" / "cam-3")
    certs.sign_request(home, other / "cam-3.csr")  # it was lost, and comes back with a new key


def test_a_request_decides_nothing_but_name_and_key(deployed: tuple[Path, Path]) -> None:
    home, server = deployed
    certs.sign_request(home, forged(server, "cam-4"))
    made = (home / "clients" / "cam-4" / "client.crt").read_bytes()
    assert certs.identity(made) == "cam-4"
    constraints = x509.load_pem_x509_certificate(made).extensions.get_extension_for_class(
        x509.BasicConstraints
    )
    assert constraints.value.ca is False


def forged(folder: Path, name: str) -> Path:
    """Return a request for an authority's certificate with the URI of another device."""
    key = ec.generate_private_key(ec.SECP256R1())
    names = [x509.UniformResourceIdentifier("semisfl://client/cam-1")]
    request = (
        x509.CertificateSigningRequestBuilder(
            x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "forged.csr").write_bytes(request.public_bytes(serialization.Encoding.PEM))
    return folder / "forged.csr"


def test_certs_list_shows_the_days_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certs.make_authority(tmp_path, valid_from=NOW - timedelta(days=30))
    ends = {"old": NOW - timedelta(days=1), "gone": NOW + timedelta(days=50, hours=1)}
    ends["new"] = NOW + timedelta(days=40, hours=1)
    for name, end in ends.items():
        certs.make_client(tmp_path, name, valid_from=NOW - timedelta(days=9), valid_until=end)
    certs.revoke(tmp_path, "gone")
    certs.make_client(tmp_path, "early", valid_from=NOW + timedelta(days=1))
    status, output = semisfl(capsys, "certs", "list", "--dir", tmp_path, "--json")
    rows = json.loads(output)
    states = ["valid", "expired", "revoked", "valid", "not yet valid"]
    assert [row["state"] for row in rows] == states
    assert [row["days_left"] for row in rows[2:4]] == [50, 40] and rows[1]["days_left"] < 0
    assert [int(row["serial_hex"], 16) for row in rows] == [row["serial"] for row in rows]
    status, table = semisfl(capsys, "certs", "list", "--dir", tmp_path)
    assert status == 0
    assert f"new valid {rows[3]['serial_hex'][:16]} {ends['new']:%Y-%m-%d} 40" in table
