"""The terms of a run, read from a server and shown to the owner of a device.

The owner reads them (`semisfl inspect`) and accepts their digest before the device joins. So the text says what a
layer *is*, not what the server calls it, and how many values and bytes leave the device.
"""

from collections.abc import Collection, Iterator, Sequence
from math import prod

import grpc

from semisfl.files import printable
from semisfl.fleet.codec import codec_named
from semisfl.models.shapes import Placed, Shape
from semisfl.net import chunks, hostport, messages
from semisfl.net.client.connection import open_channel
from semisfl.net.client.rejection import Rejected, explained
from semisfl.net.frames import WireError
from semisfl.net.terms import Terms
from semisfl.net.tls.credentials import Credentials
from semisfl.settings import catalog, lookup
from semisfl.settings.counts import plural

SECONDS = 20.0
"""Longest wait for the answer."""
UNNAMED = {"kind", "name", "body", "shortcut"}
"""Fields of a layer that its line shows otherwise."""


class NoTerms(ValueError):
    """Raised for a server that has no terms of training; it may serve a model."""


def read_terms(
    address: str,
    credentials: Credentials | None,
    *,
    insecure_loopback: bool = False,
    allow_methods: Collection[str] = (),
) -> Terms:
    """Return the terms that a server has for devices.

    Args:
        address: the server's HOST:PORT.
        credentials: this device's certificate; None with ``insecure_loopback``, which connects without TLS.
        allow_methods: methods of other packages that terms may name, as in `join`.

    Raises `NoTerms` if the server trains nothing, `Rejected` if it refuses this device or if its terms cannot be
    read, and `OSError` if it cannot be reached.
    """
    hostport.check_target(address, credentials is not None, insecure_loopback)
    options = chunks.options(messages.SMALL)
    with open_channel(address, None if insecure_loopback else credentials, options) as channel:
        try:
            text = channel.stream_unary(chunks.TERMS)(iter(()), timeout=SECONDS)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise NoTerms(
                    f"{address} has no terms; is it `semisfl serve` of this version?"
                ) from error
            raise explained(error, address, secure=not insecure_loopback) from error
    methods = frozenset(catalog.METHODS) | frozenset(allow_methods)
    try:
        terms = Terms.from_json(text.decode("utf-8", "replace"), methods)
        terms.placed()  # or a WireError, as in `join`
        return terms
    except WireError as error:
        raise Rejected(str(error), "refused") from error


def text_of_terms(terms: Terms) -> str:
    """Return the terms as lines of printable text; raise `WireError` for a model that cannot be built."""
    lines = [*_about_run(terms), *_about_model(terms), *_about_sending(terms)]
    return "\n".join(map(printable, lines))


def _about_run(terms: Terms) -> Iterator[str]:
    """Yield the lines about the method, its settings, rounds, optimiser, codecs and policy."""
    config, rate = terms.config, terms.config.optimizer
    augment, wire = config.data.augment, config.wire
    exact = (
        f"precision {config.runtime.precision}{', deterministic' * config.runtime.deterministic}"
    )
    yield f"terms       {terms.digest}"
    if terms.bottom:
        yield f"use         this device encodes each of its images once; seed {config.seed}, {exact}"
    else:
        own = terms.config_values().get(lookup.method(config.method).section or "", {})
        settings = "".join(f", {name} = {value}" for name, value in own.items())
        yield f"method      {config.method}{settings}"
        yield (
            f"rounds      {config.rounds} of at most {plural(config.clients.steps, 'step')} with "
            f"{plural(config.clients.batch, 'image')} each; seed {config.seed}"
        )
        yield (
            f"optimizer   lr {rate.lr:g} to {rate.lr_min:g}, momentum {rate.momentum:g}, weight decay "
            f"{rate.weight_decay:g}; teacher's EMA decay {config.teacher.ema_decay:g}; {exact}"
        )
    yield f"augment     flip {'on' if augment.flip else 'off'}, cutout {augment.cutout}"
    gradients = "" if terms.bottom else f"gradients {wire.gradients}, "
    yield (
        f"codecs      student features {wire.student_features}, teacher features "
        f"{wire.teacher_features}, {gradients}models {wire.models}"
    )
    yield f"asks for    {config.policy.summary()}"


def _about_model(terms: Terms) -> Iterator[str]:
    """Yield the lines about the images and every layer that the device builds."""
    placed, held = terms.placed()
    parameters = sum(layer.parameters for layer in placed)
    above = "; the server runs the layers above" if len(placed) == held else ""
    yield image_line(terms.shape, terms.classes, terms.mean, terms.std)
    yield f"model       {parameters:,} parameters in {plural(len(placed), 'layer')}{above}"
    if terms.bottom:
        yield f"frozen      weights {terms.bottom}"
    yield from layer_lines(placed)


def _about_sending(terms: Terms) -> Iterator[str]:
    """Yield the lines about what leaves the device: features and a bottom, or whole models."""
    placed, held = terms.placed()
    wire, clients, values = terms.config.wire, terms.config.clients, prod(placed[held - 1].gives)
    parameters = sum(layer.parameters for layer in placed)
    if lookup.method(terms.config.method).works:
        yield f"leaves      WHOLE MODELS of {parameters:,} values, in every round ({wire.models})"
        return
    teacher, student = (
        codec_named(codec).size((1, values))
        for codec in (wire.teacher_features, wire.student_features)
    )
    pixels = f"(an image has {prod(terms.shape):,} values)"
    if terms.bottom:
        together = clients.weak_views * teacher + clients.strong_views * student
        yield (
            f"leaves      once per image {plural(sum(clients.views.values()), 'view')} of {values:,} values, "
            f"{together:,} bytes {pixels}, with a digest of its pixels"
        )
        return
    yield (
        f"leaves      per image and step two views of {values:,} values, {student + teacher:,} bytes {pixels}"
    )
    yield f"            per round the trained bottom of {parameters:,} values ({wire.models})"


def layer_lines(placed: Sequence[Placed]) -> Iterator[str]:
    """Yield a numbered line for every layer of ``placed``; a block's layers follow it, indented."""
    for number, layer in enumerate(placed, start=1):
        yield f"  {number:3} {_layer(layer)}"
        yield from _inner_lines(layer, "      ")


def _inner_lines(block: Placed, indent: str) -> Iterator[str]:
    """Yield a line for every layer inside ``block``, at any depth."""
    for sign, layers in (("+", block.body), ("shortcut", block.shortcut)):
        for layer in layers:
            yield f"{indent}  {sign} {_layer(layer)}"
            yield from _inner_lines(layer, f"{indent}  ")


def _layer(placed: Placed) -> str:
    """Return what a layer is, by its kind and not by its name, and what it gives."""
    fields = dict(placed.layer).items()
    settings = " ".join(f"{k}={v}" for k, v in fields if k not in UNNAMED and v is not None)
    gives = " x ".join(map(str, placed.gives))
    return f"{placed.layer.kind} {settings}".ljust(64) + f" -> {gives:16} ({placed.name})"


def image_line(shape: Shape, classes: int, *normalised: tuple[float, ...]) -> str:
    """Return the line about images of this ``shape`` (C, H, W), ``normalised`` by a mean and a std per channel."""
    mean, std = (", ".join(f"{value:g}" for value in values) for values in normalised)
    sides = " x ".join(map(str, shape))
    return f"images      {sides}, {classes} classes; normalised by mean {mean} and std {std}"
