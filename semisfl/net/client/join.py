"""Take part in a run with the images of a folder."""

import functools
import logging
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import torch

from semisfl.data import decode, folder
from semisfl.models.shapes import Shape
from semisfl.net.client.connection import Connection, Target
from semisfl.net.client.device import Device
from semisfl.net.client.owner import Owner
from semisfl.net.client.report import Report
from semisfl.net.tls import certs
from semisfl.settings import lookup
from semisfl.settings.config import ConfigError
from semisfl.settings.counts import plural
from semisfl.stopping import StopFlag

log = logging.getLogger(__name__)

NAMED = 3
"""Unreadable images that are named."""


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
    accept: Collection[str] = (),
    stop: StopFlag | None = None,
    report: Report | None = None,
) -> None:
    """Take part with the images in ``data`` until the run is finished or ``stop`` is set.

    A server may ask for methods that are installed here under a name, and for ``allow_methods``
    (``package.module:Class``). ``policy`` is a file with what this device insists on, whatever the
    server asks (`semisfl.settings.policy`). ``accept`` holds digests of terms that the owner has
    accepted; others are refused. Raises `semisfl.net.client.rejection.Rejected` with the server's
    reason if it refuses this client. ``report`` follows what the device does.
    """
    credentials = (
        None if insecure_loopback else certs.load_client_credentials(certificates or Path())
    )
    if not data.is_dir():
        raise ConfigError(f"{data} is not a folder; --data needs a folder of images")
    for method in allow_methods:  # fail now, not when a server asks for it
        lookup.load(method)
    owner = Owner.of_device(policy, certificates, accept)
    if policy is not None:
        log.info("this device's policy: %s", owner.policy.summary())
    folder.all_images(data)  # fail now, not once a server has sent its terms
    stop = stop or StopFlag()
    target = Target(address, credentials, insecure_loopback, name)
    connection = Connection(target, owner, allow_methods=allow_methods)
    images = functools.partial(load_images, data, stop=stop)
    member = Device(connection, images, device, stop)
    with (report or Report()).following(member):
        member.serve()


def load_images(root: Path, shape: Shape, stop: StopFlag | None = None) -> tuple[torch.Tensor, int]:
    """Return every readable image under ``root``, resized to ``shape``, and how many are unreadable."""
    listing = folder.all_images(root).listing()
    for note in listing.notes:  # files of other kinds, such as HEIC
        log.warning("%s", note)
    count = len(listing.names)
    channels, height, width = shape
    images = np.empty((count, *shape), np.uint8)
    kept = lost = made_grey = 0
    for place in range(count):
        if stop is not None:
            stop.check()
        try:
            with listing.open(place) as image:
                images[kept] = decode.pixels_of(image, (width, height), channels)
                made_grey += channels == 1 and decode.is_colour(image)
            kept += 1
        except Exception as error:  # a damaged file can raise nearly anything inside a decoder
            lost += 1
            if lost <= NAMED:
                log.warning("%.200r is left out: %s", listing.names[place], decode.reason(error))
    if not kept:
        raise ConfigError(
            f"none of {plural(count, 'image')} in {root} can be read; formats: {', '.join(decode.FORMATS)}"
        )
    if lost:
        log.warning("%d of %d images in %s could not be read and are skipped", lost, count, root)
    if made_grey:
        log.warning(decode.MADE_GREY, made_grey, count)
    return torch.from_numpy(images[:kept]), lost
