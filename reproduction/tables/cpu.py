"""The tables about speed on a CPU, from the study ``cpu``."""

from collections.abc import Callable
from typing import Any

from reproduction.records import measured
from reproduction.tables.numbers import table
from semisfl.settings.counts import amount


def twin() -> str:
    """Return the steps of the fleet beside those of the plain twin."""
    lines = [
        (
            *(case, phase, f"{one['fleet_ms']:.0f}", f"{one['twin_ms']:.0f}"),
            *(f"{one['fleet_images_a_second']:.0f}", f"{one['times_faster']:.2f}"),
        )
        for case, phases in measured("cpu/twin").items()
        for phase, one in phases.items()
    ]
    return table(("case", "phase", "fleet ms", "twin ms", "images/s", "times faster"), lines)


def shares() -> str:
    """Return how much of a SemiSFL round each kind of operation takes."""
    timed = [
        one["shares_percent"] for one in measured("cpu/bench")["rounds"] if "shares_percent" in one
    ]
    kinds = sorted(timed[0], key=lambda kind: (kind == "everything else", -timed[0][kind]))
    lines = [(kind, *(f"{one[kind]:.0f} %" for one in timed)) for kind in kinds]
    return table(("", "digits", "CNN, 32 x 32 x 3"), lines)


def cluster() -> str:
    """Return the iteration's time in one process and over 2 and 4 ranks."""
    two, four = measured("cpu/cluster")
    lines = []
    for one, other in zip(two["rows"], four["rows"], strict=True):
        cells = [f"{one['active']:,}"]
        for row in (one, other):
            cells += [f"{row['one_process_ms']:,.0f}", f"{row['cluster_ms']:,.0f}"]
            cells += [f"{row['times_faster']:.2f}"]
        lines.append((*cells, f"{one['bytes_between_ranks']:,}"))
    head = ["active clients"]
    for ranks in (2, 4):
        head += ["one process, ms", f"{ranks} ranks, ms", "times faster"]
    return table((*head, "bytes between 2 ranks"), lines)


def flower() -> str:
    """Return seconds per round here and in Flower's simulation."""
    keys = ("ours_seconds", "flower_seconds", "ratio")
    fastest = ("ours_fastest_seconds", "flower_fastest_seconds", "ratio_of_fastest_rounds")
    lines = [
        (
            *(work, steps.removeprefix("steps=")),
            *(f"{one[k]:.2f}" if "ratio" in k else f"{one[k]:.3g}" for k in (*keys, *fastest)),
        )
        for work, by_steps in measured("cpu/flower").items()
        if isinstance(by_steps, dict)
        for steps, one in by_steps.items()
    ]
    head = ("local work", "steps", "here, s per round", "Flower, s", "ratio")
    return table((*head, "here, fastest", "Flower, fastest", "ratio"), lines)


LAYERS = {
    "bare": "bare TLS sockets",
    "transport": "transport (streams, chunks, tickets, heartbeats)",
    "fleet": "the whole fleet (frames and values checked, tensors made and encoded)",
}


def network() -> str:
    """Return an iteration through each layer of the network, on two machines."""
    machines = [one for one in measured("cpu/network") if one["benchmark"] == "network_iteration"]
    lines = []
    for layer, title in LAYERS.items():
        cells = [title]
        for one in machines:
            times = "1" if layer == "bare" else f"{one[layer + '_ratio']:.2f}"
            cpu = one[f"{layer}_server_cpu_ms"]
            cells += [f"{one[layer + '_ms']:.0f} ({cpu:.0f})", times]
        lines.append(cells)
    head = [""]
    for machine in ("x86", "Arm"):
        head += [f"{machine}, ms per iteration (server CPU)", "times the bare loop"]
    return table(head, lines)


def idle() -> str:
    """Return what idle clients cost their server."""
    lines = [
        (
            *(f"{one['clients']:,}", f"{one['seconds_to_connect']} s"),
            *(amount(1024 * one["server_kilobytes_a_client"]), f"{one['heartbeat_p99_ms']} ms"),
            f"{one['seconds_until_all_are_back']} s",
        )
        for one in measured("cpu/network")
        if one["benchmark"] == "network_idle"
    ]
    head = ("idle clients", "connected after", "server memory per client", "heartbeat p99")
    return table((*head, "all back after a server kill"), lines)


def training() -> str:
    """Return what training clients cost their server while some die and return."""
    lines = [
        (
            *(f"{one['clients']:,}", f"{one['active']:,}", str(one["rounds"])),
            f"{one['round_seconds_median']:.2g} s, {one['round_seconds_max']:.2g} s",
            f"{one['server_cpu_seconds_a_round']:.2g} s"
            if one["server_cpu_seconds_a_round"] > 9.95
            else f"{one['server_cpu_seconds_a_round']:.1f} s",
            ", ".join(
                f"{one[f'server_megabytes_{when}'] * 2**20 / 1e6:,.0f} MB"  # the file has MiB
                for when in ("connected", "peak")
            ),
            *(f"{one['descriptors']:,}", f"{one['returned']:,}"),
        )
        for one in measured("cpu/training_clients")
    ]
    head = ("clients", "active", "rounds", "round, median and longest", "server CPU per round")
    more = ("server memory, connected and at most", "descriptors", "died and returned")
    return table((*head, *more), lines)


def inference(size: str) -> str:
    """Return the cost of split inference at every cut, for images of one size."""
    by_cut: dict[str, list[Any]] = {}
    for one in measured("cpu/inference")["rows"]:
        if one["input"] == size:
            by_cut.setdefault(one["cut"], []).append(one)
    lines = []
    for cut, rows in by_cut.items():
        is_layer = "codec" in rows[0]
        digits = 0 if is_layer else 1
        lines.append(
            (
                f"`{cut}`" if is_layer else f"*{cut}*",
                f"{rows[0]['device_bytes'] / 1e6:.2f} MB",
                ", ".join(f"{row['bytes_up']:,}" for row in rows),
                ", ".join(f"{row['loopback']['median_ms']:.1f}" for row in rows),
                ", ".join(f"{row['4_mbit']['median_ms']:.{digits}f}" for row in rows),
            )
        )
    head = ("cut", "on the device", "sent up, B: fp32, int8", "loopback, ms", "4 Mbit/s, ms")
    return table(head, lines)


TABLES: dict[str, Callable[[], str]] = {
    "cpu-twin": twin,
    "cpu-shares": shares,
    "cpu-cluster": cluster,
    "cpu-flower": flower,
    "cpu-network": network,
    "cpu-idle": idle,
    "cpu-training": training,
    "cpu-inference-32": lambda: inference("3x32x32"),
    "cpu-inference-96": lambda: inference("3x96x96"),
}
