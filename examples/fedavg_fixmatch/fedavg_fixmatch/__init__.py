"""A complete method of another package: FedAvg over clients that train FixMatch."""

from semisfl.settings.catalog import NamedMethod

METHOD = NamedMethod(
    name="fedavg-fixmatch",
    code="fedavg_fixmatch.method:FedAvgFixMatch",
    title="FedAvg-FixMatch",
    summary="clients label with the model they train; the mean is tested",
    note="an example, not tuned",
    section="fixmatch",
    settings="fedavg_fixmatch.settings:FixMatchSettings",
    works=("fedavg_fixmatch.method:FixMatchWork",),
    cost="fedavg_fixmatch.settings:cost",
)
