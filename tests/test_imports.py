"""Imports go one way: cli, tools, runs, methods, then algorithm, models and fleet.base."""

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

import semisfl

ROOT = Path(semisfl.__file__).parent
# Nothing else may be needed to train in one process.
CORE_NEEDS = {
    "torch",
    "numpy",
    "pydantic",
    "pydantic_core",
    "safetensors",
    "rich",
    "PIL",
    "tomlkit",
}


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(file): file for file in sorted(ROOT.rglob("*.py"))}


def below(module: str, *packages: str) -> bool:
    return any(
        module == f"semisfl.{name}" or module.startswith(f"semisfl.{name}.") for name in packages
    )


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert not node.level and node.module, "imports are absolute here"
        # `from semisfl.data import augment` names a module, `from semisfl.seeds import derive` does not.
        return [
            full if (full := f"{node.module}.{alias.name}") in FILES else node.module
            for alias in node.names
        ]
    return []


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@cache
def imports(module: str, when_imported: bool = False) -> frozenset[str]:
    """Return what a module imports, except for types alone; with ``when_imported`` only what it imports at once."""

    def walk(node: ast.AST) -> set[str]:
        names = set(_names(node))
        for child in ast.iter_child_nodes(node):
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if not _type_checking(child) and not (when_imported and function):
                names |= walk(child)
        return names

    return frozenset(walk(ast.parse(FILES[module].read_text(encoding="utf-8"))))


def inside(module: str) -> set[str]:
    return {name for name in imports(module) if name.split(".")[0] == "semisfl"}


def modules(*packages: str) -> list[str]:
    inside = [module for module in FILES if below(module, *packages)]
    assert inside
    return inside


def test_the_parser_sees_imports() -> None:
    assert "semisfl.seeds" in imports("semisfl.methods.semisfl")
    assert "semisfl.algorithm.losses" in imports("semisfl.methods.semisfl")
    assert "semisfl.fleet.setup" in imports("semisfl.runs.experiment")
    assert "matplotlib.figure" in imports("semisfl.data.holdings")
    assert "matplotlib.figure" not in imports("semisfl.data.holdings", when_imported=True)


ROOT_FILES = ("seeds", "files", "stopping")
BELOW_RUNS = ("fleet", "models", "data", "engine", "settings", "metrics", *ROOT_FILES)
# What an algorithm may know of how training is made fast.
ENGINE = ("engine.hardware", "engine.host", "engine.kernels", "engine.sgd", "engine.weights")
# What each folder may import of the package, from the bottom up. A name is a folder or a module.
ALLOWED: dict[str, tuple[str, ...]] = {
    "settings": ("settings",),
    "metrics": ("metrics",),
    "engine": ("engine", "settings"),
    "models": ("models", "engine", "settings", "seeds"),
    "data": ("data", "engine.hardware", "engine.kernels", "settings", "seeds", "files"),
    "algorithm": ("algorithm", *ENGINE, "settings"),
    "fleet": ("fleet", "models", "data", "engine", "settings", "seeds", "stopping", "files"),
    # A method sees how training is made fast, where images come from and where clients live only
    # through these modules.
    "methods": (
        *("methods", "algorithm", "models", "settings", "metrics", *ROOT_FILES),
        *(*ENGINE, "engine.inference", "engine.regression", "data.labeled", "data.positions"),
        *("fleet.base", "fleet.aggregate"),
    ),
    "net": (
        *("net", "fleet", "models", "data", "engine.hardware", "settings", "metrics"),
        *ROOT_FILES,
    ),
    "runs": ("runs", "methods", "net", *BELOW_RUNS),
    "attacks": ("attacks", "runs", *BELOW_RUNS),
    "costs": ("costs", "runs", "methods", *BELOW_RUNS),
    "use": ("use", "runs", "net", *BELOW_RUNS),
    "watch": ("watch", "runs", "settings", "metrics", *ROOT_FILES),
    "cli": (
        *("cli", "watch", "use", "costs", "attacks", "runs", "net", "fleet", "models"),
        *("data", "engine.hardware", "settings", "metrics", *ROOT_FILES),
    ),
}


def test_every_folder_has_a_row_and_the_root_is_small() -> None:
    folders = {path.name for path in ROOT.iterdir() if any(path.rglob("*.py"))}
    assert folders == set(ALLOWED)
    assert {path.stem for path in ROOT.glob("*.py")} == {"__init__", "__main__", *ROOT_FILES}
    for name in ROOT_FILES:
        assert not inside(f"semisfl.{name}"), f"{name} is at the bottom"


@pytest.mark.parametrize("package", ALLOWED)
def test_direction(package: str) -> None:
    for module in modules(package):
        for name in inside(module):
            assert below(name, *ALLOWED[package]), f"{module} imports {name}"


def test_algorithm_is_torch_only() -> None:
    for module in modules("algorithm"):
        outside = (
            {name.split(".")[0] for name in imports(module)} - {"semisfl"} - sys.stdlib_module_names
        )
        assert outside <= {"torch", "numpy"}, module


def test_report_and_watch_import_nothing_that_trains() -> None:
    seen, waiting = set(), ["semisfl.runs.report", *modules("watch")]
    while waiting:
        module = waiting.pop()
        if module in FILES and module not in seen:
            seen.add(module)
            waiting += inside(module)
    trains = [
        module
        for module in seen
        if below(module, "algorithm", "models", "methods", "fleet", "net", "engine")
    ]
    assert not trains


def test_the_core_needs_little() -> None:
    core = [
        *modules(
            "algorithm",
            "models",
            "methods",
            "data",
            "settings",
            "seeds",
        ),
        *modules("engine.hardware", "engine.sgd", "engine.sums", "engine.weights"),
        *(f"semisfl.runs.{name}" for name in ("experiment", "loop", "start", "directory")),
        *(f"semisfl.fleet.{name}" for name in ("base", "codec", "local", "local_full")),
    ]
    for module in core:
        needed = {name.split(".")[0] for name in imports(module, when_imported=True)}
        assert needed - sys.stdlib_module_names - {"semisfl"} <= CORE_NEEDS, module


def test_server_and_client_do_not_know_each_other() -> None:
    for side, other in (("net.server", "net.client"), ("net.client", "net.server")):
        for module in modules(side):
            assert not any(below(name, other) for name in inside(module)), module


def test_the_package_does_not_know_its_reproduction() -> None:
    for module in FILES:
        assert not any(name.split(".")[0] in ("reproduction", "tests") for name in imports(module))


def test_there_is_no_cycle() -> None:
    """Imports inside functions count too."""
    waiting = {module: inside(module) & FILES.keys() - {module} for module in FILES}
    while free := [module for module, needs in waiting.items() if not needs]:
        for module in free:
            del waiting[module]
        for needs in waiting.values():
            needs -= set(free)
    # What is left imports itself by some way round, or something that does.
    assert not waiting
