"""``semisfl bench``: how fast this machine trains."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from semisfl.cli import console, output
from semisfl.cli.options import Device, Json
from semisfl.files import write_whole


def bench(
    preset: Annotated[
        str | None,
        typer.Argument(
            metavar="[PRESET]",
            help="Default: several presets that this machine can train; with --client, cifar10.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Time only SemiSFL and Supervised-only.")
    ] = False,
    client: Annotated[
        bool, typer.Option("--client", help="Measure this device as one client, and nothing else.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="With --client: write a profile for `plan` and `replay --profile`."),
    ] = None,
    device: Device = "auto",
    json_: Json = False,
) -> None:
    """Time rounds on this machine with synthetic images, and show what they spend time on."""
    _check_preset(preset)
    if client:
        _bench_client(preset or "cifar10", device, out, json_)
        return
    if out is not None:
        raise ValueError("--out writes the profile of a client; add --client, or use --json > FILE")
    from semisfl.costs.bench import timings

    result = timings(device, quick, [preset] if preset else ())
    if json_:
        print(json.dumps(result, indent=2))
    else:
        _print_rounds(result)


def _check_preset(preset: str | None) -> None:
    from semisfl.settings.catalog import DATA
    from semisfl.settings.presets import PRESETS

    known = [name for name in PRESETS if name in DATA]
    if preset is not None and preset not in known:
        raise ValueError(f"preset {preset!r} cannot be timed; use one of {', '.join(known)}")


def _print_rounds(result: dict[str, Any]) -> None:
    product = result["matrix_product_tflops"]
    share = f"% of {product:.1f}" if product >= 1 else f"% of {product:.2f}"
    columns = ("preset", "method", "s per round", "TFLOP/s", share, "start-up s", "peak GiB")
    rounds = output.table("", columns, text=2)
    for entry in result["rounds"]:
        rounds.add_row(
            entry["preset"],
            entry["method"],
            f"{entry['seconds_a_round']:.3f}",
            f"{entry['tflops']:.3g}",
            f"{entry['share_of_matrix_product_percent']:.0f}",
            *(f"{entry[k]:.1f}" if k in entry else "" for k in ("start_up_seconds", "peak_gib")),
        )
    output.show(rounds)
    for entry in result["rounds"]:
        if "shares_percent" in entry:
            shares = entry["shares_percent"].items()
            print(
                f"{entry['preset']}: "
                + ", ".join(f"{kind} {share:.0f} %" for kind, share in shares)
            )
    if "growth" in result:
        grown = output.table("", ("clients", "active", "s per round", "peak GiB"), text=0)
        for entry in result["growth"]:
            grown.add_row(
                str(entry["clients"]),
                str(entry["active"]),
                f"{entry['seconds_a_round']:.3f}",
                f"{entry['peak_gib']:.2f}",
            )
        output.show(grown)


def _bench_client(preset: str, device: str, out: Path | None, as_json: bool) -> None:
    from semisfl.costs.client_speed import client_speed

    if out is not None and out.suffix != ".toml":
        raise ValueError(f"--out {out} must end in .toml, because --profile reads TOML")
    speed = client_speed(preset, device)
    if out is not None:
        write_whole(out, _as_profile(speed).encode())
    if as_json:
        print(json.dumps(speed))
        return
    print(
        f"{speed['gflops']:.1f} GFLOP/s in iterations of {speed['model']} with {speed['batch']} images, "
        f"{speed['seconds_an_iteration']:.3f} s each, on {speed['device']}"
    )
    if out is not None:
        print(f"profile: {out}; use it with: semisfl plan {preset} --profile {console.quoted(out)}")


def _as_profile(speed: dict[str, Any]) -> str:
    """Return the TOML of a profile whose only device is this one."""
    about = f"measured with {speed['model']}, batch {speed['batch']}, on {speed['device']}"
    device = f'name = "this device", gflops = {speed["gflops"]:.3f}, memory_gb = {speed["memory_gb"]:.1f}'
    return (
        f'[measured]\nabout = "{about}"\n'
        "# The server was not measured: this is the assumption of jetson-mix.\n"
        f"server_gflops = 11600\ndevices = [{{ {device} }}]\n"
    )


COMMANDS = {"bench": bench}
