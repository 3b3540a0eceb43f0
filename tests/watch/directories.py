"""Run directories in every state that a page may meet them in."""

import json
import random
from pathlib import Path
from typing import Any

from semisfl.runs.directory import RunDirectory
from semisfl.runs.start import train
from tests import toy

# Names come from certificates and folders: whatever they hold is shown, and never obeyed.
EVIL = "<img src=x onerror=\"document.title='hacked'\">"


def finished(path: Path, *settings: str) -> Path:
    """Train a small run to its end."""
    data = toy.dataset()
    config = toy.values("semisfl", "semisfl.confidence_threshold=0.3", *settings)
    partition, model = toy.partition(data), toy.network()
    train(config, out=path, data=data, partition=partition, model=model, device="cpu")
    return path


def unfinished(path: Path, done: Path) -> Path:
    """Write what a run leaves that is killed after its second round."""
    path.mkdir(parents=True)
    for name in ("config.toml", "holdings.json", "environment.json"):
        (path / name).write_bytes((done / name).read_bytes())
    lines = (done / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[:2]) + lines[2][:40])
    log = (done / "run.log").read_text()
    (path / "run.log").write_text(log + "2026-11-15T10:00:00Z WARNING the disk is nearly full\n")
    # A process of this machine that is not there: numbers end far below this one.
    node = (done / "run.lock").read_text().rpartition(" on ")[2]
    (path / "run.lock").write_text(f"process 999999999 on {node}")
    return path


def crowd(path: Path, clients: int = 1000, rounds: int = 600) -> Path:
    """Write a served run of many devices that has done many rounds; its process is gone."""
    config = toy.values(
        *("semisfl", f"rounds={rounds + 500}", f"clients.total={clients}"),
        *("clients.active=20", "fleet.kind=network"),
    )
    draw = random.Random(5)
    counts = [[draw.randrange(60) for _ in range(10)] for _ in range(clients + 1)]
    classes = [EVIL, *(f"class {number}" for number in range(1, 10))]
    RunDirectory.create(path, config).unlock()
    holdings = {"classes": classes, "server": counts[0], "clients": counts[1:]}
    (path / "holdings.json").write_text(json.dumps(holdings))
    with (path / "metrics.jsonl").open("w") as file:
        for number in range(rounds):
            file.write(json.dumps(_row(number, clients, draw)) + "\n")
    names = [f"camera-{number:04d}" for number in range(clients)]
    names[7] = EVIL
    index = {name: number for number, name in enumerate(names)}
    (path / "roster.json").write_text(json.dumps({"index": index, "images": {}}))
    _fleet(path, names, draw)
    with (path / "run.log").open("w") as file:
        for number in range(3000):
            file.write(f"2026-11-15T10:00:00Z INFO line {number}\n")
        file.write(f"2026-11-15T10:00:00Z WARNING {EVIL} is left out of this round\n")
    return path


def _row(number: int, clients: int, draw: random.Random) -> dict[str, Any]:
    progress = 1 - 1 / (1 + number / 150)
    chosen = draw.sample(range(clients), 20)
    row: dict[str, Any] = {
        "round": number,
        "learning_rate": 0.02,
        "supervised_steps": 100 if number < 900 else 66,
        "loss_supervised": 2.3 - 1.8 * progress + draw.random() / 10,
        "loss_semi": 5.0 - 3 * progress + draw.random() / 5,
        "mask_rate": 1 - 0.8 * progress,
        "contributing": 20,
        "coverage_by_client": {str(client): progress * draw.random() for client in chosen},
        "bytes": {"model_down": 10**6 * (number + 1), "features_up": 4 * 10**6 * (number + 1)},
        "bytes_total": 5 * 10**6 * (number + 1),
        "seconds": 2.0 + draw.random(),
    }
    if number % 10 == 9:
        row |= {"accuracy": 20 + 70 * progress, "accuracy_teacher": 20 + 70 * progress}
    return row


def _fleet(path: Path, names: list[str], draw: random.Random) -> None:
    stamp = "2026-11-15T10:{:02d}:{:02d}Z"
    devices = [
        {
            "client": number,
            "name": name,
            "images": draw.randrange(50, 600),
            "since": stamp.format(draw.randrange(60), draw.randrange(60)),
            "seen": stamp.format(59, draw.randrange(60)),
            "bytes_up": draw.randrange(10**9),
            "bytes_down": draw.randrange(10**8),
            "certificate_until": "9999-01-01T00:00:00Z" if number else "2026-01-01T00:00:00Z",
        }
        for number, name in enumerate(names)
    ]
    standing = {"time": stamp.format(59, 59), "clients": devices}
    (path / "fleet.json").write_text(json.dumps(standing))
    events: list[dict[str, Any]] = [
        *({"event": "here", "name": name, "client": n} for n, name in enumerate(names[:400])),
        {"event": "left_out", "name": names[7], "client": 7, "reason": f"no progress {EVIL}"},
        {
            **{"event": "refused", "name": EVIL, "peer": "ipv4:198.51.100.4:49152"},
            "reason": "it broke the protocol",
        },
        {
            "event": "refused",
            "name": "camera-x",
            "reason": "the certificate of camera-x is revoked",
        },
        {"event": "refused", "name": "camera-y", "reason": "all clients.total places are taken"},
    ]
    with (path / "fleet.jsonl").open("w") as file:
        for event in events:
            file.write(json.dumps({"time": stamp.format(59, 1), **event}) + "\n")
