"""Find the file of trained weights that ``model.weights`` names: in an installed package, on disk or on the Hugging Face hub."""

import hashlib
import importlib.util
from pathlib import Path

from semisfl.settings.catalog import NamedWeights
from semisfl.settings.sections import ConfigError

SAFETENSORS = "model.safetensors"
"""The file of weights in a repository of the Hugging Face hub."""


def packaged_file(entry: NamedWeights, name: str) -> Path:
    """Return the file of weights in an installed package, which is not imported; check its model and SHA-256."""
    where = f"model.weights = {entry.name!r}"
    if name != entry.model:
        raise ConfigError(
            f"{where} is for model.name = {entry.model!r}, not for {name!r}; set model.name = {entry.model!r}, or "
            "model.weights to a file for this model"
        )
    found = importlib.util.find_spec(entry.package)
    if found is None or not found.submodule_search_locations:
        raise ConfigError(
            f"{where} needs the package {entry.package}: pip install 'semisfl[pretrained]'"
        )
    file = Path(next(iter(found.submodule_search_locations))) / entry.file
    try:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(
            f"{where}: {file} cannot be read ({error.strerror}); install {entry.package} again"
        ) from error
    if digest != entry.sha256:
        raise ConfigError(
            f"{where}: {file} has the SHA-256 {digest}, not {entry.sha256}; install {entry.package} again"
        )
    return file


def file_of(weights: str) -> Path:
    """Return the file that ``model.weights`` names; one on the Hugging Face hub is downloaded if it is not there yet."""
    where = f"model.weights = {weights!r}"
    kind, _, repository = weights.partition(":")
    if kind != "hub":
        path = Path(weights).expanduser()
        inside = path / SAFETENSORS
        return inside if inside.is_file() else path
    try:
        # Imported where used: it is an extra.
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"{where} needs the package huggingface_hub: pip install 'semisfl[pretrained]'"
        ) from error
    try:
        folder = snapshot_download(repository, allow_patterns=[SAFETENSORS, "config.json"])
    except (
        Exception
    ) as error:  # the hub's many kinds: no network, no such repository, a name that is none
        raise ConfigError(
            f"{where} cannot be downloaded ({' '.join(str(error).split())[:200]}); give hub:OWNER/NAME of a repository "
            f"with {SAFETENSORS}, or a local copy of it"
        ) from error
    return Path(folder) / SAFETENSORS
