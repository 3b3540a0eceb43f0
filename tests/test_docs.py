"""The pages for readers: links lead somewhere, files and settings exist, no page is too long."""

import ast
import importlib
import re
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import semisfl
from semisfl.settings import catalog
from semisfl.settings.config import known_keys, parse
from semisfl.settings.policy import parse_policy

ROOT = Path(__file__).parent.parent
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "reproduction").rglob("*.md")),
]
# Folders that a path in a page may start from: `methods/semisfl.py` is the package's.
STARTS = (
    ROOT,
    ROOT / "semisfl",
    ROOT / "examples" / "fedavg_fixmatch",
    ROOT / "docs",
    ROOT / "reproduction",
)
# Files of the examples in the pages, which readers make themselves.
READERS_OWN = ("mypackage/", "mytracking.py")
FILE_SUFFIXES = {"json", "jsonl", "toml", "py", "md", "key", "crt"}
NAMES_OF_THE_PACKAGE = {"codecs", "aggregates", "sinks", "audit", "rules", *semisfl.__all__}


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


every_page = pytest.mark.parametrize("page", PAGES, ids=page_name)


@cache
def prose(page: Path) -> str:
    """Return the text of a page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        place, _, anchor = target.partition("#")
        file = (page.parent / place).resolve() if place else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}: {sorted(anchors(file))}"


@every_page
def test_files_that_a_page_names_exist(page: Path) -> None:
    """Names of Python files are checked, and all paths below the repository's folders."""
    for name in re.findall(r"`([\w./-]+)`", prose(page)):
        inside = name.startswith(("semisfl/", "tests/", "reproduction/", "docs/"))
        if (inside or name.endswith(".py")) and not name.startswith(READERS_OWN):
            known = any((start / name).exists() for start in STARTS)
            assert known or _beside(name, prose(page)), name


def _beside(name: str, text: str) -> bool:
    """Return whether a bare file name lies beside another file that the page names with its folder."""
    folders = {Path(path).parent for path in re.findall(r"`([\w./-]+/[\w.-]+\.py)`", text)}
    return "/" not in name and any(
        (start / folder / name).exists() for start in STARTS for folder in folders
    )


@every_page
def test_names_that_a_pages_code_imports_exist(page: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    for node in (node for block in blocks for node in ast.walk(ast.parse(block))):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "semisfl":
            for alias in node.names:
                assert hasattr(_module(str(node.module)), alias.name) or _module(
                    f"{node.module}.{alias.name}"
                ), f"{node.module} has no {alias.name}"


@cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(name)


@cache
def settings() -> set[str]:
    """Return every setting of this package's methods and aggregation rules."""
    kinds = [parse({"method": name}) for name in catalog.METHODS]
    kinds += [parse({"robust": {"aggregate": rule}}) for rule in catalog.AGGREGATES]
    return {key for kind in kinds for key in known_keys(kind)}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem != "CHANGELOG"], ids=page_name
)
def test_settings_that_a_page_names_exist(page: Path) -> None:
    """Names such as `clients.total` or `clients.total = 4` in the text, and `clients.total=4` in commands."""
    text, keys = page.read_text(encoding="utf-8"), settings()
    inline = re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?: ?=[^`]*)?`", text)
    assigned = re.findall(r"(?<![\w./-])([a-z_]+(?:\.[a-z_0-9]+)+)=", text)
    sections = {key.partition(".")[0] for key in keys if "." in key}
    for name in {*inline, *assigned}:
        if name.partition(".")[0] in sections and not _no_setting(name):
            known = name in keys or any(key.startswith(f"{name}.") for key in keys)
            assert known, f"{name} is no setting"


def _no_setting(name: str) -> bool:
    """Return whether a dotted name is a file, a method of the fleet or a name within the package."""
    section, *rest = name.split(".")
    if section == "semisfl":  # the method's section has the package's name
        code = (ROOT / "semisfl" / rest[0], ROOT / "semisfl" / f"{rest[0]}.py")
        return rest[0] in NAMES_OF_THE_PACKAGE or any(path.exists() for path in code)
    return rest[-1] in FILE_SUFFIXES or (section == "fleet" and rest != ["kind"])


def test_the_policy_of_the_page_on_security_is_one() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```toml\n(.*?)^```", text, re.M | re.S)
    policy = parse_policy(tomllib.loads(block))
    assert policy.bits_per_image is not None and policy.about_uploads("trained") == []
