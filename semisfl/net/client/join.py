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

    Args:
        address: the server's HOST:PORT.
        data: a folder of images; those in its subfolders count too. They stay on this device.
        certificates: the device's folder of certificates; None with ``insecure_loopback``.
        device: auto, cpu, cuda or cuda:N.
        insecure_loopback: connect without TLS; only to this machine, for tests.
        name: the device's name without TLS; a certificate has its own.
        allow_methods: methods (``package.module:Class``) that the server may ask for, besides those that are
            installed under a name.
        policy: a file with the limits of this device's owner (`semisfl.settings.policy`).
        accept: digests of terms that the owner accepts; others are refused.
        stop: the flag that ends the device after the iteration at hand.
        report: follows what the device does.

    Raises `semisfl.net.client.rejection.Rejected` if the server refuses this device or the policy forbids what it
    asks for, and `ConfigError` for a mistake on this device, before it connects.
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
    """Return every readable image under ``root``, and how many are unreadable.

    The images are uint8 [n, C, H, W], resized to ``shape`` (C, H, W). Unreadable images are counted and the first
    ones named in the log. Raises `ConfigError` if none can be read, and `Stopped` if ``stop`` is set meanwhile.
    """
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
