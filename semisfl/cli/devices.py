"""Commands of a server and its devices: ``semisfl serve``, ``join``, ``inspect``, ``classify`` and ``fleet``.

A server runs `serve`, to train with devices or, with ``--model``, to answer them. Each device runs `join` to train, or
`classify` to use a model. Its owner looks at the terms with `inspect` before, and accepts them by their digest: the
hash of what would run on the device and what would leave it. `fleet` is for the operator of the server. All of them
need certificates of `semisfl certs`, except on a loopback address with ``--insecure-loopback``.
"""

import json
import logging
import re
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from semisfl.cli import console, output, watching
from semisfl.cli.options import (
    EXIT_CODES,
    Accept,
    AllowMethod,
    Device,
    DeviceCerts,
    Insecure,
    Json,
    PolicyFile,
    Preset,
    Quiet,
    ServerCerts,
    Settings,
    chosen_preset,
    client_credentials,
    refuse_beside_resume,
    require_certs,
    values_of,
    warn_of_unread,
)
from semisfl.cli.signals import StopSignals
from semisfl.cli.use_model import Csv, Cut, Top, cut_at, open_model, print_predictions
from semisfl.files import read_json
from semisfl.settings.counts import amount, plural

if TYPE_CHECKING:
    from semisfl.fleet.setup import NetworkOptions
    from semisfl.net.terms import Terms
    from semisfl.use.classifier import Classifier

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
    collect_only: Annotated[
        bool,
        typer.Option(
            "--collect-only",
            help="With a frozen bottom: do not train; end when every device has sent its rows.",
        ),
    ] = False,
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
    """Train with the devices that join, or serve a trained model. SIGTERM stops; --resume continues a run.

    The digest of the run's terms is printed at the start: devices accept it with `join --accept`.
    """
    from semisfl.cli import runner
    from semisfl.fleet.setup import NetworkOptions
    from semisfl.net.server.fleet import NetworkFleet
    from semisfl.net.server.frozen import FrozenNetworkFleet
    from semisfl.runs import run_log, start
    from semisfl.runs.directory import RunDirectory
    from semisfl.runs.run_data import load_images
    from semisfl.settings import config, presets

    console.show_log()
    identity = None if insecure_loopback else certs
    network = NetworkOptions(listen, identity, insecure_loopback)
    if model is not None:
        _serve_model(cut_at(open_model(model, device), cut), network, context.obj)
        return
    if labeled is None:
        raise ValueError("serve needs --labeled FOLDER to train, or --model RUN to answer devices")
    if resume is not None:
        refuse_beside_resume(preset, out)
        options = RunDirectory.open(resume).changed(settings or [])
    else:
        preset = chosen_preset(preset, settings, str(labeled), quiet=quiet)
        options = config.parse(presets.limit_influence(values_of(preset, settings)))
    warn_of_unread(options, settings)
    if collect_only and options.clients.bottom == "trained":
        raise ValueError(
            "--collect-only needs clients.bottom = 'frozen': other devices keep no rows"
        )
    with ExitStack() as stack:
        # What is said while images are loaded belongs into the log of the run, whose directory comes later.
        stack.enter_context(run_log.collected())
        arguments: dict[str, Any] = {
            "data": load_images(str(labeled), options),
            "device": device,
            "network": network,
            "stop": context.obj.flag,
        }
        if resume is not None:
            begun = start.go_on(resume, settings=settings or (), **arguments)
        else:
            place = out or runner.free_directory(f"{Path(preset).stem}-served")
            begun = start.begin(options, out=place, **arguments)
        run = stack.enter_context(begun)
        fleet, about = run.experiment.fleet, run.experiment.description
        assert isinstance(fleet, NetworkFleet) and run.directory is not None
        place = run.directory.path
        folders = f"{console.quoted(place)} --labeled {console.quoted(labeled)}"
        # Operators may take data.labeled for a limit on their own images, which it is not.
        aside = about.tested_on if about.judged_on == "validation" else 0
        log.info(
            "labelled images: %d, of which %d for validation; data.labeled is for simulations",
            about.labeled + aside,
            aside,
        )
        # Scripts wait for these two lines: they have the digest and the port that devices need.
        console.say(f"devices accept this run with --accept {fleet.terms.digest}")
        console.say(f"listening on port {fleet.port}; waiting for clients")
        # Only now: the page shows the run's directory, and /metrics its fleet.
        if watch is not None:
            stack.enter_context(
                watching.serve_page("--watch", watch, [place], token_file, identity)
            )
        sinks = []
        if metrics is not None:
            sinks = [
                stack.enter_context(watching.serve_metrics(fleet, metrics, token_file, identity))
            ]
        if collect_only:
            assert isinstance(fleet, FrozenNetworkFleet), "checked above"
            run.started = True  # what devices send is kept
            with context.obj.running(lambda: False):
                run.finished = fleet.collect()
            print(f"{fleet.contents()}; train on them with: semisfl serve --resume {folders} ...")
            return
        result = runner.finish(
            run,
            context.obj,
            quiet=quiet,
            sinks=sinks,
            busy=lambda: fleet.waiting.state is None,
        )
    runner.print_result(result, f"semisfl serve --resume {folders} ...")


