"""Compare a server that takes the rows of a frozen bottom with a bare TLS server that writes the same bytes.

    python -m reproduction.benchmarks.uploads [DEVICES]

A thousand devices, whose rows were made in advance, send those of 50 images each, all at once and over mutual TLS, from
one process that never loads torch. Prints JSON: MB per second through both servers, their ratio, and by how many MB
the first one's memory grew.
"""

import asyncio
import json
import os
import random
import resource
import ssl
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc.aio
import msgpack

IMAGES, CHUNK = 50, 512 * 1024
LAYERS = [
    {"kind": "conv", "channels": 20, "kernel": 2, "stride": 2},
    *({"kind": "flatten"}, {"kind": "linear"}),
]
"""The bottom gives 3,920 features: an image has as many bytes as after seven stages of EfficientNet-Lite0."""


async def bare(address: str, place: Path, rows: bytes) -> None:
    """Send ``rows`` through a TLS socket, and wait for the byte that confirms them."""
    context = ssl.create_default_context(cafile=str(place / "authority.crt"))
    context.load_cert_chain(place / "client.crt", place / "client.key")
    reader, writer = await asyncio.open_connection(*address.split(":"), ssl=context)
    writer.write(rows)
    await reader.readexactly(1)


async def thin(address: str, place: Path, rows: bytes, hello: Any, ready: Any) -> None:
    """Send ``rows`` as a device with a frozen bottom: see `semisfl.net.chunks` and `frames` for the bytes."""
    files = [(place / name).read_bytes() for name in ("authority.crt", "client.key", "client.crt")]
    channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*files))
    call = channel.stream_stream("/semisfl.Fleet/Session")()
    answer: tuple[str, Any, list[Any]] = ("hello", hello, [])
    size, kind, ticket = len(rows) // IMAGES, "", 0
    while kind != "published":
        if kind != "enrolled":
            body = rows[: size * answer[2][0][2][0]] if answer[2] else b""
            header = msgpack.packb(answer)
            frame = struct.pack("<4sIII", b"SSFL", 4, len(header), 0) + header
            frame += bytes(-len(header) % 16) + body + bytes(-len(body) % 16)
            data = struct.pack("<4sIQ", b"SSF2", ticket, len(frame)) + frame
            for at in range(0, len(data), CHUNK):
                await call.write(data[at : at + CHUNK])
        while len(question := await call.read()) == 16:  # a heartbeat
            await call.write(question)
        ticket, length = struct.unpack_from("<4xI16xI", question)
        kind, fields, _ = msgpack.unpackb(question[32 : 32 + length])
        n = fields["images"] if kind == "encode" else 0
        stored = len(fields["images"]) // 16 if kind == "stored" else 0
        answer = {
            "welcome": ("ready", ready, []),
            "stored": ("missing", {"images": IMAGES - stored, "bottom": False}, []),
            "encode": ("rows", {"images": bytes(16 * n)}, [("rows", "uint8", (n, size), "raw")]),
        }.get(kind, answer)
    await call.done_writing()


async def send(kind: str, address: str, folder: str, devices: int, size: int, *about: Any) -> None:
    """Let all devices send rows of ``size`` bytes, and print the seconds until the last confirmation."""
    begun, rows = time.perf_counter(), bytes(size)
    device: Any = {"bare": bare, "thin": thin}[kind]

    async def stay(place: Path) -> None:
        """Try again after a lost connection: a thousand handshakes at once may take longer than servers wait."""
        try:
            await device(address, place, rows, *about)
        except (OSError, grpc.aio.AioRpcError):
            await asyncio.sleep(random.uniform(0.5, 5))
            await stay(place)

    places = [Path(folder) / "clients" / f"client-{number}" for number in range(devices)]
    await asyncio.gather(*map(stay, places))
    print(time.perf_counter() - begun)


def seconds(*arguments: Any) -> float:
    """Return the seconds that the devices need, in their own process."""
    command = [sys.executable, "-m", "reproduction.benchmarks.uploads", json.dumps(arguments)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


async def bare_seconds(folder: Path, devices: int, size: int) -> float:
    """Return the seconds that a bare server needs for ``devices`` files of ``size`` bytes."""
    context = ssl.create_default_context(
        ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "authority.crt")
    )
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with (folder / f"{id(writer)}.rows").open("wb") as file:
            while file.tell() < size:
                file.write(await reader.read(CHUNK))
            os.fsync(file.fileno())
        writer.write(b"!")

    server = await asyncio.start_server(
        take, "localhost", 0, ssl=context, backlog=devices, ssl_handshake_timeout=600
    )
    address = f"localhost:{server.sockets[0].getsockname()[1]}"
    return await asyncio.to_thread(seconds, "bare", address, str(folder), devices, size)


def uploads(devices: int = 1000) -> dict[str, Any]:
    """Return what ``devices`` reach through both servers."""
    from semisfl.fleet.setup import NetworkOptions
    from semisfl.net import messages
    from semisfl.net.tls import certs
    from semisfl.runs import start
    from semisfl.settings.config import parse

    config = parse(
        {
            "data": {"name": "digits", "labeled": 10},
            "clients": {"total": devices, "bottom": "frozen"},
            "wire": {"student_features": "int8", "teacher_features": "int8"},
            "model": {"layers": LAYERS, "cut": 2, "projector": "none"},
        }
    )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        certs.make_authority(folder)
        certs.make_server(folder, ["localhost"])
        for number in range(devices):
            certs.make_client(folder, f"client-{number}")
        network = NetworkOptions("localhost:0", folder)
        with start.begin(config, out=folder / "run", device="cpu", network=network) as run:
            fleet: Any = run.experiment.fleet
            size = IMAGES * fleet.store.form.size
            ready = {"model": fleet._schemas.digest, "images": IMAGES, "skipped": 0}
            before, address = memory(), f"localhost:{fleet.port}"
            ours = seconds("thin", address, place, devices, size, messages.hello([]), ready)
            grew, complete = memory() - before, fleet.collect()
        theirs = asyncio.run(bare_seconds(folder, devices, size))
    rates = {"fleet_mb_per_s": ours, "bare_mb_per_s": theirs}
    results = {name: round(devices * size / 1e6 / time, 1) for name, time in rates.items()}
    assert complete, "every device has sent its rows"
    return {"devices": devices, **results, "ratio": round(theirs / ours, 2), "memory_grew_mb": grew}


def memory() -> int:
    """Return the most MB that this process has used."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000


if __name__ == "__main__":
    words = [json.loads(word) for word in sys.argv[1:]]
    if words and isinstance(words[0], list):
        asyncio.run(send(*words[0]))
    else:
        print(json.dumps({"benchmark": "uploads", **uploads(*words)}))
