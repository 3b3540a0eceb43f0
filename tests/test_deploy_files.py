"""The files of deploy/ name what there is: commands, options, volumes and units that systemd accepts."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from semisfl.cli.main import app

ROOT = Path(__file__).parents[1]
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
SERVICE_KEYS = {
    *("image", "build", "read_only", "tmpfs", "cap_drop", "cap_add", "security_opt", "user"),
    *("entrypoint", "command", "environment", "restart", "depends_on", "healthcheck", "ports"),
    "volumes",
}
CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}


def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    return content


def options_exist(words: list[str]) -> None:
    """Check that every option of a command line is one of its command."""
    command: Any = typer.main.get_command(app)
    known = {"--log-format"}
    for word in words:
        if word in getattr(command, "commands", {}):
            command = command.commands[word]
    known |= {name for option in command.params for name in option.opts}
    used = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert used and used <= known, (words, used - known)


def test_compose_has_a_server_its_page_and_three_devices() -> None:
    content = compose()
    services = content["services"]
    assert {key for key in content if not key.startswith("x-")} == {"services", "volumes"}
    assert set(services) == {"certificates", "server", "page", "device-1", "device-2", "device-3"}
    for name, service in services.items():
        assert service.keys() <= SERVICE_KEYS, name
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
        assert name == "certificates" or "user" not in service, "the image's user is not root"
        for other, condition in service.get("depends_on", {}).items():
            assert other in services and condition["condition"] in CONDITIONS
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert source in content["volumes"] or source.startswith("${"), (name, volume)
        holders = [volume for volume in service["volumes"] if volume.startswith("authority:")]
        assert bool(holders) == (name == "certificates"), "the authority's key stays where it is"


def test_every_command_of_compose_has_the_options_it_uses() -> None:
    for service in compose()["services"].values():
        if service.get("entrypoint"):
            text = service["command"][0].replace("$$", "$")
            lines = re.findall(r"semisfl ((?:certs|serve) .*)", text)
            assert lines
            for line in lines:
                options_exist(line.split())
        else:
            options_exist(service["command"])


def test_the_image_is_not_root_and_has_its_base_as_an_argument() -> None:
    text = (ROOT / "Containerfile").read_text()
    assert "ARG BASE=docker.io/library/python:3.12-slim\nFROM ${BASE}\n" in text
    assert "\nUSER 10001:10001\n" in text and 'ENTRYPOINT ["semisfl"]' in text


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_pass_systemds_own_check(unit: Path, tmp_path: Path) -> None:
    assert [path.name for path in UNITS] == ["semisfl-client.service", "semisfl-server.service"]
    text = unit.read_text()
    for line in re.findall(
        r"semisfl ((?:serve|join) .*?)(?:; |'|$)", text.replace("\\\n", " "), re.M
    ):
        options_exist(line.split())
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed here")
    copy = tmp_path / unit.name
    copy.write_text(text.replace("/usr/local/bin/semisfl", sys.executable))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True
    )
    ours = [line for line in checked.stderr.splitlines() if "semisfl" in line]
    assert checked.returncode == 0 and not ours, checked.stderr
