"""How pseudo-labels adapt to clients and classes: settings of `semisfl.algorithm.labelling`. Loads no torch."""

from typing import Literal

from pydantic import Field

from semisfl.settings.sections import Section


class LabelSettings(Section):
    """None of it is the paper's: left alone, a label is used if its confidence reaches tau, always."""

    threshold: Literal["fixed", "global", "class", "client", "client_class", "client_share"] = (
        Field(
            "fixed",
            description="confidence that a label needs: tau, or a moving mean of confidences, scaled by class or not; or by how much of a class reaches tau",
        )
    )
    least: float = Field(
        0.5, ge=0, le=1, description="lowest that a moving threshold gets; the highest is tau"
    )
    energy: float | None = Field(
        None,
        description="a label also needs a free energy, -log sum exp of its logits, of at most this; none: any",
    )
    align: Literal["none", "global", "client"] = Field(
        "none",
        description="correct predictions by class: all clients' mean to the labelled images' mix, or each client's to its own",
    )
    smoothing: float = Field(
        0.1, gt=0, le=1, description="share of the labelled images' mix in a client's estimated one"
    )
    adjust: float = Field(
        0.0,
        ge=0,
        description="logit adjustment: so many times the log of a client's mix is added to student logits",
    )
    below: Literal["unused", "gaussian", "soft"] = Field(
        "unused",
        description="images under the threshold: left out, weighted by how far under, or with all classes' probabilities",
    )
    below_weight: float = Field(1.0, gt=0, description="weight of those images' loss")
    warmup: int = Field(
        10, ge=0, description="rounds in which labels are as if nothing of this were set"
    )
    decay: float = Field(0.999, ge=0, lt=1, description="per step, of means over all clients")
    client_decay: float = Field(0.98, ge=0, lt=1, description="per step, of means over one client")

    @property
    def adapts(self) -> bool:
        """Whether anything here changes a label, its use or its loss."""
        still = self.threshold == "fixed" and self.align == "none" and self.below == "unused"
        return not still or self.adjust > 0 or self.energy is not None
