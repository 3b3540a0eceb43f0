"""FedSwitch-SL with the supervised steps per round that a recorded run of SemiSFL took.

SemiSFL's controller lowers the supervised steps K_s during a run; FedSwitch-SL keeps them. This plug-in gives
FedSwitch-SL the schedule of a SemiSFL run, so that the two differ only in clustering regularisation.
"""

from dataclasses import replace

from pydantic import Field

from semisfl.methods.fedswitch_settings import FedSwitchSettings
from semisfl.methods.fedswitch_sl import FedSwitchSL
from semisfl.metrics import MethodMetrics
from semisfl.settings.catalog import NamedMethod


class RecordedStepsSettings(FedSwitchSettings):
    """FedSwitch-SL's settings, and when the supervised steps change."""

    schedule: tuple[tuple[int, int], ...] = Field(
        ((0, 100),),
        description="pairs of a round index and the supervised steps from that round on",
    )


class RecordedSteps(FedSwitchSL):
    """FedSwitch-SL whose supervised steps K_s follow `RecordedStepsSettings.schedule`."""

    entry = NamedMethod(
        name="fedswitch-sl-recorded-steps",
        code="reproduction.recorded_steps:RecordedSteps",
        title="FedSwitch-SL, K_s of SemiSFL",
        summary="FedSwitch-SL with the supervised steps of a recorded run of SemiSFL",
        section="recorded_steps",
        settings="reproduction.recorded_steps:RecordedStepsSettings",
    )

    def round(self, round_index: int) -> MethodMetrics:
        """Train one round with the supervised steps of the schedule."""
        settings = self.setup.config.settings(RecordedStepsSettings)
        steps = [steps for start, steps in settings.schedule if start <= round_index][-1]
        config = self.setup.config
        server = config.server.model_copy(update={"steps": steps})
        self.setup = replace(self.setup, config=config.model_copy(update={"server": server}))
        return super().round(round_index)
