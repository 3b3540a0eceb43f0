"""Imports go one way: cli -> runs -> methods -> algorithm, models, fleet.base."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

import semisfl

ROOT = Path(semisfl.__file__).parent
# Nothing else may be needed to train in one process.
CORE_NEEDS = {"torch", "numpy", "pydantic", "safetensors", "rich", "PIL", "tomlkit"}


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
    """What a module imports, for types alone aside; ``when_imported``: at once, not when first needed."""

    def walk(node: ast.AST) -> set[str]:
        found = set(_names(node))
        for child in ast.iter_child_nodes(node):
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if not _type_checking(child) and not (when_imported and function):
                found |= walk(child)
        return found

    return frozenset(walk(ast.parse(FILES[module].read_text(encoding="utf-8"))))


def inside(module: str) -> set[str]:
    return {name for name in imports(module) if name.split(".")[0] == "semisfl"}


def modules(*packages: str) -> list[str]:
    found = [module for module in FILES if below(module, *packages)]
    assert found
    return found


def test_the_parser_sees_imports() -> None:
    assert "semisfl.seeds" in imports("semisfl.methods.semisfl")
    assert "semisfl.algorithm.losses" in imports("semisfl.methods.semisfl")
    assert "semisfl.fleet.local" in imports("semisfl.runs.experiment")
    assert "matplotlib.figure" in imports("semisfl.data.partition")
    assert "matplotlib.figure" not in imports("semisfl.data.partition", when_imported=True)


# Who may import what of the package, from the bottom up.
SETTINGS = (
    *("seeds", "sections", "catalog", "lookup", "run_settings", "config", "policy"),
    *("label_settings", "presets", "rows", "stopping"),
)
ALLOWED = {
    "seeds": (),
    "sections": (),
    "catalog": (),
    "lookup": ("catalog", "sections"),
    "policy": ("sections",),
    "run_settings": ("tables.kinds", "catalog", "lookup", "sections"),
    "label_settings": ("sections",),
    "config": ("run_settings", "catalog", "lookup", "sections", "policy"),
    "files": (),
    "tables.kinds": (),
    "tables.shapes": ("tables.kinds",),
    "tables.named": ("tables.kinds", "tables.shapes"),
    "tables.modules": ("tables.kinds", "tables.shapes", "layers"),
    "toml": ("config",),
    "engine": ("engine", "layers", "run_settings"),
    "layers": ("engine.kernels",),
    "models": ("layers", "tables", "seeds", "config", "run_settings", "engine.kernels"),
    "data": ("data", "seeds", "run_settings", "files", "catalog", "lookup", "engine.kernels"),
    "algorithm": ("algorithm", "config", "run_settings", "label_settings", "engine"),
    "fleet": ("fleet", "engine", "models", "layers", "tables", "data", *SETTINGS),
    # `fleet.codec` says how many bytes a tensor is, `fleet.aggregate` makes one state of several;
    # the engines themselves stay out of sight.
    "methods": (
        *("methods", "algorithm", "models", "layers", "data", *SETTINGS),
        *("fleet.base", "fleet.codec", "fleet.aggregate", "fleet.held_back", "engine"),
    ),
    "attacks.poisoning": ("fleet.base", *SETTINGS),
    "attacks.spoilt_fleet": ("attacks.poisoning", "fleet", *SETTINGS),
    **dict.fromkeys(
        (
            "attacks.inversion",
            "attacks.updates",
            "attacks.guesses",
            "attacks.meter",
            "attacks.hijacking",
        ),
        ("attacks", "fleet", "models", "layers", "data", "engine", *SETTINGS),
    ),
    "use": (
        *("use", "runs", "net", "fleet", "models", "layers", "tables", "data", "engine", "files"),
        *SETTINGS,
    ),
    "net": ("net", "fleet", "models", "data", "files", "engine.hardware", *SETTINGS),
}


@pytest.mark.parametrize("package", ALLOWED)
def test_direction(package: str) -> None:
    for module in modules(package):
        for name in inside(module):
            # `from semisfl import __version__` names the package itself.
            assert name == "semisfl" or below(name, *ALLOWED[package]), f"{module} imports {name}"


def test_algorithm_is_torch_only() -> None:
    for module in modules("algorithm"):
        outside = (
            {name.split(".")[0] for name in imports(module)} - {"semisfl"} - sys.stdlib_module_names
        )
        assert outside <= {"torch", "numpy"}, module


def test_nothing_below_imports_runs_or_cli() -> None:
    for module in modules("algorithm", "models", "data", "engine", "fleet", "net", "methods"):
        for name in inside(module):
            assert not below(name, "runs", "cli", "use", "costs"), f"{module} imports {name}"
    for module in FILES:
        if not below(module, "cli", "__main__"):
            assert not any(below(name, "cli") for name in inside(module)), module


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
            "config",
            "run_settings",
            "label_settings",
            "presets",
            "seeds",
            "toml",
        ),
        *modules("engine.hardware", "engine.sgd", "engine.stack", "engine.sums", "engine.weights"),
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


def test_there_is_no_cycle() -> None:
    """Imports that wait until a function is called count too."""
    waiting = {module: inside(module) & FILES.keys() - {module} for module in FILES}
    while free := [module for module, needs in waiting.items() if not needs]:
        for module in free:
            del waiting[module]
        for needs in waiting.values():
            needs -= set(free)
    # What is left imports itself by some way round, or something that does.
    assert not waiting


def test_a_name_means_one_module() -> None:
    """A package's `base`, a method's `method` and `settings`, and the two sides of the network aside."""
    mirrored = {"__init__", "base", "method", "settings"}
    names = [
        name
        for module in FILES
        if (name := module.split(".")[-1]) not in mirrored and not below(module, "net.client")
    ]
    shared = {name for name in names if names.count(name) > 1}
    assert shared <= {"fleet", "semisfl"}, (
        "the network's fleet, and the method the package is named for"
    )


def test_engines_know_no_method() -> None:
    for module in modules("engine", "fleet", "net", "data", "algorithm"):
        words = set(re.findall(r"\w+", FILES[module].read_text(encoding="utf-8").lower()))
        known = words & {"semifl", "fedmatch", "fedswitch", "fedswitch_sl", "fl2"}
        assert not known, f"{module} names {known}"


def test_no_catch_all_modules() -> None:
    assert not [
        module for module in FILES if module.split(".")[-1] in ("utils", "util", "misc", "common")
    ]
