"""How pseudo-labels adapt to clients: the settings of `semisfl.algorithm.labelling`. Loads no torch."""

from typing import Literal

from pydantic import Field

from semisfl.settings.sections import Section


class LabelSettings(Section):
    """Beyond the paper. With the defaults, a label is the teacher's best class, as in the paper."""

    align: Literal["none", "global", "client"] = Field(
        "none",
        description="correct the teacher's predictions by class: for all clients together, or for what each client seems to hold",
    )
    warmup: int = Field(10, ge=0, description="first rounds in which labels are not corrected yet")

    @property
    def adapts(self) -> bool:
        return self.align != "none"
