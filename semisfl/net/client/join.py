"""Take part in a run with the images of a folder."""

import contextlib
import functools
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from semisfl.data import decode, folder
from semisfl.models.split import Shape
from semisfl.net.client.allowance import Allowance, beside
from semisfl.net.client.approval import Approval, Ask, NotAccepted
from semisfl.net.client.budget import Budget
from semisfl.net.client.connection import Connection, Rejected
from semisfl.net.client.device import Device
from semisfl.net.client.lines import brief_logger
from semisfl.net.client.report import Report
from semisfl.net.tls import certs
from semisfl.settings import lookup
from semisfl.settings.config import ConfigError, with_known_codec
from semisfl.settings.policy import DevicePolicy, read_policy
from semisfl.stopping import StopFlag

log = brief_logger(__name__)


def join(
    address: str,
    data: Path,
    *,
    certificates: Path | None,
    device: str = "auto",
    insecure_loopback: bool = False,
    name: str = "",
    allow_methods: Sequence[str] = (),
    policy: Path | None = None,
    memory: int | None = None,
    accept: Collection[str] = (),
    ask: Ask | None = None,
    stop: StopFlag | None = None,
    report: Report | None = None,
) -> None:
    """Take part with the images in ``data`` until the run is finished or ``stop`` is set.

    A server may ask for methods that are installed here under a name, and for ``allow_methods``
    (``package.module:Class``). ``policy`` is a file with what this device insists on, whatever the
    server asks (`semisfl.settings.policy`). ``memory``: bytes that it may use; None: half of what is
    free. ``accept`` holds digests of terms that the owner has accepted; ``ask`` asks about others (None:
    they are refused). Raises `semisfl.net.client.connection.Rejected` with the server's
    reason if it refuses this client. ``report`` follows what the device does.
    """
    credentials = (
        None if insecure_loopback else certs.load_client_credentials(certificates or Path())
    )
    if not data.is_dir():
        raise ConfigError(f"{data} is not a folder; --data needs a folder of images")
    for method in allow_methods:  # fail now, not when a server asks for it
        lookup.works(lookup.method(method))
    demands = DevicePolicy()
    if policy is not None:
        demands = with_known_codec(read_policy(policy), str(policy))
    allowance = Allowance(beside(policy) if policy is not None else None)
    if demands.capped:
        allowance.check_writable()
    if policy is not None:
        log.info("this device's policy: %s", demands.summary())
    folder.everything(data)  # fail now, not once a server has sent its terms, if there is no image
    stop = stop or StopFlag()
    approval = Approval(accept, accepted_file(certificates, policy), ask)
    if demands.model:  # a policy says all that it accepts
        approval = Approval(demands.model)
    connection = Connection(
        address,
        credentials,
        name=name,
        insecure_loopback=insecure_loopback,
        allow_methods=allow_methods,
        policy=demands,
        approve=approval.check,
    )
    budget = Budget(memory)
    images = functools.partial(load_images, data, budget=budget, stop=stop)
    member = Device(connection, images, device, stop, allowance, budget)
    with (report or Report()).following(member), _explained(address, certificates, policy):
        member.serve()


@contextlib.contextmanager
def _explained(address: str, certificates: Path | None, policy: Path | None) -> Iterator[None]:
    """Add to a refusal of terms how their owner looks at them and accepts them."""
    try:
        yield
    except Rejected as refused:
        if not isinstance(cause := refused.__cause__, NotAccepted):
            raise
        digest, certs_option = cause.digest, f" --certs {certificates}" if certificates else ""
        how = f"--accept {digest}"
        if policy is not None and read_policy(policy).model:
            how = f'model = "{digest}" in {policy}'
        reason = (
            f"the terms of {address} are {digest}, which this device has not accepted; "
            f"`semisfl inspect {address}{certs_option}` shows them, join with {how} accepts them"
        )
        raise Rejected(reason, refused.kind) from cause


def accepted_file(certificates: Path | None, policy: Path | None) -> Path | None:
    """Return where accepted terms are remembered: with the device's certificate, or beside its policy."""
    if certificates is not None:
        return certificates / "accepted.txt"
    return policy.with_suffix(".accepted.txt") if policy is not None else None


def load_images(
    root: Path, shape: Shape, budget: Budget | None = None, stop: StopFlag | None = None
) -> tuple[torch.Tensor, int]:
    """Return every readable image under ``root``, resized to ``shape``, and how many are unreadable.

    Links that lead out of ``root`` are not followed: anyone who can put a link into the folder could
    otherwise make the device train on private images elsewhere.
    """
    listing = folder.everything(root).listing()
    home = root.resolve()
    inside = [
        place
        for place, name in enumerate(listing.names)
        if (root / name).resolve().is_relative_to(home)
    ]
    if outside := len(listing.names) - len(inside):
        log.warning("%d links lead out of %s and are not followed", outside, root)
    channels, height, width = shape
    if budget is not None:
        budget.images(len(inside) * channels * height * width)
    images = np.empty((len(inside), *shape), np.uint8)
    kept = 0
    for place in inside:
        if stop is not None:
            stop.check()
        pixels = decode.decoded(listing, place, (width, height), channels)
        if pixels is not None:
            images[kept] = pixels
            kept += 1
    if not kept:
        raise ConfigError(
            f"none of the {len(inside)} images in {root} can be read; formats: {', '.join(decode.FORMATS)}"
        )
    if kept < len(inside):
        log.warning(
            "%d of %d images in %s could not be read and are skipped",
            len(inside) - kept,
            len(inside),
            root,
        )
    return torch.from_numpy(images[:kept]), len(inside) - kept
