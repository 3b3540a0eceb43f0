"""``semisfl leakage``: how much of its clients' images a server could rebuild, before it is begun."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from semisfl.cli import console
from semisfl.cli.options import Device, Json, Quiet, Settings, values_of

if TYPE_CHECKING:
    from semisfl.settings.policy import Policy


def register(app: typer.Typer) -> None:
    app.command("leakage")(leakage)


def leakage(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(metavar="[RUN|PRESET|FILE.toml]", help="A run's directory, or a preset."),
    ] = "digits",
    settings: Settings = None,
    cuts: Annotated[str, typer.Option(help="default, all, or layers: pool1,flatten.")] = "default",
    defence: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="A policy to try, e.g. noise=0.14; none; random (features without content); "
            "may be repeated. Default: none, and the run's own.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that a preset is trained for.")] = 3,
    uses: Annotated[
        int,
        typer.Option(
            min=1, help="Times that the server was sent each image's features, and averages them."
        ),
    ] = 1,
    public: Annotated[
        str | None,
        typer.Option(help="Images that the attacker has; default: the server's own to test with."),
    ] = None,
    updates: Annotated[
        bool, typer.Option(help="Also invert what a round leaves in models.")
    ] = True,
    effort: Annotated[str, typer.Option(help="full, or quick: to see that it works.")] = "full",
    out: Annotated[Path, typer.Option(help="Where leakage.json and leakage.png go.")] = Path(
        "leakage"
    ),
    device: Device = "auto",
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Attack the clients of a run as its server could; what is rebuilt, against chance."""
    from semisfl.attacks import exposure, picture
    from semisfl.cli.signals import StopSignals
    from semisfl.settings import config as configs

    if effort not in ("full", "quick"):
        raise ValueError(f"--effort {effort!r} is neither full nor quick")
    with StopSignals() as signals:
        if (Path(target) / "config.toml").exists():
            if settings:
                raise ValueError("--set changes a preset; a run is measured as it was trained")
            scene = exposure.of_run(Path(target), device, public)
        else:
            asked = [*(settings or []), f"rounds={rounds}", f"runtime.evaluate_every={rounds}"]
            config = configs.parse(values_of(target, asked))
            scene = exposure.of_preset(config, device, public, signals.flag)
        defences = _defences(defence, scene.config.policy)
        found, measured = exposure.measure_all(
            scene,
            exposure.cuts_of(scene, cuts),
            defences,
            quick=effort == "quick",
            updates=updates,
            progress=(lambda line: None) if quiet else console.say,
            uses=uses,
        )
    exposure.save(found, shlex.join(["semisfl", *context.obj]), out)
    picture.draw(measured, out / "leakage.png")
    if json_:
        print(json.dumps(found))
        return
    _tell(found)
    print(f"saved in {out}: leakage.json, and leakage.png with originals above what was rebuilt")


def _defences(asked: list[str] | None, own: "Policy") -> dict[str, "Policy | str"]:
    from semisfl.attacks.meter import RANDOM
    from semisfl.settings.config import override
    from semisfl.settings.policy import Policy, parse_policy

    if not asked:
        found: dict[str, Policy | str] = {"none": Policy()}
        return found if own == Policy() else {**found, own.summary(): own}
    chosen: dict[str, Policy | str] = {}
    for text in asked:
        if text == RANDOM:
            chosen[text] = RANDOM
        elif text == "none":
            chosen[text] = Policy()
        else:
            values: dict[str, Any] = override({}, text.split(","))
            chosen[text] = parse_policy(values, f"--defence {text}")
    return chosen


def _tell(found: dict[str, Any]) -> None:
    table = Table(
        "cut", "defence", "bytes", "SSIM", "PSNR", "found", "by optimising", "class", "member"
    )
    for row in found["features"]:
        decoder, mix, auc = row["decoder"], row["class_mix"], row["membership_auc"]
        table.add_row(
            row["cut"],
            row["defence"],
            console.amount(row["bytes_per_image"]),
            f"{decoder['ssim']:.2f} ({row['mean_image']['ssim']:.2f})",
            f"{decoder['psnr']:.1f} ({row['mean_image']['psnr']:.1f})",
            f"{decoder['identified']:.0%} ({row['chance_identified']['decoder']:.1%})",
            f"{row['optimised']['ssim']:.2f}",
            f"{mix['accuracy']:.0%} ({mix['chance']:.0%})" if mix else "–",
            f"{auc:.2f} (0.50)" if auc is not None else "–",
        )
    console.out.print(table)
    for row in found["updates"]:
        print(
            f"from the {row['sent']} of {row['clients']} x {row['images_each']} images: SSIM "
            f"{row['ssim']:.2f}, found {row['identified']:.0%} (chance {row['chance_identified']:.1%})"
        )
    for name, line in found["guarantees"].items():
        print(f"differential privacy with {name}: {line}")
    print(
        f"accuracy {found['accuracy']:.1f} %. In brackets: chance, without any features. bytes: of one "
        "image's features, once. SSIM and found: a decoder trained on "
        f"{found['public_images']} other images."
    )
