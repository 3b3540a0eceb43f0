"""``semisfl serve-model`` and ``classify``: split inference between devices and a server."""

import time
from pathlib import Path
from typing import Annotated

import typer

from semisfl.cli import console
from semisfl.cli.inspecting import checked_digests
from semisfl.cli.options import (
    EXIT_CODES,
    Accept,
    Device,
    DeviceCerts,
    Insecure,
    Json,
    PolicyFile,
    ServerCerts,
    client_credentials,
    needs_network,
    show_log,
)
from semisfl.cli.use_model import Csv, Cut, RunOrFile, Top, cut_at, open_model, print_predictions
from semisfl.settings.counts import counted

LOOK_SECONDS = 0.2


def serve_model(
    run: RunOrFile,
    certs: ServerCerts = Path("certs"),
    listen: Annotated[str, typer.Option(help="HOST:PORT to listen on.")] = "0.0.0.0:8444",
    cut: Cut = None,
    accept_images: Annotated[
        bool,
        typer.Option("--accept-images", help="Also accept images from `classify --send-images`."),
    ] = False,
    device: Device = "auto",
    insecure_loopback: Insecure = False,
) -> None:
    """Serve the top of a model to devices that run its bottom with `classify`; SIGTERM stops it."""
    with needs_network():
        from semisfl.use.model_server import ModelServer
    from semisfl.cli.signals import StopSignals
    from semisfl.fleet.setup import NetworkOptions

    show_log()
    with StopSignals() as signals:
        model = cut_at(open_model(run, device), cut)
        network = NetworkOptions(listen, None if insecure_loopback else certs, insecure_loopback)
        server = ModelServer(model, network, accept_images=accept_images)
        if server.terms is not None:
            console.say(f"devices accept this model with --accept {server.terms.digest}")
        console.say(
            f"listening on port {server.port}: {model.path} of {len(model.classes)} classes; devices "
            f"send {model.network.features} features per image"
        )
        try:
            with signals.running(lambda: False):
                while not signals.flag.requested:
                    time.sleep(LOOK_SECONDS)
        finally:
            server.close()
    print(f"stopped after {counted(sum(server.answered.values()), 'image')}")


def classify(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Address of `serve-model`.")],
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
    send_images: Annotated[
        bool, typer.Option("--send-images", help="Send the images themselves instead of features.")
    ] = False,
    policy: PolicyFile = None,
    accept: Accept = None,
    top: Top = 3,
    insecure_loopback: Insecure = False,
    json_: Json = False,
    csv_: Csv = False,
) -> None:
    """Classify images with the help of a server; only features leave this device."""
    with needs_network():
        from semisfl.net.client.identity import Target
        from semisfl.net.client.owner import NotAccepted, Owner, how_to_accept
        from semisfl.use.model_client import ModelClient
    from semisfl.settings.policy import PolicyBreach

    credentials = client_credentials("classify", certs, insecure_loopback)
    if bottom is not None and send_images:
        raise ValueError("--send-images and --bottom cannot be combined; choose one")
    owner = Owner.of_device(policy, certs, checked_digests(accept))
    try:
        with ModelClient(
            Target(address, credentials, insecure_loopback),
            codec=codec,
            bottom=bottom,
            send_images=send_images,
            owner=owner,
        ) as client:
            predictions = client.predict(images)
            if policy is not None:
                console.say(client.carried)
    except PolicyBreach as breach:
        line = str(breach)
        if isinstance(breach, NotAccepted):
            line = how_to_accept(breach, "classify", address, certs, policy)
        console.say(line, "error")
        raise typer.Exit(EXIT_CODES["policy"]) from breach
    print_predictions(predictions, top, as_json=json_, as_csv=csv_)


COMMANDS = {"serve-model": serve_model, "classify": classify}