def _serve_model(model: "Classifier", network: "NetworkOptions", signals: StopSignals) -> None:
    """Serve the top of a trained model to devices that run its bottom, until a signal comes.

    Args:
        model: the model, cut where devices and server share it.
        network: the address to listen on, and the certificates.
        signals: those of the command.
    """
    from semisfl.use.model_server import ModelServer

    server = ModelServer(model, network)
    if server.served.downloadable:
        console.say(f"devices accept this model with --accept {server.served.digest}")
    console.say(
        f"listening on port {server.port}: {model.path} of {len(model.classes)} classes; devices "
        f"send {server.served.features} features per image"
    )
    try:
        signals.wait()
    finally:
        server.close()
    print(f"stopped after {plural(server.images, 'image')}")


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
    """Train with this device's images until the run ends; reconnect when the connection is lost.

    With a frozen bottom, end when the rows of all images are sent; run it again for new images. The images stay on the
    device. The last line says how many rounds it took part in, or images it sent, and how many bytes.
    """
    from semisfl.net.client import join as client
    from semisfl.net.client.rejection import Rejected
    from semisfl.net.client.report import Report
    from semisfl.stopping import Stopped

    require_certs("join", certs, insecure_loopback)
    # Two devices with one certificate would replace each other's connection, whatever names they are given.
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
                accept=accept or (),
                stop=context.obj.flag,
                report=report,
            )
    except Rejected as refused:
        console.say(report.line(), "error")
        raise typer.Exit(EXIT_CODES[refused.kind]) from refused
    except Stopped:  # a signal came before the device began
        pass
    console.say(report.line())


def inspect(
    source: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT|PRESET|FILE.toml",
            help="A server, or a preset or settings file that a server is to use.",
        ),
    ],
    certs: DeviceCerts = None,
    settings: Settings = None,
    labeled: Annotated[
        Path | None,
        typer.Option(help="The labelled images of `serve`; default: the data set of the preset."),
    ] = None,
    insecure_loopback: Insecure = False,
    allow_method: Annotated[
        list[str] | None,
        typer.Option(metavar="PACKAGE.MODULE:CLASS", help="As for `join`; may be repeated."),
    ] = None,
    json_: Json = False,
) -> None:
    """Show what would be computed on a device and sent from it, and the digest for `join --accept`.

    A server of `serve --model` is shown as `classify` would use it.
    """
    from semisfl.net.client.connection import Target
    from semisfl.net.client.shown_terms import NoTerms, read_terms, text_of_terms
    from semisfl.use.split_inference import read_model, text_of_model

    # A preset may hold a colon in a path, but ends in no port.
    if not re.search(r":\d+$", source):
        terms = planned_terms(source, settings, labeled)
    else:
        credentials = client_credentials("inspect", certs, insecure_loopback)
        try:
            terms = read_terms(
                source,
                credentials,
                insecure_loopback=insecure_loopback,
                allow_methods=allow_method or (),
            )
        except NoTerms:
            # The server trains nothing: it may be `serve --model`.
            model = read_model(Target(source, credentials, insecure_loopback))
            if not model.downloadable:
                raise ValueError(
                    f"{source} serves a top alone; devices need its bottom as a file"
                ) from None
            shown = {"digest": model.digest, "terms": model.terms()}
            print(json.dumps(shown) if json_ else text_of_model(model))
            return
    shown = {"digest": terms.digest, "terms": json.loads(terms.to_json())}
    print(json.dumps(shown) if json_ else text_of_terms(terms))


