"""``semisfl serve``, ``join`` and ``demo-network``: training with real devices."""

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semisfl.cli import console, watching
from semisfl.cli.inspecting import checked_digests, inspect
from semisfl.cli.options import (
    EXIT_CODES,
    Accept,
    AllowMethod,
    Device,
    DeviceCerts,
    Insecure,
    PolicyFile,
    Preset,
    Quiet,
    ServerCerts,
    Settings,
    chosen_preset,
    name_of,
    needs_network,
    refuse_beside_resume,
    require_certs,
    show_log,
    values_of,
    warn_of_unread,
)
from semisfl.cli.serve_model import serve_model
from semisfl.cli.use_model import Cut
from semisfl.settings.counts import amount, counted

if TYPE_CHECKING:
    from semisfl.runs.portable import Description

log = logging.getLogger(__name__)


def serve(
    preset: Preset = "",
    settings: Settings = None,
    labeled: Annotated[
        Path | None, typer.Option(help="Folder with train/<class>/* and test/<class>/*.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN|FILE", help="Do not train: answer `classify` with this trained model."
        ),
    ] = None,
    cut: Cut = None,
    certs: ServerCerts = Path("certs"),
    listen: Annotated[str, typer.Option(help="HOST:PORT to listen on.")] = "0.0.0.0:8443",
    out: Annotated[
        Path | None, typer.Option(help="Run directory; default: a new one under runs/.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this directory.")] = None,
    allow_method: AllowMethod = None,
    device: Device = "auto",
    insecure_loopback: Insecure = False,
    watch: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]",
            help=f"Also serve the page of `semisfl watch`; default address {watching.LISTEN}.",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Also serve /metrics for Prometheus at this address."),
    ] = None,
    token_file: watching.Token = None,
    quiet: Quiet = False,
    context: typer.Context = None,  # type: ignore[assignment]  # typer fills it in
) -> None:
    """Train with the devices that join, or serve a trained model. SIGTERM stops; --resume continues a run."""
    if model is not None:
        serve_model(model, certs, listen, cut, device, insecure_loopback=insecure_loopback)
        return
    if labeled is None:
        raise ValueError("serve needs --labeled FOLDER to train, or --model RUN to answer devices")
    with needs_network():
        from semisfl.net import hostport
        from semisfl.net.server.fleet import NetworkFleet
        from semisfl.net.tls.credentials import load_server_credentials
    from semisfl.cli import one_run
    from semisfl.cli.signals import StopSignals
    from semisfl.fleet.setup import NetworkOptions
    from semisfl.runs import run_log, start
    from semisfl.runs.directory import RunDirectory
    from semisfl.runs.run_data import check_classes, load_images
    from semisfl.settings import config, presets

    if resume is not None:
        refuse_beside_resume(context)
    else:
        preset = chosen_preset(preset, settings, str(labeled), quiet=quiet)
    place = resume or out or one_run.free_directory(f"{name_of(preset)}-served")
    options = (
        RunDirectory.open(resume).changed(settings or [])
        if resume
        else config.parse(presets.served(values_of(preset, settings)))
    )
    warn_of_unread(options, settings)
    show_log()
    identity = None if insecure_loopback else certs
    with (
        StopSignals() as signals,
        run_log.collected(),
        watching.beside(watch, token_file, identity) as show,
        watching.exported(metrics, token_file, identity) as export,
    ):
        network = NetworkOptions(listen, identity, insecure_loopback)
        # Mistakes first: decoding images may take minutes.
        hostport.check_listen(network)
        if identity is not None:
            load_server_credentials(identity)
        if not resume:
            RunDirectory.check_free(place)
        data = load_images(str(labeled), options)
        check_classes(data)
        arguments: dict[str, Any] = {
            "data": data,
            "device": device,
            "network": network,
            "stop": signals.flag,
        }
        begun = (
            start.go_on(place, settings=settings or (), **arguments)
            if resume
            else start.begin(options, out=place, **arguments)
        )
        with begun as run:
            fleet = run.experiment.fleet
            assert isinstance(fleet, NetworkFleet)
            log.info("%s", _labels_used(run.experiment.description))
            console.say(f"devices accept this run with --accept {fleet.terms.digest}")
            console.say(f"listening on port {fleet.port}; waiting for clients")
            assert run.directory is not None
            place = run.directory.path
            show(place)
            sinks = export(fleet)
            result = one_run.rounds(
                run,
                signals,
                quiet=quiet,
                sinks=sinks,
                busy=lambda: fleet.waiting.state is None,
            )
    again = (
        f"semisfl serve --resume {console.quoted(place)} --labeled {console.quoted(labeled)} ..."
    )
    if ending := one_run.how_it_ended(result, options, again):
        print(ending)
    if not result.stopped:
        print(
            f"{one_run.judged(options)} {result.accuracy:.1f} % after the last round ({counted(len(result.rounds), 'round')})"
            f"{one_run.at_the_end(result)}; saved in {place}"
        )
    one_run.leave_if_diverged(result)


