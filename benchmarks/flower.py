"""The same local work in Flower's simulation and in our in-process fleet, timed in one run.

Ten clients, all active, train FixMatch with the model they are sent (`examples/seventh_method.py`):
same model, same images, same draws, same optimiser, plain averaging, on two CPU cores. Prints JSON:
seconds a round of each engine and their ratio, and how far the resulting models lie apart.

    python -m venv .venv-flower && . .venv-flower/bin/activate
    pip install -e '.[flower]'
    python benchmarks/flower.py

Flower's start (Ray, processes, imports) and both engines' first round are left out of the times.
"""

import json
import os
import statistics
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CORES, CLIENTS, ROUNDS = 2, 10, 6
LOCAL_STEPS = (10, 50)

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
# Flower's worker processes find this file and the example where this process does.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
)
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples")]

import torch  # noqa: E402
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402
from flwr.serverapp.strategy import FedAvg  # noqa: E402
from flwr.simulation import run_simulation  # noqa: E402
from seventh_method import FixMatchWork  # noqa: E402
from torch import nn  # noqa: E402

from semisfl import config, presets, run  # noqa: E402
from semisfl.algorithm.losses import consistency, pseudo_label  # noqa: E402
from semisfl.config import Config  # noqa: E402
from semisfl.data.augment import Augmentation, Normalizer  # noqa: E402
from semisfl.data.batches import RoundBatches, split_views  # noqa: E402
from semisfl.fleet.base import FullRound, State, mean_state  # noqa: E402
from semisfl.methods.full import states_of  # noqa: E402

THRESHOLD, RATE = 0.2, 0.02  # low, so that an untrained model labels something


def settings(steps: int) -> Config:
    changes = [
        f"clients.total={CLIENTS}",
        f"clients.active={CLIENTS}",
        f"clients.steps={steps}",
        "data.partition.kind=iid",
    ]
    return config.parse(config.override(presets.values_of("digits"), changes))


@lru_cache
def holdings(steps: int) -> tuple[Config, RoundBatches, tuple[Any, ...]]:
    """A process's data: loaded once, as a careful Flower app does too."""
    chosen = settings(steps)
    data, partition = run.load_data(chosen)
    augment = chosen.data.augment
    augmentation = Augmentation(augment.flip, augment.pad, augment.operations, augment.cutout)
    normalizer = Normalizer.of(data.mean, data.std)
    batches = RoundBatches(data.images, augmentation, normalizer, torch.float32, whole=False)
    return chosen, batches, partition.clients


@lru_cache
def fresh_model(steps: int) -> nn.Sequential:
    experiment = run.assemble(
        settings(steps).model_copy(update={"method": "supervised"}), device="cpu"
    )
    return next(iter(experiment.method.tested().values()))


# --- Flower ---------------------------------------------------------------------------------------

client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)  # two workers share two cores
    asked = message.content["config"]
    steps, round_index = int(asked["steps"]), int(asked["server-round"])
    client = int(context.node_config["partition-id"])
    chosen, batches, shards = holdings(steps)
    model = fresh_model(steps)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=RATE,
        momentum=chosen.optimizer.momentum,
        nesterov=chosen.optimizer.nesterov,
        weight_decay=chosen.optimizer.weight_decay,
        fused=True,
    )
    size = (batches.images.shape[2], batches.images.shape[3])
    batch = chosen.clients.batch
    views = split_views(
        batches.augmentation, shards[client], size, steps, batch, chosen.seed, round_index, client
    )
    batches.start(views)
    for _ in range(steps):
        with torch.no_grad():
            labels, confident = pseudo_label(model.eval()(batches.get("weak")), THRESHOLD)
        loss = consistency(model.train()(batches.get("strong")), labels, confident)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batches.advance()
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": 1}),  # equal weights
        }
    )
    return Message(content=content, reply_to=message)


class TimedFedAvg(FedAvg):
    """Notes when each round's training is asked for and when its mean is there."""

    def __init__(self) -> None:
        super().__init__(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        self.seconds: list[float] = []

    def configure_train(self, *args: Any, **more: Any) -> Any:
        self.started = time.perf_counter()
        return super().configure_train(*args, **more)

    def aggregate_train(self, *args: Any, **more: Any) -> Any:
        mean = super().aggregate_train(*args, **more)
        self.seconds.append(time.perf_counter() - self.started)
        return mean


def flower(steps: int) -> tuple[list[float], State]:
    outcome: dict[str, Any] = {}
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = TimedFedAvg()
        result = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(fresh_model(steps).state_dict()),
            num_rounds=ROUNDS,
            train_config=ConfigRecord({"steps": steps}),
        )
        outcome["seconds"] = strategy.seconds
        outcome["state"] = result.arrays.to_torch_state_dict()

    run_simulation(
        server_app,
        client_app,
        num_supernodes=CLIENTS,
        backend_config={
            "init_args": {"num_cpus": CORES, "log_to_driver": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    return outcome["seconds"], outcome["state"]


# --- ours -----------------------------------------------------------------------------------------


def ours(steps: int) -> tuple[list[float], State]:
    torch.set_num_threads(CORES)
    chosen = settings(steps)
    experiment = run.assemble(chosen.model_copy(update={"method": "supervised"}), device="cpu")
    model = next(iter(experiment.method.tested().values()))
    seconds = []
    for round_index in range(1, ROUNDS + 1):  # Flower counts from 1
        started = time.perf_counter()
        plan = FullRound(
            round_index,
            tuple(range(CLIENTS)),
            steps,
            RATE,
            send={"model": model.state_dict()},
            settings={"tau": THRESHOLD},
        )
        results = experiment.fleet.train(FixMatchWork(), plan)
        model.load_state_dict(mean_state(states_of(results, "model")))
        seconds.append(time.perf_counter() - started)
    return seconds, model.state_dict()


def main() -> None:
    import flwr

    report: dict[str, Any] = {
        "flwr": flwr.__version__,
        "torch": torch.__version__,
        "clients": CLIENTS,
    }
    for steps in LOCAL_STEPS:
        our_seconds, our_state = ours(steps)
        their_seconds, their_state = flower(steps)
        apart = max(float((our_state[name] - their_state[name]).abs().max()) for name in our_state)
        pair = our_seconds[1:], their_seconds[1:]
        (mine, theirs), (least, their_least) = (
            [choose(times) for times in pair] for choose in (statistics.median, min)
        )
        report[f"{steps}_steps"] = {
            "ours_seconds": round(mine, 3),
            "flower_seconds": round(theirs, 3),
            "ratio": round(theirs / mine, 2),
            # Other work on the machine only ever adds: the least of each is the steadier number.
            "ratio_of_fastest_rounds": round(their_least / least, 2),
            "largest_difference": apart,
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    # Under its own name, so that workers unpickle the client half from this file.
    import flower as this_file

    this_file.main()
