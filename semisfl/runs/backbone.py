"""A file that holds a network: its table of layers, its weights, and what a run and its model card must know of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from semisfl.models.exported import described
from semisfl.models.shapes import Shape
from semisfl.settings.layer_kinds import Layer


@dataclass(frozen=True)
class Backbone:
    """A network as a table of layers with its weights; `save` writes the file that ``model.weights`` takes."""

    layers: tuple[Layer, ...]
    """The table. Its last linear layer leaves its features out: it gets as many as a run has classes."""
    weights: Mapping[str, Tensor]
    """By the names that layers have here."""
    cuts: tuple[str, ...]
    """Names of the layers that the network can be cut after (``model.cut``), up to its first flatten."""
    shape: Shape
    """Channels, height and width of the images that it was exported with."""

    def save(
        self,
        path: str | Path,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        source: str | None = None,
        licence: str | None = None,
    ) -> None:
        """Write layers and weights into one ``.safetensors`` file.

        Args:
            path: the file.
            mean: what the network expects to be subtracted from each channel, whose values are from 0 to 1.
            std: what it expects each channel to be divided by then.
            source: where the weights come from, for the model card.
            licence: their licence.

        Raises ValueError for a mean or a standard deviation of another number of channels.
        """
        for name, values in (("mean", mean), ("std", std)):
            if values is not None and len(values) != self.shape[0]:
                raise ValueError(
                    f"{name} has {len(values)} values, and the network takes {self.shape[0]} channels; give one for each"
                )
        about = {
            "layers": [layer.model_dump(mode="json") for layer in self.layers],
            "cuts": self.cuts,
            "shape": self.shape,
            "side": self.shape[1] if self.shape[1] == self.shape[2] else None,
            "mean": mean,
            "std": std,
            "source": source,
            "licence": licence,
            "origin": f"{source or 'unknown source'}, licence: {licence or 'unknown'}",
        }
        save_file(dict(self.weights), path, {"backbone": json.dumps(about, sort_keys=True)})


def table_of(module: nn.Module, example: Tensor) -> Backbone:
    """Return a module as a table of layers with its weights; the module itself stays as it is.

    Args:
        module: a network of images; it is exported in eval mode. If it does not end with a linear layer, one is added.
        example: images [n, channels, height, width], normalised as the module expects them.

    Raises ValueError with the name and the place of an operation that no kind of layer describes, and if the table
    gives other outputs than the module.
    """
    table, network = described(module, example.detach().cpu().float())
    before = network[: [layer.kind for layer in table].index("flatten")]
    return Backbone(
        table,
        network.state_dict(),
        tuple(dict(before.named_children())),
        tuple(example.shape[1:]),  # type: ignore[arg-type]
    )
