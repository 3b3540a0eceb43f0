"""Write the metrics of runs as one long table for pandas and other tools: a row per run, round and metric.

Imports nothing that trains; pyarrow only for a Parquet file.
"""

import codecs
import csv
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from semisfl.files import write_whole
from semisfl.runs.report import UNSEEN, Run
from semisfl.settings.lookup import needs
from semisfl.settings.plain_values import flatten


def write_long(place: Path, runs: Sequence[Run]) -> None:
    """Write every number of every round of ``runs`` to the .csv or .parquet file ``place``.

    The columns are ``run`` (its directory), ``method``, ``seed``, each setting in which the runs differ, by its dotted
    key, ``round`` (from 0), ``key`` (of the metric; ``recall_by_class[3]`` and ``coverage_by_client.7`` for parts of
    one) and ``value``. A setting that a run does not have is empty. Texts are left out, and ``bytes_by_client``, whose
    groups of clients differ from round to round.

    Raises ValueError for another suffix, and for .parquet where pyarrow is not installed.
    """
    settings = differing_settings([run.config for run in runs])
    titles = ("run", "method", "seed", *settings[0], "round", "key", "value")
    rows = (
        (
            str(run.path),
            run.config["method"],
            run.seed,
            *own.values(),
            metrics.round,
            key,
            float(value),
        )
        for run, own in zip(runs, settings, strict=True)
        for metrics in run.rounds
        for key, value in flatten(metrics.as_dict()).items()
        if isinstance(value, int | float)
        and key != "round"
        and not key.startswith("bytes_by_client")
    )
    if place.suffix == ".csv":
        # Row by row: all of them together may be gigabytes.
        write_whole(
            place,
            lambda file: csv.writer(codecs.getwriter("utf-8")(file), lineterminator="\n").writerows(
                chain([titles], rows)
            ),
        )
        return
    if place.suffix != ".parquet":
        raise ValueError(f"--long {place}: the name must end in .csv or .parquet")
    with needs("datasets", "pyarrow"):
        import pyarrow.parquet
    # A column has one type: numbers, or texts if one of its values is a text.
    columns = [
        [None if one is None else str(one) for one in column]
        if any(isinstance(one, str) for one in column)
        else column
        for column in zip(*rows, strict=True)
    ]
    write_whole(
        place,
        lambda file: pyarrow.parquet.write_table(pyarrow.table(columns, names=titles), file),
    )


def differing_settings(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each configuration its values of the settings in which configurations differ, by dotted key.

    A section that only some methods read is compared among the runs of these methods. Left out are the method and the
    seed, and what changes no number of a round.
    """
    flat = [flatten(config) for config in configs]
    keys = []
    for key in dict.fromkeys(key for one in flat for key in one):
        readers = {one["method"] for one in flat if key in one}
        values = {str(one.get(key)) for one in flat if one["method"] in readers}
        if len(values) > 1 and key not in ("method", "seed", *UNSEEN) and key[:5] != "sinks":
            keys.append(key)
    return [{key: one.get(key) for key in keys} for one in flat]
