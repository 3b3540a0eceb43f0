"""``semisfl serve``, ``join`` and ``demo-network``: training with real devices."""

import logging
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
    refuse_beside_resume,
    require_certs,
    values_of,
    warn_of_unread,
)
from semisfl.cli.serve_model import serve_model
from semisfl.cli.use_model import Cut
from semisfl.settings.counts import counted

if TYPE_CHECKING:
    from semisfl.runs.portable import Description

log = logging.getLogger(__name__)


def serve(
    context: typer.Context,
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
            metavar="ADDRESS",
            help=f"Also serve the page of `semisfl watch` at this address, e.g. {watching.LISTEN}.",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Also serve /metrics for Prometheus at this address."),
    ] = None,
    token_file: watching.Token = None,
    quiet: Quiet = False,
) -> None:
    """Train with the devices that join, or serve a trained model. SIGTERM stops; --resume continues a run."""
    if model is not None:
        serve_model(
            model,
            context.obj,
            certs=certs,
            listen=listen,
            cut=cut,
            device=device,
            insecure_loopback=insecure_loopback,
        )
        return
    if labeled is None:
        raise ValueError("serve needs --labeled FOLDER to train, or --model RUN to answer devices")
    from semisfl.cli import runner
    from semisfl.fleet.setup import NetworkOptions
    from semisfl.net.server.fleet import NetworkFleet
    from semisfl.runs import run_log, start
    from semisfl.runs.directory import RunDirectory
    from semisfl.runs.run_data import load_images
    from semisfl.settings import config, presets

    if resume is not None:
        refuse_beside_resume(preset, out)
        options = RunDirectory.open(resume).changed(settings or [])
    else:
        preset = chosen_preset(preset, settings, str(labeled), quiet=quiet)
        options = config.parse(presets.served(values_of(preset, settings)))
    warn_of_unread(options, settings)
    console.show_log()
    identity = None if insecure_loopback else certs
    with (
        run_log.collected(),
        watching.page_of_run(watch, token_file, identity) as show,
        watching.exporter(metrics, token_file, identity) as export,
    ):
        arguments: dict[str, Any] = {
            "data": load_images(str(labeled), options),
            "device": device,
            "network": NetworkOptions(listen, identity, insecure_loopback),
            "stop": context.obj.flag,
        }
        if resume is not None:
            begun = start.go_on(resume, settings=settings or (), **arguments)
        else:
            place = out or runner.free_directory(f"{name_of(preset)}-served")
            begun = start.begin(options, out=place, **arguments)
        with begun as run:
            fleet = run.experiment.fleet
            assert isinstance(fleet, NetworkFleet) and run.directory is not None
            place = run.directory.path
            log.info("%s", _labels_used(run.experiment.description))
            console.say(f"devices accept this run with --accept {fleet.terms.digest}")
            console.say(f"listening on port {fleet.port}; waiting for clients")
            show(place)
            result = runner.finish(
                run,
                context.obj,
                quiet=quiet,
                sinks=export(fleet),
                busy=lambda: fleet.waiting.state is None,
            )
    again = (
        f"semisfl serve --resume {console.quoted(place)} --labeled {console.quoted(labeled)} ..."
    )
    if ending := runner.how_it_ended(result, options, again):
        print(ending)
    if not result.stopped:
        print(
            f"{runner.judged(options)} {result.accuracy:.1f} % after the last round ({counted(len(result.rounds), 'round')})"
            f"{runner.test_accuracy(result)}; saved in {place}"
        )
    runner.leave_if_diverged([result.diverged])


def _labels_used(about: "Description") -> str:
    aside = about.tested_on if about.judged_on == "validation" else 0
    apart = f", {aside} of them for validation" if aside else ""
    return f"all {about.labeled + aside} labelled images are used{apart}; data.labeled is for simulations"


def join(
    context: typer.Context,
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
    from semisfl.net.client import join as client
    from semisfl.net.client.rejection import Rejected
    from semisfl.net.client.report import Report
    from semisfl.stopping import Stopped

    require_certs("join", certs, insecure_loopback)
    if name and not insecure_loopback:
        raise ValueError(
            f"--name {name} is for --insecure-loopback alone: with --certs a device has the name in its "
            "certificate, and two devices need two certificates"
        )
    console.show_log()
    report = Report(status)
    try:
        with context.obj.running(lambda: report.busy):
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
                stop=context.obj.flag,
                report=report,
            )
    except Rejected as refused:
        console.say(report.line(), "error")
        raise typer.Exit(EXIT_CODES[refused.kind]) from refused
    except Stopped:
        pass
    console.say(report.line())


COMMANDS = {"serve": serve, "join": join, "inspect": inspect}
