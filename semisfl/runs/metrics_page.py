"""Write the tables of docs/metrics.md from the declarations: ``python -m semisfl.runs.metrics_page docs/metrics.md``."""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from semisfl.metrics import Metric, RoundMetrics, declared

HEAD = "| key | what | unit | not there | methods | Prometheus |\n|---|---|---|---|---|---|\n"


def table(metrics: Iterable[Metric]) -> str:
    """Return a Markdown table with a line per metric."""
    lines = []
    for one in metrics:
        gauge = f"`{one.prometheus}`" if one.prometheus else ""
        cells = (f"`{one.key}`", one.meaning, one.unit, one.missing, one.methods, gauge)
        lines.append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(lines)


def renewed(page: str) -> str:
    """Return the page with the first table below each section's heading written anew."""
    sections: dict[str, list[Metric]] = {}
    for one in declared(RoundMetrics):
        place = 0 if one.key == "round" else len(sections.get(one.section, []))
        sections.setdefault(one.section, []).insert(place, one)
    for title, metrics in sections.items():
        pattern = rf"(\n## {title}\n(?:(?!\n## ).)*?)\n\|.*?\|\n(?!\|)"
        match = re.search(pattern, page, re.DOTALL)
        if match is None:
            raise ValueError(f"the page has no heading '## {title}' with a table below it")
        page = page[: match.end(1)] + "\n" + table(metrics) + page[match.end() :]
    return page


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
