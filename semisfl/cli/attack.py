"""``semisfl leakage``: what a server could rebuild from what devices send it.

Owners run it before they join: with their images, their cut and their policy. `semisfl.attacks` holds the attacks.
"""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semisfl.cli import console, output
from semisfl.cli.options import (
    AllowMethod,
    Device,
    Json,
    Quiet,
    Settings,
    values_of,
)
from semisfl.settings.counts import amount
from semisfl.settings.plain_values import words_of

if TYPE_CHECKING:
    from semisfl.settings.policy import Policy


def leakage(
    target: Annotated[
        str,
        typer.Argument(metavar="[RUN|PRESET|FILE.toml]", help="A run's directory, or a preset."),
    ] = "digits",
    settings: Settings = None,
    cuts: Annotated[
        str, typer.Option(help="Layers to cut after, separated by commas; or all, or default.")
    ] = "default",
    defence: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.toml",
            help="A policy to try: a file, or KEY=VALUE,...; none; or random (features without "
            "content). May be repeated. Default: none, and the run's own policy.",
        ),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(min=1, help="Rounds to train a preset first, unless its bottom is frozen."),
    ] = 3,
    uses: Annotated[
        int,
        typer.Option(
            min=1, help="How often the server received each image's features; it averages them."
        ),
    ] = 1,
    public: Annotated[
        str | None,
        typer.Option(help="The attacker's own images; default: the server's test images."),
    ] = None,
    updates: Annotated[bool, typer.Option(help="Also rebuild images from model updates.")] = True,
    quick: Annotated[
        bool, typer.Option("--quick", help="A weak attack, only to see that everything works.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for leakage.json and leakage.png.")] = Path(
        "leakage"
    ),
    allow_method: AllowMethod = None,
    device: Device = "auto",
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Rebuild clients' images as the server could, and compare the result with chance."""
    from semisfl.attacks import meter, picture, scene as scenes
    from semisfl.settings import config as configs

    # Before the attacks, which may take hours.
    there = next(place for place in (out, *out.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"{there} is no folder that can be written to; choose another --out")
    run = Path(target)
    if (run / "config.toml").exists():
        if settings:
            raise ValueError(f"--set changes a preset, but {target} is a run; leave out --set")
        scene = scenes.scene_of_run(run, device, public)
    else:
        # The short training of a preset ends with a test, for the accuracy in the report.
        trained = [f"rounds={rounds}", f"runtime.evaluate_every={rounds}"]
        config = configs.parse(values_of(target, [*(settings or []), *trained]))
        _defences(defence, config.policy)  # a mistake is reported before the training
        scene = scenes.scene_of_preset(config, device, public, cuts)
    result, measured = meter.measure_all(
        scene,
        scenes.cuts_of(scene.model, cuts),
        _defences(defence, scene.config.policy),
        quick=quick,
        updates=updates,
        progress=(lambda line: None) if quiet else console.say,
        uses=uses,
    )
    meter.save(result, shlex.join(["semisfl", *sys.argv[1:]]), out)
    picture.draw(measured, out / "leakage.png")
    if json_:
        print(json.dumps(result))
        return
    _print_leakage(result)
    print(
        f"saved in {out}: leakage.json, and leakage.png with originals above what was rebuilt of them"
    )


def _defences(options: list[str] | None, own: "Policy") -> dict[str, "Policy | str"]:
    """Return the policies to try, by the names that they have in the table.

    Args:
        options: the values of ``--defence``: a policy file, ``KEY=VALUE,...``, none, or random for features without content.
            None: no defence, and the policy of the run if it has one.
        own: the policy of the run or the preset.
    """
    from semisfl.attacks.meter import RANDOM
    from semisfl.settings.config import override
    from semisfl.settings.policy import Policy, parse_policy, read_policy

    if not options:
        usual: dict[str, Policy | str] = {"none": Policy()}
        return usual if own == Policy() else {**usual, own.summary(): own}
    chosen: dict[str, Policy | str] = {}
    for text in options:
        if text in ("none", RANDOM):
            chosen[text] = Policy() if text == "none" else RANDOM
        elif "=" in text:
            values: dict[str, Any] = override({}, words_of(text), "--defence")
            chosen[text] = parse_policy(values, f"--defence {text}")
        else:
            chosen[text] = read_policy(Path(text))
    return chosen


def _print_leakage(result: dict[str, Any]) -> None:
    """Print the result of all attacks, each beside what guessing would reach.

    Args:
        result: the contents of leakage.json (`semisfl.attacks.meter.measure_all`).
    """
    columns = (
        "cut",
        "defence",
        "bytes",
        "bits",
        "SSIM",
        "PSNR",
        "found",
        "by optimising",
        "class",
        "member",
    )
    table = output.table("", columns, text=2)
    for column in table.columns:
        column.no_wrap, column.overflow = False, "fold"  # on 80 columns, chance is below its number
    for entry in result["features"]:
        decoder, mix, auc = entry["decoder"], entry["class_mix"], entry["membership_auc"]
        table.add_row(
            entry["cut"],
            entry["defence"],
            amount(entry["bytes_per_image"]),
            _bits(entry["bits_per_image"]),
            f"{decoder['ssim']:.2f} ({entry['mean_image']['ssim']:.2f})",
            f"{decoder['psnr']:.1f} ({entry['mean_image']['psnr']:.1f})",
            f"{decoder['identified']:.0%} ({entry['chance_identified']['decoder']:.1%})",
            f"{entry['optimised']['ssim']:.2f}",
            f"{mix['accuracy']:.0%} ({mix['chance']:.0%})" if mix else output.UNKNOWN,
            output.known(auc, "{:.2f} (0.50)".format),
        )
    output.show(table)
    _print_norms(result)
    for entry in result["uploads"]:
        print(
            f"upload, cut {entry['cut']}, {entry['defence']}: a {entry['server']} server solves "
            f"{entry['rebuilt']} of {entry['inputs']} inputs of its last layer (bits: {_bits(entry['bits'])})"
        )
    for entry in result["updates"]:
        print(
            f"from the {entry['sent']} of {entry['clients']} x {entry['images_each']} images: SSIM "
            f"{entry['ssim']:.2f}, found {entry['identified']:.0%} (chance {entry['chance_identified']:.1%})"
        )
    print(
        f"{result['judged_on']} accuracy {result['accuracy']:.1f} %. Chance, without any features, is in brackets. bytes are one "
        "image's features, sent once. bits is the most that they can carry, whatever the server planted "
        f"(an image's pixels are {result['image_bits']:,}). SSIM and found are those of a decoder trained on "
        f"{result['public_images']} other images."
    )


def _print_norms(result: dict[str, Any]) -> None:
    """Print the norms that a policy's clip and update_clip should be near, for the first cut."""
    changes = [one["change_norm"] for one in result["uploads"] if "change_norm" in one]
    change = f", norm of a bottom's change in a round {changes[0]:.2g}" if changes else ""
    print(f"median norm of features {result['features'][0]['norm']:g}{change}")


def _bits(most: float | None) -> str:
    """Return a bound in bits as text; None is no bound."""
    return "no bound" if most is None else f"{most:,.0f}"
