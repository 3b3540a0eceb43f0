"""Compute the memory, CPU and bandwidth that one server needs for so many devices. Loads no torch.

The constants are measured (results/cpu, docs/sizing.md). Beyond 5,000 connected or 1,000 active
devices the numbers are extrapolated in proportion.
"""

from dataclasses import dataclass

ALONE = 305.1 * 2**20
"""Memory of a server without devices."""
CONNECTED = 111.1 * 2**10
"""Memory per connected device."""
ACTIVE = (1096.8 - 447.0) / 1000 * 2**20
"""Memory per active device in a round of small steps: 1,000 devices, at the peak and before."""
STEP_SECONDS = 19.47 / 1000 / 4
"""Server CPU per active device and step: 1,000 devices of 4 small steps took 19.47 s."""
BYTE_SECONDS = 0.0749 / 10 / (3 * 2**20)
"""Server CPU per byte: a step of 10 devices with 2 MiB up and 1 MiB down each took 74.9 ms."""
RETURN_SECONDS = 20.7 / 5000
"""Seconds per device until all are back after a restart."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The part of one active device in a round."""

    steps: int
    up: int
    down: int
    """Bytes in a round."""
    held: int
    """Bytes of its largest answer and of what is sent back, which the server holds at one time."""
    seconds: float
    """How long the devices themselves take for a round: computing and sending."""


@dataclass(frozen=True, kw_only=True)
class ServerSize:
    """The needs of a server with ``devices`` connected devices, ``active`` of them in each round."""

    devices: int
    active: int
    memory_connected: float
    memory_active: float
    back_seconds: float
    """Until all devices are back after a restart."""
    cpu_per_device: float
    """Server CPU seconds per active device and round."""
    server_seconds: float
    """The shortest round that the server's one process allows."""
    device_seconds: float
    up: float
    down: float
    """Bits per second that arrive at the server and leave it, on average over a round."""
    most_active: float
    """Active devices from which on the server's process, not the devices, decides how long a round takes."""

    @property
    def memory(self) -> float:
        return ALONE + self.memory_connected + self.memory_active

    @property
    def round_seconds(self) -> float:
        return max(self.server_seconds, self.device_seconds)


def size_server(devices: int, active: int, work: Work) -> ServerSize:
    """Return what a server needs for such work.

    CPU time is the larger of two measured costs, per step and per byte: each contains some of the other.
    """
    cpu = max(work.steps * STEP_SECONDS, (work.up + work.down) * BYTE_SECONDS)
    server_seconds = active * cpu
    seconds = max(server_seconds, work.seconds)
    return ServerSize(
        devices=devices,
        active=active,
        memory_connected=devices * CONNECTED,
        memory_active=active * max(ACTIVE, work.held),
        back_seconds=devices * RETURN_SECONDS,
        cpu_per_device=cpu,
        server_seconds=server_seconds,
        device_seconds=work.seconds,
        up=8 * active * work.up / seconds,
        down=8 * active * work.down / seconds,
        most_active=work.seconds / cpu,
    )
