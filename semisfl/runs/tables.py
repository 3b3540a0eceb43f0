"""Write the results of groups of runs as CSV or LaTeX. Imports nothing that trains."""

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

from semisfl.files import write_whole
from semisfl.runs.paired import Difference
from semisfl.runs.report import Spread, Summary, accuracy_of
from semisfl.settings.lookup import note_of, title_of

KINDS = (".csv", ".tex")
ESCAPED = {
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}

Cells = list[list[object]]
"""Rows of a table; the first has the titles."""


def check(place: Path) -> Path:
    """Return ``place``; raise `ValueError` if its name does not end in a known kind."""
    if place.suffix not in KINDS:
        raise ValueError(f"--table {place}: the name must end in {' or '.join(KINDS)}")
    return place


def write(place: Path, summaries: Sequence[Summary], pairs: Sequence[Difference]) -> list[Path]:
    """Write the table of ``summaries`` and that of ``pairs``; return the files.

    A .tex file holds both. A .csv file holds the first; the second has "-differences" in its name.
    """
    if place.suffix == ".tex":
        texts = {place: latex(summaries, pairs)}
    else:
        texts = {place: _csv(_results(summaries))}
        if pairs:
            texts[place.with_name(f"{place.stem}-differences.csv")] = _csv(_differences(pairs))
    try:
        for file, text in texts.items():
            write_whole(file, text.encode())
    except OSError as error:
        raise ValueError(
            f"cannot write {place}: {error.strerror or error}; choose another --table"
        ) from error
    return list(texts)


def _results(summaries: Sequence[Summary]) -> Cells:
    costs = ("target_reached", "target_rounds", "target_bytes", "target_seconds")
    with_target = any(summary.to_target for summary in summaries)
    titles: list[object] = [
        *("label", "method", "seeds", "rounds", "judged_on", "accuracy", "accuracy_stderr"),
        *("best", "best_stderr", "test", "test_stderr", "bytes", "seconds"),
        *(costs if with_target else ()),
    ]
    rows: Cells = [titles]
    for one in summaries:
        test = (one.test.mean, one.test.stderr) if one.test else (None, None)
        cost = list(vars(one.to_target).values()) if one.to_target else []
        rows.append(
            [
                *(one.label, one.method, len(one.runs), one.rounds, one.judged_on),
                *(one.accuracy.mean, one.accuracy.stderr, one.best.mean, one.best.stderr),
                *(*test, one.bytes, one.seconds, *cost),
            ]
        )
    return rows


def _differences(pairs: Sequence[Difference]) -> Cells:
    rows: Cells = [["first", "second", "seeds", "judged_on", "difference", "low", "high", "wins"]]
    for pair in pairs:
        ends = pair.interval or (None, None)
        named = (pair.first, pair.second, pair.seeds, pair.judged_on)
        rows.append([*named, pair.mean, *ends, pair.wins])
    return rows


def _csv(rows: Cells) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [["" if cell is None else cell for cell in row] for row in rows]
    )
    return text.getvalue()


def latex(summaries: Sequence[Summary], pairs: Sequence[Difference]) -> str:
    """Return ``tabular`` environments, for ``\\input`` with the package booktabs."""
    validated = any(summary.judged_on == "validation" for summary in summaries)
    judged = accuracy_of(summary.judged_on for summary in summaries)
    rows: Cells = [
        ["method", "seeds", f"{judged}, \\%", *(["test, \\%"] if validated else []), "best, \\%"]
    ]
    for one in summaries:
        test = [_spread(one.test)] if validated else []
        name = escaped(one.label) + ("*" if note_of(one.method) else "")
        rows.append([name, len(one.runs), _spread(one.accuracy), *test, _spread(one.best)])
    notes = {one.method: note for one in summaries if (note := note_of(one.method))}
    text = _tabular(rows)
    text += "".join(f"% * {title_of(method)}: {note}\n" for method, note in notes.items())
    if pairs:
        judged = accuracy_of(pair.judged_on for pair in pairs)
        rows = [["difference", "seeds", f"points of {judged}", "95 \\% interval", "wins"]]
        for pair in pairs:
            name = f"{escaped(pair.first)} $-$ {escaped(pair.second)}"
            ends = "--" if pair.interval is None else "[${:.1f}$, ${:.1f}$]".format(*pair.interval)
            rows.append([name, pair.seeds, f"${pair.mean:.1f}$", ends, pair.wins])
        text += "\n" + _tabular(rows)
    return text


def _tabular(rows: Cells) -> str:
    head, *body = [" & ".join(str(cell) for cell in row) + r" \\" for row in rows]
    columns = "l" + "r" * (len(rows[0]) - 1)
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _spread(value: Spread | None) -> str:
    if value is None:
        return "--"
    error = "" if value.stderr is None else rf" \pm {value.stderr:.1f}"
    return f"${value.mean:.1f}{error}$"


def escaped(text: str) -> str:
    """Return text with the special characters of LaTeX escaped."""
    return re.sub(r"[\\~^&%$#_{}]", lambda match: ESCAPED[match[0]], text)
