"""FedSwitch-SL: FedSwitch with a split model. SemiSFL without projections, queue and contrast.

A reconstruction, as FedSwitch is. Clients lack the top, so the server decides who labels whom:
by the mean prediction over a client's weak features in its last participation, the teacher the
first time. The SemiSFL paper calls this the ablation of clustering regularisation.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from semisfl.algorithm.labelling import Labelling
from semisfl.algorithm.losses import consistency
from semisfl.algorithm.membership import Membership
from semisfl.fleet.base import Features, SplitRound
from semisfl.methods.base import Setup
from semisfl.methods.fedswitch import divergence
from semisfl.methods.fedswitch_settings import FedSwitchSettings
from semisfl.methods.split_method import SplitMethod


class FedSwitchSL(SplitMethod):
    """FedSwitch for a split model: the server labels features, by its teacher or its student.

    ``skew`` holds each client's divergence in its last participation, which decides who labels next time.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        config, self.settings = setup.config, setup.config.settings(FedSwitchSettings)
        # By position among the active clients; updated in place, because the step reads it.
        self.by_teacher = torch.ones(
            config.clients.active, dtype=torch.bool, device=setup.hardware.device
        )
        self.skew: dict[int, float] = {}
        """Each client's divergence from uniform in its last participation."""
        self.membership = Membership()
        self.labelling = Labelling(
            self.settings.align,
            self.settings.confidence_threshold,
            ">=",
            setup.labeled.class_mix(setup.classes),
            config.clients.total,
            config.clients.active,
        )

    def plan(self, round_index: int, lr: float) -> SplitRound:
        """Decide who labels each client, and send the teacher's bottom to those that the teacher labels.

        The others' weak features come from their student bottom.
        """
        members = self.setup.fleet.members()
        for client in self.membership.gone(self.skew, members):
            del self.skew[client]
        limit = self.settings.iid_threshold
        by_teacher = [self.skew.get(client, limit) <= limit for client in self.active]
        self.by_teacher[: len(by_teacher)] = torch.tensor(by_teacher)
        self.labelling.start_round(
            round_index - self.setup.config.server.pretrain_rounds, self.active, members
        )
        labelled = (client for client, yes in zip(self.active, by_teacher, strict=True) if yes)
        return replace(super().plan(round_index, lr), teacher_for=frozenset(labelled))

    def loss(self, features: Features) -> tuple[Tensor, Tensor, Tensor]:
        """Return the masked cross-entropy with the labels of each client's labeller."""
        places = [self.active.index(client) for client in features.clients]
        with torch.no_grad():
            by_teacher = self.by_teacher[: len(self.active)].view(-1, 1)
            if len(places) < len(self.active):
                by_teacher = by_teacher[places]
            labeller = torch.where(
                by_teacher.repeat_interleave(features.batch, 0),
                self.teacher_top(features.teacher),
                self.top.eval()(features.teacher),
            )
            labels, confident = self.labelling.label(labeller, features.clients, self.active)
            # Uncorrected: they say how uneven a client looks to its labeller.
            predictions = labeller.float().softmax(1)
        logits = self.top.train()(features.student)
        labels, confident = self.within_limits(features, logits, labels, confident)
        loss = consistency(logits, labels, confident)
        self.meter.add(
            loss_consistency=loss, client_predictions=self._by_client(predictions, places)
        )
        return loss, labels, confident

    def _by_client(self, predictions: Tensor, places: list[int]) -> Tensor:
        """Return the sums over each active client's rows; zero for one that did not answer."""
        sums = predictions.new_zeros(len(self.active), predictions.shape[1])
        for place, rows in zip(places, predictions.chunk(len(places)), strict=True):
            sums[place] = rows.sum(0)
        return sums

    def report(self, plan: SplitRound, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Update ``skew`` from the summed predictions [clients, classes]; a row of zeros changes nothing."""
        predictions = torch.tensor(sums["client_predictions"], dtype=torch.float64)
        for client, total in zip(self.active, predictions, strict=True):
            if total.sum() > 0:
                self.skew[client] = float(divergence(total / total.sum()))
        return {"labelled_by_teacher": len(plan.teacher_for or ()) / len(plan.active)}

    def state_dict(self) -> dict[str, Any]:
        """Return student, teacher and each client's divergence from uniform labels."""
        return {
            **super().state_dict(),
            "skew": {str(client): value for client, value in self.skew.items()},
            "names": self.membership.state_dict(),
            "labelling": self.labelling.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the state of a checkpoint, or from before a round that is undone."""
        super().load_state_dict(state)
        self.skew = {int(client): value for client, value in state["skew"].items()}
        self.membership.load_state_dict(state["names"])
        self.labelling.load_state_dict(state["labelling"])
