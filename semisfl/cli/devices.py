"""``semisfl serve``, ``join`` and ``demo-network``: training with real devices."""

import time
from pathlib import Path
from typing import Annotated

import typer

from semisfl.cli import console, watching
from semisfl.cli.options import (
    Device,
    Insecure,
    Preset,
    Quiet,
    Settings,
    name_of,
    needs_network,
    refuse_beside_resume,
    show_log,
    values_of,
)


def serve(
    labeled: Annotated[Path, typer.Option(help="Folder with train/<class>/* and test/<class>/*.")],
    preset: Preset = "digits",
    settings: Settings = None,
    certs: Annotated[
        Path | None, typer.Option(help="The authority's folder, with server.crt and server.key.")
    ] = Path("certs"),
    listen: Annotated[str, typer.Option(help="HOST:PORT to listen on.")] = "0.0.0.0:8443",
    out: Annotated[Path | None, typer.Option(help="Run directory.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this directory.")] = None,
    device: Device = "auto",
    insecure_loopback: Insecure = False,
    watch: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]", help=f"Serve the page of `semisfl watch`, on {watching.LISTEN}."
        ),
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Serve /metrics for Prometheus there.")
    ] = None,
    token_file: watching.Token = None,
    quiet: Quiet = False,
    context: typer.Context = None,  # type: ignore[assignment]  # typer fills it in
) -> None:
    """Train with the devices that join. SIGTERM stops cleanly; --resume goes on."""
    with needs_network():
        from semisfl.net.server.fleet import NetworkFleet
    from semisfl.cli import one_run
    from semisfl.cli.signals import StopSignals
    from semisfl.fleet.setup import NetworkOptions
    from semisfl.runs import start
    from semisfl.runs.directory import RunDirectory
    from semisfl.runs.experiment import load_images
    from semisfl.settings import config

    if resume is not None:
        refuse_beside_resume(context)
    place = resume or out or one_run.free_directory(f"{name_of(preset)}-served")
    options = (
        RunDirectory.open(resume).changed(settings or [])
        if resume
        else config.parse(values_of(preset, settings))
    )
    show_log()
    identity = None if insecure_loopback else certs
    with (
        StopSignals() as signals,
        watching.beside(watch, token_file, identity) as show,
        watching.exported(metrics, token_file, identity) as export,
    ):
        network = NetworkOptions(listen, identity, insecure_loopback)
        means: start.Means = {
            "data": load_images(str(labeled), options),
            "device": device,
            "network": network,
            "stop": signals.flag,
        }
        begun = (
            start.go_on(place, settings=settings or (), **means)
            if resume
            else start.begin(options, out=place, **means)
        )
        with begun as run:
            assert isinstance(run.experiment.fleet, NetworkFleet)
            console.say(f"listening on port {run.experiment.fleet.port}; waiting for clients")
            assert run.directory is not None
            place = run.directory.path
            show(place)
            sinks = export(run.experiment.fleet)
            result = one_run.rounds(run, signals, quiet=quiet, sinks=sinks)
    again = f"semisfl serve --resume {place} --labeled {labeled} ..."
    if ending := one_run.how_it_ended(result, options, again):
        print(ending)
    if not result.stopped:
        print(
            f"{one_run.judged(options)} {result.accuracy:.1f} % after {len(result.rounds)} rounds"
            f"{one_run.at_the_end(result)}; saved in {place}"
        )


def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The server.")],
    data: Annotated[Path, typer.Option(help="A folder of images; they stay here.")],
    certs: Annotated[
        Path | None,
        typer.Option(help="This device's folder: authority.crt, client.crt, client.key."),
    ] = None,
    device: Device = "auto",
    insecure_loopback: Insecure = False,
    name: Annotated[str, typer.Option(help="Only with --insecure-loopback: who this is.")] = "",
    allow_method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PACKAGE.MODULE:CLASS",
            help="A method that a server may ask for, though it is not installed under a name.",
        ),
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml", help="What this device insists on, whatever the server asks."
        ),
    ] = None,
) -> None:
    """Take part with this device's images until the run ends; reconnects by itself."""
    with needs_network():
        from semisfl.net.client import join as client
        from semisfl.net.client.connection import Rejected
    from semisfl.cli.signals import StopSignals

    if certs is None and not insecure_loopback:
        raise ValueError(
            "join wants --certs DIR, the folder that `semisfl certs client` made for this device"
        )
    show_log()
    try:
        with StopSignals() as signals, signals.running():
            client.join(
                address,
                data,
                certificates=certs,
                device=device,
                insecure_loopback=insecure_loopback,
                name=name,
                allow_methods=allow_method or (),
                policy=policy,
                stop=signals.flag,
            )
    except Rejected as refused:
        raise ValueError(str(refused)) from refused


def demo_network(
    out: Annotated[
        Path | None, typer.Option(help="Where certificates, images and the run go.")
    ] = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """A server and four devices on this machine: real TLS, the embedded digits, under two minutes."""
    with needs_network():
        from semisfl.cli import demo
    from semisfl.cli import one_run
    from semisfl.cli.signals import StopSignals

    place = out or one_run.free_directory("demo-network")
    if place.exists():
        raise ValueError(f"{place} exists already; choose another --out")
    started = time.monotonic()
    with StopSignals() as signals:
        result = demo.demo_network(place, signals, device=device, quiet=quiet)
    if result.stopped:
        print(f"stopped after {len(result.rounds)} rounds; what there is lies in {place}")
        return
    sent = console.amount(result.rounds[-1]["bytes_total"])
    print(
        f"accuracy {result.accuracy:.1f} % after {len(result.rounds)} rounds with four devices, {sent} sent "
        f"over mutual TLS, {console.clock(time.monotonic() - started)} min; no image left its device"
    )
    print(f"saved in {place}; docs/deploy.md does the same on real machines")


COMMANDS = {"serve": serve, "join": join, "demo-network": demo_network}
