"""Time the same local work in Flower's simulation and in our in-process fleet, in one run.

Ten clients, all active, train FixMatch with the model they are sent (`examples/fedavg_fixmatch`):
same weights, same images, same draws, same optimiser, plain averaging, on two CPU cores. Flower's
client is plain PyTorch: its own layers, optimiser and loop. The engines take turns round by round,
so that both meet the same machine. Prints JSON, for each amount of local work: seconds per round of
each engine and their ratio, the arithmetic in a round, how far the models were moved and how far
they lie apart in the end.

    python -m venv .venv-flower && . .venv-flower/bin/activate
    pip install -e . 'flwr[simulation]==1.41.*'
    python benchmarks/flower.py > results/cpu/flower.json

Flower's start (Ray, processes, imports) and both engines' first round are left out of the times.
"""

import json
import os
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "fedavg_fixmatch"
CORES, CLIENTS, ROUNDS = 2, 10, 10
LOCAL_STEPS = (1, 10, 50)  # one, so that most of the time is the engine's own cost

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see semisfl/cli/__init__.py
# Flower's worker processes find this file and the example where this process does.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), str(Path(__file__).parent), str(EXAMPLE), os.environ.get("PYTHONPATH", "")]
)
sys.path[:0] = [str(ROOT), str(Path(__file__).parent), str(EXAMPLE)]

import torch  # noqa: E402
from fedavg_fixmatch.method import FixMatchWork  # noqa: E402
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402
from flwr.serverapp.strategy import FedAvg  # noqa: E402
from flwr.simulation import run_simulation  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from semisfl.algorithm.losses import consistency, pseudo_label  # noqa: E402
from semisfl.data.augment import Augmentation, Normalizer  # noqa: E402
from semisfl.data.batches import RoundBatches, split_views  # noqa: E402
from semisfl.fleet.base import FullRound, State, mean_state  # noqa: E402
from semisfl.runs import experiment as experiments  # noqa: E402
from semisfl.runs import run_data  # noqa: E402
from semisfl.settings import config, presets  # noqa: E402
from semisfl.settings.config import Config  # noqa: E402

# The threshold is low so that an untrained model accepts some labels. The learning rate is low too:
# a model trained only on its own labels soon agrees with itself, and its gradients vanish.
THRESHOLD, RATE = 0.11, 2e-4