def planned_terms(preset: str, settings: list[str] | None, labeled: Path | None) -> "Terms":
    """Return the terms that `serve` would have, without a network: what would run on a device, and what would leave it.

    Args:
        preset: the preset or the settings file of the server.
        settings: the server's assignments of ``--set``.
        labeled: the folder of the server's images; None: images have the shape and classes of the preset's data set.
    """
    from semisfl.costs.rounds import planned_images
    from semisfl.models.build import build_model
    from semisfl.net.terms import Terms, bottom_digest
    from semisfl.runs.pretrained import Pretrained
    from semisfl.runs.run_data import check_classes, load_images
    from semisfl.settings import config

    options = config.parse(values_of(preset, settings))
    if labeled is not None:
        data = load_images(str(labeled), options)
        check_classes(data)
        shape, classes, mean, std = data.shape, len(data.classes), data.mean, data.std
    else:
        images = planned_images(options)
        shape, classes = images.shape, images.classes
        mean = std = (0.5,) * shape[0]  # as images of a folder are normalised
    weights, bottom = None, None
    if options.model.weights is not None:
        weights = Pretrained.read(options.model.weights, options.model.name)
        mean, std = weights.mean or mean, weights.std or std
        shape = (len(mean), *shape[1:])
    if options.clients.bottom == "frozen":
        model = build_model(options, shape, classes)
        if weights is not None:
            weights.copy_into(model, options.model.name)
        bottom = bottom_digest(options, model)
    return Terms(options, shape, classes, mean, std, bottom)


def classify(
    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Address of `serve --model`.")
    ],
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of them.")],
    certs: DeviceCerts = None,
    bottom: Annotated[
        Path | None,
        typer.Option(
            help="The bottom as .onnx or .safetensors; default: download it from the server."
        ),
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(
            help="Codec of `semisfl list` for the features; default: the policy's, or fp32."
        ),
    ] = None,
    policy: PolicyFile = None,
    accept: Accept = None,
    top: Top = 3,
    insecure_loopback: Insecure = False,
    json_: Json = False,
    csv_: Csv = False,
) -> None:
    """Classify images with the help of a server; only features leave this device.

    The device runs the bottom of the model, which it downloads once, and the server the top.
    """
    from semisfl.net.client.connection import Target
    from semisfl.net.client.owner import Owner
    from semisfl.use.split_inference import ModelClient

    credentials = client_credentials("classify", certs, insecure_loopback)
    target = Target(address, credentials, insecure_loopback)
    owner = Owner.of_device(policy, certs, accept or ())
    with ModelClient(target, codec=codec, bottom=bottom, owner=owner) as client:
        predictions = client.predict(images)
        if policy is not None:
            console.say(client.summary)
    print_predictions(predictions, top, as_json=json_, as_csv=csv_)


def fleet(
    run: Annotated[Path, typer.Argument(help="Directory of a run that `semisfl serve` works on.")],
    action: Annotated[Literal["list", "remove"], typer.Argument(help="What to do.")],
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="The device to remove.")] = "",
    as_json: Json = False,
) -> None:
    """List a server's devices as it last wrote them down, or remove one before its next round."""
    from semisfl.net.server.roster import remove_device

    if (action == "remove") != bool(name):
        raise ValueError("remove needs the NAME of a device, and nothing else takes one")
    status = read_json(run / "fleet.json")
    if not status:
        raise ValueError(f"{run} has no fleet.json; name the directory of a run of `semisfl serve`")
    if action == "remove":
        if name not in (known := [device["name"] for device in status["clients"]]):
            raise ValueError(
                f"{name!r} has no place; the devices that have one: {', '.join(known)}"
            )
        remove_device(run, name)
        print(
            f"{name} leaves its place before the next round, and stays out while {run / 'removed.txt'} names it; "
            "revoke its certificate to keep it out of other runs too"
        )
    elif as_json:
        print(json.dumps(status))
    else:
        _print_devices(status)


def _print_devices(status: dict[str, Any]) -> None:
    """Print the devices of a run and what the server waits for.

    Args:
        status: the contents of fleet.json, which the server writes when a device comes or goes and after each round.
    """
    columns = ("device", "state", "last seen", "place", "images", "sent", "received")
    table = output.table("", columns, text=3)
    for device in status["clients"]:
        table.add_row(
            device["name"],
            "here" if "since" in device else "away",
            device.get("seen", output.UNKNOWN),
            str(device["client"]),
            str(device.get("images", output.UNKNOWN)),
            amount(device["bytes_up"]),
            amount(device["bytes_down"]),
        )
    output.show(table)
    here = sum("since" in device for device in status["clients"])
    state = status.get("waiting", "training" if here else "no device is here")
    taken = f"{len(status['clients'])} of {status.get('total', '?')} places taken"
    print(f"{here} here, {taken}; {state}; written at {status['time']}")
    answered = [one for one in status["clients"] if "answer_seconds" in one]
    if answered:
        slowest = max(answered, key=lambda one: one["answer_seconds"])
        seconds = f"{slowest['answer_seconds']:.2f} s"
        print(f"longest to answer in the last round: {slowest['name']}, {seconds}")
