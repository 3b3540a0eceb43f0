"""Return the bytes that the parts of a real model have on the wire, to compare costs with."""

from semisfl.fleet.codec import codec_named, state_bytes
from semisfl.methods.sizes import Sizes
from semisfl.models.layers import batchnorms
from semisfl.models.split import SplitModel
from semisfl.settings.run import WireConfig


def sizes_of(
    model: SplitModel, batch: int, steps: int, wire: WireConfig | None = None, resent: bool = False
) -> Sizes:
    """Return the sizes of what a round of so many steps sends, for a given model."""
    wire, rows = wire or WireConfig(), (batch, model.features)
    bottom, top = (
        state_bytes(part.state_dict(), wire.models) for part in (model.bottom, model.top)
    )
    layers = [*batchnorms(model.bottom), *batchnorms(model.top)]
    statistics = sum(state_bytes(dict(layer.named_buffers()), wire.models) for layer in layers)
    student, teacher, gradients = (
        steps * codec_named(codec).size(rows)
        for codec in (wire.student_features, wire.teacher_features, wire.gradients)
    )
    return Sizes(bottom, bottom + top, statistics, student, teacher, gradients, resent)
