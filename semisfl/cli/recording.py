"""``semisfl record``: a run as one file."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("record")(record)


def record(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    file: Annotated[Path, typer.Argument(metavar="FILE.run.json", help="The file to write.")],
) -> None:
    """Write a run as one small text file, which report, replay and reproduce read like its directory.

    It has the settings, the environment, who held what and the metrics of every round, but no model.
    """
    from semisfl.runs import record

    record.write(run, file)
    print(f"record: {file} ({file.stat().st_size / 1000:.0f} kB)")