def tiny() -> nn.Sequential:
    """Return a user's own model, so small that the engine's cost dominates."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 12 * 12, 10)
        )


CASES: dict[str, tuple[Callable[[], nn.Sequential] | None, int]] = {
    "the digits' CNN, batch 32": (None, 32),
    "the digits' CNN, batch 10": (None, 10),
    "one convolution, batch 10": (tiny, 10),
}
"""Model (None: the preset's) and local batch; 10 is the one SemiFL's authors use."""


def assemble(case: str, steps: int) -> experiments.Experiment:
    model, _ = CASES[case]
    chosen = settings(case, steps).model_copy(update={"method": "supervised"})
    return experiments.assemble(chosen, model=model() if model else None, device="cpu")


def settings(case: str, steps: int) -> Config:
    changes = [
        f"clients.total={CLIENTS}",
        f"clients.active={CLIENTS}",
        f"clients.batch={CASES[case][1]}",
        f"clients.steps={steps}",
        "data.partition.kind=iid",
    ]
    return config.parse(config.override(presets.values_of("digits"), changes))


# --- Flower ---------------------------------------------------------------------------------------

client_app = ClientApp()


@lru_cache
def holdings(case: str, steps: int) -> tuple[Config, RoundBatches, tuple[Any, ...]]:
    """Load the data once per process, as a careful Flower app does."""
    chosen = settings(case, steps)
    data, partition = run_data.load_data(chosen)
    augmentation = Augmentation.of(chosen.data.augment)
    normalizer = Normalizer.of(data.mean, data.std)
    batches = RoundBatches(data.images, augmentation, normalizer, torch.float32, whole=False)
    return chosen, batches, partition.clients


@lru_cache
def plain_model(case: str) -> nn.Sequential:
    """Return the same layers with the same names in PyTorch's own Sequential."""
    model = assemble(case, 1).method.tested()["student"]
    halves = [
        (name, nn.Sequential(OrderedDict(half.named_children())))
        for name, half in model.named_children()
    ]
    return nn.Sequential(OrderedDict(halves)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)  # two workers share two cores
    settings = message.content["config"]
    case, steps, round_index = (
        settings["case"],
        int(settings["steps"]),
        int(settings["server-round"]),
    )
    client = int(context.node_config["partition-id"])
    chosen, batches, shards = holdings(case, steps)
    model = plain_model(case)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=RATE,
        momentum=chosen.optimizer.momentum,
        nesterov=chosen.optimizer.momentum > 0,
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
        loss = fixmatch(model, batches.get("weak"), batches.get("strong"))
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


def fixmatch(model: nn.Module, weak: Tensor, strong: Tensor) -> Tensor:
    with torch.no_grad():
        labels, confident = pseudo_label(model.eval()(weak), THRESHOLD)
    return consistency(model.train()(strong), labels, confident)


class TakingTurns(FedAvg):
    """Run one of our rounds before each of Flower's, and note the time of both."""

    def __init__(self, ours: "Ours") -> None:
        super().__init__(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        self.ours = ours
        self.seconds: list[float] = []

    def configure_train(self, server_round: int, *args: Any, **more: Any) -> Any:
        self.ours.round(server_round)
        self.started = time.perf_counter()
        return super().configure_train(server_round, *args, **more)

    def aggregate_train(self, *args: Any, **more: Any) -> Any:
        mean = super().aggregate_train(*args, **more)
        self.seconds.append(time.perf_counter() - self.started)
        return mean


# --- ours -----------------------------------------------------------------------------------------


class Ours:
    def __init__(self, case: str, steps: int) -> None:
        experiment = assemble(case, steps)
        self.model = experiment.method.tested()["student"]
        self.fleet = experiment.fleet
        self.steps = steps
        self.seconds: list[float] = []

    def round(self, index: int) -> None:
        torch.set_num_threads(CORES)  # set per thread
        started = time.perf_counter()
        plan = FullRound(
            index,
            tuple(range(CLIENTS)),
            self.steps,
            RATE,
            send={"model": self.model.state_dict()},
            settings={"confidence_threshold": THRESHOLD},
        )
        results = self.fleet.train(FixMatchWork(), plan)
        self.model.load_state_dict(mean_state([result.states["model"] for result in results]))
        self.seconds.append(time.perf_counter() - started)


# --- both -----------------------------------------------------------------------------------------


def compare(grid: Grid, case: str, steps: int) -> dict[str, float]:
    ours = Ours(case, steps)
    first = {name: value.clone() for name, value in ours.model.state_dict().items()}
    strategy = TakingTurns(ours)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(first),
        num_rounds=ROUNDS,
        train_config=ConfigRecord({"case": case, "steps": steps}),
    )
    last = ours.model.state_dict()
    pair = ours.seconds[1:], strategy.seconds[1:]
    (mine, theirs), (least, their_least) = (
        [choose(times) for times in pair] for choose in (statistics.median, min)
    )
    return {
        "ours_seconds": round(mine, 3),
        "flower_seconds": round(theirs, 3),
        "ratio": round(theirs / mine, 2),
        # Other work on the machine only adds time, so the minimum of each is the more stable number.
        "ours_fastest_seconds": round(least, 3),
        "flower_fastest_seconds": round(their_least, 3),
        "ratio_of_fastest_rounds": round(their_least / least, 2),
        "gflop_a_round": round(CLIENTS * steps * gflop_a_step(case), 3),
        "largest_change": largest_difference(last, first),
        "largest_difference": largest_difference(last, result.arrays.to_torch_state_dict()),
    }


def largest_difference(one: State, other: State) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def gflop_a_step(case: str) -> float:
    model, images = plain_model(case), torch.zeros(CASES[case][1], 1, 28, 28)
    with FlopCounterMode(display=False) as counter:
        fixmatch(model, images, images).backward()
    return float(counter.get_total_flops()) / 1e9


def matmul_gflop_per_second(side: int = 1024, tries: int = 300) -> float:
    """Return what the cores reach together in the fastest of many large matrix products."""
    torch.set_num_threads(CORES)
    one, other = torch.rand(side, side), torch.rand(side, side)
    least = float("inf")
    for _ in range(tries):
        started = time.perf_counter()
        one @ other
        least = min(least, time.perf_counter() - started)
    return 2 * side**3 / 1e9 / least


def main() -> None:
    import flwr

    report: dict[str, Any] = {
        "flwr": flwr.__version__,
        "torch": torch.__version__,
        "clients": CLIENTS,
        "rounds_timed": ROUNDS - 1,
        "matmul_gflop_per_second": round(matmul_gflop_per_second()),
    }
    server_app = ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        for case in CASES:
            report[case] = {f"steps={steps}": compare(grid, case, steps) for steps in LOCAL_STEPS}

    run_simulation(
        server_app,
        client_app,
        num_supernodes=CLIENTS,
        backend_config={
            "init_args": {"num_cpus": CORES, "log_to_driver": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    # Under its own name, so that workers unpickle the client half from this file.
    import flower as this_file

    this_file.main()
