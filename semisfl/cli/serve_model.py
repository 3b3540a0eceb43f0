"""``semisfl serve --model`` and ``classify``: split inference between devices and a server."""

from pathlib import Path
from typing import Annotated

import typer

from semisfl.cli import console
from semisfl.cli.inspecting import checked_digests
from semisfl.cli.options import (
    EXIT_CODES,
    Accept,
    DeviceCerts,
    Insecure,
    Json,
    PolicyFile,
    client_credentials,
)
from semisfl.cli.signals import StopSignals
from semisfl.cli.use_model import Csv, Top, cut_at, open_model, print_predictions
from semisfl.settings.counts import counted


def serve_model(
    model: Path,
    signals: StopSignals,
    *,
    certs: Path,
    listen: str,
    cut: str | None,
    device: str,
    insecure_loopback: bool,
) -> None:
    """Serve the top of a trained model to devices that run its bottom, until a signal comes."""
    from semisfl.fleet.setup import NetworkOptions
    from semisfl.use.model_server import ModelServer

    console.show_log()
    trained = cut_at(open_model(model, device), cut)
    network = NetworkOptions(listen, None if insecure_loopback else certs, insecure_loopback)
    server = ModelServer(trained, network)
    if server.served.downloadable:
        console.say(f"devices accept this model with --accept {server.served.digest}")
    console.say(
        f"listening on port {server.port}: {trained.path} of {len(trained.classes)} classes; devices "
        f"send {server.served.features} features per image"
    )
    try:
        signals.wait()
    finally:
        server.close()
    print(f"stopped after {counted(sum(server.answered.values()), 'image')}")


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
    """Classify images with the help of a server; only features leave this device."""
    from semisfl.net.client.connection import Target
    from semisfl.net.client.owner import NotAccepted, Owner, how_to_accept
    from semisfl.settings.policy import PolicyBreach
    from semisfl.use.model_client import ModelClient

    target = Target(
        address, client_credentials("classify", certs, insecure_loopback), insecure_loopback
    )
    owner = Owner.of_device(policy, certs, checked_digests(accept))
    try:
        with ModelClient(
            target,
            codec=codec,
            bottom=bottom,
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


COMMANDS = {"classify": classify}
