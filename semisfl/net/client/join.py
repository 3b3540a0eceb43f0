"""Take part in a run with the images of a folder."""

import functools
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from semisfl.data import decode, folder
from semisfl.models.split import Shape
from semisfl.net.client.allowance import Allowance, beside
from semisfl.net.client.connection import Connection
from semisfl.net.client.device import Device
from semisfl.net.client.report import Report
from semisfl.net.tls import certs
from semisfl.settings import lookup
from semisfl.settings.config import ConfigError, with_known_codec
from semisfl.settings.policy import Policy, read_policy
from semisfl.stopping import StopFlag

log = logging.getLogger(__name__)


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
    stop: StopFlag | None = None,
    report: Report | None = None,
) -> None:
    """Take part with the images in ``data`` until the run is finished or ``stop`` is set.

    A server may ask for methods that are installed here under a name, and for ``allow_methods``
    (``package.module:Class``). ``policy`` is a file with what this device insists on, whatever the
    server asks (`semisfl.settings.policy`). Raises `semisfl.net.client.connection.Rejected` with the server's
    reason if it refuses this client. ``report`` follows what the device does.
    """
    credentials = (
        None if insecure_loopback else certs.load_client_credentials(certificates or Path())
    )
    if not data.is_dir():
        raise ConfigError(f"{data} is not a folder; --data needs a folder of images")
    for method in allow_methods:  # fail now, not when a server asks for it
        lookup.works(lookup.method(method))
    demands = Policy()
    if policy is not None:
        demands = with_known_codec(read_policy(policy), str(policy))
    allowance = Allowance(beside(policy) if policy is not None else None)
    if demands.capped:
        allowance.check_writable()
    if policy is not None:
        log.info("this device's policy: %s", demands.summary())
    folder.everything(data)  # fail now, not once a server has sent its terms, if there is no image
    stop = stop or StopFlag()
    connection = Connection(
        address,
        credentials,
        name=name,
        insecure_loopback=insecure_loopback,
        allow_methods=allow_methods,
        policy=demands,
    )
    images = functools.partial(load_images, data, stop=stop)
    member = Device(connection, images, device, stop, allowance)
    with (report or Report()).following(member):
        member.serve()


def load_images(root: Path, shape: Shape, stop: StopFlag | None = None) -> tuple[torch.Tensor, int]:
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
    read = []
    for place in inside:
        if stop is not None:
            stop.check()
        read.append(decode.decoded(listing, place, (width, height), channels))
    kept = [pixels for pixels in read if pixels is not None]
    if not kept:
        raise ConfigError(
            f"none of the {len(read)} images in {root} can be read; formats: {', '.join(decode.FORMATS)}"
        )
    if len(kept) < len(read):
        log.warning(
            "%d of %d images in %s could not be read and are skipped",
            len(read) - len(kept),
            len(read),
            root,
        )
    return torch.from_numpy(np.stack(kept)), len(read) - len(kept)