def _labels_used(about: "Description") -> str:
    aside = about.tested_on if about.judged_on == "validation" else 0
    apart = f", {aside} of them for validation" if aside else ""
    return f"all {about.labeled + aside} labelled images are used{apart}; data.labeled is for simulations"


def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The server.")],
    data: Annotated[Path, typer.Option(help="Folder of images; they stay on this device.")],
    certs: DeviceCerts = None,
    device: Device = "auto",
    insecure_loopback: Insecure = False,
    name: Annotated[
        str, typer.Option(help="This device's name; only with --insecure-loopback.")
    ] = "",
    allow_method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PACKAGE.MODULE:CLASS",
            help="Allow the server to run this method of an installed package; may be repeated.",
        ),
    ] = None,
    policy: PolicyFile = None,
    accept: Accept = None,
    status: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Keep this device's state and counts there."),
    ] = None,
) -> None:
    """Train with this device's images until the run ends; reconnect when the connection is lost."""
    with needs_network():
        from semisfl.net.client import join as client
        from semisfl.net.client.rejection import Rejected
        from semisfl.net.client.report import Report
    from semisfl.cli.signals import StopSignals
    from semisfl.stopping import Stopped

    require_certs("join", certs, insecure_loopback)
    if name and not insecure_loopback:
        raise ValueError(
            f"--name {name} is for --insecure-loopback alone: with --certs a device has the name in its "
            "certificate, and two devices need two certificates"
        )
    show_log()
    report = Report(status)
    try:
        with StopSignals() as signals, signals.running(lambda: report.busy):
            client.join(
                address,
                data,
                certificates=certs,
                device=device,
                insecure_loopback=insecure_loopback,
                name=name,
                allow_methods=allow_method or (),
                policy=policy,
                accept=checked_digests(accept),
                stop=signals.flag,
                report=report,
            )
    except Rejected as refused:
        console.say(report.line(), "error")
        raise typer.Exit(EXIT_CODES[refused.kind]) from refused
    except Stopped:
        pass
    console.say(report.line())


def demo_network(
    out: Annotated[
        Path | None, typer.Option(help="Folder for certificates, images and the run.")
    ] = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Train with a server and four devices on this machine, over TLS."""
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
        print(f"stopped after {counted(len(result.rounds), 'round')}; saved in {place}")
        return
    sent = amount(result.rounds[-1]["bytes_total"])
    print(
        f"accuracy {result.accuracy:.1f} % after {len(result.rounds)} rounds with four devices, {sent} sent "
        f"over mutual TLS, {console.clock(time.monotonic() - started)} min; no image left its device"
    )
    print(f"saved in {place}; docs/deploy.md does the same on real machines")


COMMANDS = {"serve": serve, "join": join, "inspect": inspect, "demo-network": demo_network}
