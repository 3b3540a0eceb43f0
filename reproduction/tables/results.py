"""Every table of the pages that is not one of the paper's: its name, and the function that makes it."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any

from reproduction import records
from reproduction.records import measured, run
from reproduction.tables import attacks, frontier, own_images, photos
from reproduction.tables.numbers import (
    METHODS,
    SEEDS,
    UNKNOWN,
    accuracies,
    called,
    cost_of,
    each,
    known,
    numbered,
    on_test,
    runs,
    sent,
    spread,
    table,
)
from semisfl.metrics import Metric, RoundMetrics, declared
from semisfl.runs.report import Run, Spread
from semisfl.settings.counts import amount

# --- performance-cpu.md ------------------------------------------------------------------------


def twin() -> str:
    """Return the steps of the fleet beside those of the plain twin."""
    lines = [
        (
            *(case, phase, f"{one['fleet_ms']:.0f}", f"{one['twin_ms']:.0f}"),
            *(f"{one['fleet_images_a_second']:.0f}", f"{one['times_faster']:.2f}"),
        )
        for case, phases in measured("cpu/twin").items()
        for phase, one in phases.items()
    ]
    return table(("case", "phase", "fleet ms", "twin ms", "images/s", "times faster"), lines)


def shares() -> str:
    """Return how much of a SemiSFL round each kind of operation takes."""
    timed = [
        one["shares_percent"] for one in measured("cpu/bench")["rounds"] if "shares_percent" in one
    ]
    kinds = sorted(timed[0], key=lambda kind: (kind == "everything else", -timed[0][kind]))
    lines = [(kind, *(f"{one[kind]:.0f} %" for one in timed)) for kind in kinds]
    return table(("", "digits", "CNN, 32 x 32 x 3"), lines)


def cluster() -> str:
    """Return the iteration's time in one process and over 2 and 4 ranks."""
    two, four = measured("cpu/cluster")

    def times(row: Any) -> list[str]:
        milliseconds = [f"{row[key]:,.0f}" for key in ("one_process_ms", "cluster_ms")]
        return [*milliseconds, f"{row['times_faster']:.2f}"]

    lines = [
        (f"{one['active']:,}", *times(one), *times(other), f"{one['bytes_between_ranks']:,}")
        for one, other in zip(two["rows"], four["rows"], strict=True)
    ]
    heads = [("one process, ms", f"{ranks} ranks, ms", "times faster") for ranks in (2, 4)]
    return table(("active clients", *heads[0], *heads[1], "bytes between 2 ranks"), lines)


def flower() -> str:
    """Return seconds per round here and in Flower's simulation."""
    keys = ("ours_seconds", "flower_seconds", "ratio")
    fastest = ("ours_fastest_seconds", "flower_fastest_seconds", "ratio_of_fastest_rounds")
    lines = [
        (
            *(work, steps.removeprefix("steps=")),
            *(f"{one[k]:.2f}" if "ratio" in k else f"{one[k]:.3g}" for k in (*keys, *fastest)),
        )
        for work, by_steps in measured("cpu/flower").items()
        if isinstance(by_steps, dict)
        for steps, one in by_steps.items()
    ]
    head = ("local work", "steps", "here, s per round", "Flower, s", "ratio")
    return table((*head, "here, fastest", "Flower, fastest", "ratio"), lines)


LAYERS = {
    "bare": "bare TLS sockets",
    "transport": "transport (streams, chunks, tickets, heartbeats)",
    "fleet": "the whole fleet (frames and values checked, tensors made and encoded)",
}


def network() -> str:
    """Return an iteration through each layer of the network, on two machines."""
    machines = [one for one in measured("cpu/network") if one["benchmark"] == "network_iteration"]
    lines = [
        [title]
        + [
            cell
            for one in machines
            for cell in (
                f"{one[layer + '_ms']:.0f} ({one[layer + '_server_cpu_ms']:.0f})",
                "1" if layer == "bare" else f"{one[layer + '_ratio']:.2f}",
            )
        ]
        for layer, title in LAYERS.items()
    ]
    heads = [f"{machine}, ms per iteration (server CPU)" for machine in ("x86", "Arm")]
    times = "times the bare loop"
    return table(("", heads[0], times, heads[1], times), lines)


def idle() -> str:
    """Return what idle clients cost their server."""
    lines = [
        (
            *(f"{one['clients']:,}", f"{one['seconds_to_connect']} s"),
            *(amount(1024 * one["server_kilobytes_a_client"]), f"{one['heartbeat_p99_ms']} ms"),
            f"{one['seconds_until_all_are_back']} s",
        )
        for one in measured("cpu/network")
        if one["benchmark"] == "network_idle"
    ]
    head = ("idle clients", "connected after", "server memory per client", "heartbeat p99")
    return table((*head, "all back after a server kill"), lines)


def training() -> str:
    """Return what training clients cost their server while some die and return."""
    lines = [
        (
            *(f"{one['clients']:,}", f"{one['active']:,}", str(one["rounds"])),
            f"{one['round_seconds_median']:.2g} s, {one['round_seconds_max']:.2g} s",
            f"{one['server_cpu_seconds_a_round']:.2g} s"
            if one["server_cpu_seconds_a_round"] > 9.95
            else f"{one['server_cpu_seconds_a_round']:.1f} s",
            ", ".join(
                f"{one[f'server_megabytes_{when}'] * 2**20 / 1e6:,.0f} MB"  # the file has MiB
                for when in ("connected", "peak")
            ),
            *(f"{one['descriptors']:,}", f"{one['returned']:,}"),
        )
        for one in measured("cpu/training_clients")
    ]
    head = ("clients", "active", "rounds", "round, median and longest", "server CPU per round")
    more = ("server memory, connected and at most", "descriptors", "died and returned")
    return table((*head, *more), lines)


def inference(size: str) -> str:
    """Return the cost of split inference at every cut, for images of one size."""
    every = [one for one in measured("cpu/inference")["rows"] if one["input"] == size]
    lines = []
    for cut in dict.fromkeys(one["cut"] for one in every):
        rows = [one for one in every if one["cut"] == cut]
        is_layer = "codec" in rows[0]
        digits = 0 if is_layer else 1
        lines.append(
            (
                f"`{cut}`" if is_layer else f"*{cut}*",
                f"{rows[0]['device_bytes'] / 1e6:.2f} MB",
                ", ".join(f"{row['bytes_up']:,}" for row in rows),
                ", ".join(f"{row['loopback']['median_ms']:.1f}" for row in rows),
                ", ".join(f"{row['4_mbit']['median_ms']:.{digits}f}" for row in rows),
            )
        )
    head = ("cut", "on the device", "sent up, B: fp32, int8", "loopback, ms", "4 Mbit/s, ms")
    return table(head, lines)


CPU_TABLES: dict[str, Callable[[], str]] = {
    "cpu-twin": twin,
    "cpu-shares": shares,
    "cpu-cluster": cluster,
    "cpu-flower": flower,
    "cpu-network": network,
    "cpu-idle": idle,
    "cpu-training": training,
    "cpu-inference-32": lambda: inference("3x32x32"),
    "cpu-inference-96": lambda: inference("3x96x96"),
}


# --- results.md, results-more.md, paper-choices.md --------------------------------------------------------


def digits_costs() -> str:
    """Return what each method needs to reach 80 % on the digits, over five seeds."""
    lines = []
    for method in METHODS:
        members = numbered(f"few-labels/{method}-data.labeled-40", 5)
        cost = cost_of(members, 80)
        numbers = (known(cost.rounds), known(cost.bytes, 0, 1e6))
        lines.append((called(method), f"{cost.reached} of 5", *numbers))
    return table(("to 80 % on the digits", "seeds that did", "rounds, mean", "MB, mean"), lines)


def compared() -> str:
    """Return CIFAR-10 after 100 rounds."""
    lines = []
    for method in ("semisfl", "fedswitch-sl", "fedswitch", "supervised", "semifl", "fedmatch"):
        members = [run(f"compare/{method}")]
        cost = cost_of(members, 75)
        reached = f"{known(cost.rounds, 0)}, {known(cost.bytes, 0, 1e9)} GB"
        name = called(method) + (", λ_i = λ_a = 0.1" if method == "fedmatch" else "")
        numbers = (each(accuracies(members)), f"{sent(members)} GB")
        lines.append((name, *numbers, reached if cost.reached else UNKNOWN))
    return table(("method", "accuracy %", "sent", "to 75 %: rounds, sent"), lines)


PAIRS = {
    "CIFAR-10, IID": ("paper/cifar10-iid-semisfl", SEEDS[:1]),
    "CIFAR-10, IID, 250 labels": ("paper/cifar10-250-semisfl", SEEDS[:1]),
    "CIFAR-10": ("paper/cifar10-dir0.1-semisfl", SEEDS[:1]),
    "CIFAR-10, Dirichlet(0.05)": ("paper/cifar10-dir0.05-semisfl", SEEDS[:2]),
    "CIFAR-10, 200 rounds": ("short/cifar10-semisfl", SEEDS),
    "SVHN, IID": ("paper/svhn-iid-semisfl", SEEDS[:1]),
    "SVHN": ("paper/svhn-dir0.1-semisfl", SEEDS[:1]),
    "SVHN, 200 rounds": ("short/svhn-semisfl", SEEDS),
}


def _frozen(name: str) -> Run:
    """Return the run with frozen teachers that belongs to one with averaged ones."""
    if name == "short/svhn-semisfl-seed1":
        return run("variations/svhn-seed1")
    return run(name.replace("short/", "frozen/short-").replace("paper/", "frozen/"))


def pairs() -> str:
    """Return runs with frozen and with averaged teachers of equal seeds, and which are ahead."""
    lines, gains = [], {}
    for title, (name, seeds) in PAIRS.items():
        frozen = accuracies(_frozen(name + seed) for seed in seeds)
        averaged = accuracies(runs(name, seeds))
        gains[title] = [ours - theirs for ours, theirs in zip(averaged, frozen, strict=True)]
        lines.append((title, ", ".join(map(str, range(len(seeds)))), each(frozen), each(averaged)))
    every = [gain for some in gains.values() for gain in some]
    means = {
        data: fmean(
            gain for title, some in gains.items() if title.startswith(data) for gain in some
        )
        for data in ("CIFAR-10", "SVHN")
    }
    ahead, behind = sum(gain > 0 for gain in every), sum(gain < 0 for gain in every)
    listed = ", ".join(f"{mean:+.1f} points on {data}" for data, mean in means.items())
    return (
        f"{table(('', 'seeds', 'frozen', 'averaged'), lines)}\n\n"
        f"The averaged teacher is ahead in {ahead} of {len(every)} pairs and behind in {behind}, by at most "
        f"{-min(every):.2f}. Its mean gain is {listed}."
    )


CHANGES = {
    "nothing": ("default", "compare/semisfl"),
    "`seed=1`": ("seed1", "seed1"),
    "`runtime.precision=tf32`": ("tf32", "tf32"),
    "`runtime.precision=fp32`": ("fp32", None),
    "`semisfl.queue=single` (the published code's)": ("single-queue", "single-queue"),
    "`server.labeled_view`: weak on CIFAR-10, strong on SVHN": ("labels-strong", "labels-weak"),
    "`semisfl.own_key=false`": ("no-own-key", None),
    "`semisfl.server_pass=in_turn`": ("in-turn", None),
    "clients average their teachers (the paper's formula)": ("client-ema", None),
    "`controller.kind=raw` (the paper's formula)": ("controller-raw", None),
    "`controller.kind=fixed`": ("controller-fixed", None),
    "`data.augment.flip=false`": ("no-flip", None),
}


def ablation() -> str:
    """Return SemiSFL's accuracy with one setting changed."""

    def cell(data: str, name: str | None) -> str:
        if name is None:
            return UNKNOWN
        place = name if "/" in name else f"variations/{data}-{name}"
        return each(accuracies([run(place)]))

    lines = [
        (words, cell("svhn", svhn), cell("cifar10", cifar))
        for words, (svhn, cifar) in CHANGES.items()
    ]
    return table(("changed", "SVHN", "CIFAR-10"), lines)


CLUSTERING = {
    "SemiSFL": "semisfl",
    "SemiSFL, always 100 supervised steps": "fixed",
    "SemiSFL without its two contrastive terms": "nocontrast",
    "FedSwitch-SL": "fedswitch-sl",
    "FedSwitch-SL with strong views of labelled images": "slstrong",
    "the same with SemiSFL's supervised steps": "recorded",
}
"""What is compared to isolate clustering regularisation, and how its runs are called."""


def clustering() -> str:
    """Return what clustering regularisation, the controller and the views of labelled images are worth."""

    def cell(paper: str, other: str, name: str) -> str:
        places = [f"paper/cifar10-{paper}-{name}{seed}" for seed in SEEDS]
        places += [f"clustering/cifar10-{other}-{name}-seed{seed}" for seed in range(3)]
        values = accuracies(run(place) for place in places if records.exists(place))
        return f"{spread(values)}{' (1 seed)' * (len(values) == 1)}" if values else UNKNOWN

    lines = [
        (title, cell("iid", "iid", name), cell("dir0.1", "dir", name))
        for title, name in CLUSTERING.items()
    ]
    return table(("CIFAR-10", "IID", "Dirichlet(0.1)"), lines)


def codecs() -> str:
    """Return SemiSFL on CIFAR-10 with each codec."""
    names = {"fp32": "compare/semisfl"} | {
        name: f"codecs/cifar10-{name}" for name in ("fp16", "bf16", "int8")
    }
    lines = [
        (name, each(accuracies([run(place)])), f"{sent([run(place)])} GB")
        for name, place in names.items()
    ]
    return table(("codec", "accuracy %", "sent"), lines)


def weights() -> str:
    """Return what starting from weights is worth, over three seeds."""
    lines = []
    for method, start in product(("semisfl", "supervised"), ("weights", "nothing")):
        members = numbered(f"weights/{method}-{start}", 3)
        words = "90 other classes" if start == "weights" else "random weights"
        spreads = (Spread.of(accuracies(members)), Spread.of(on_test(members)))
        lines.append((called(method), words, *map(str, spreads)))
    return table(("", "starts from", "validation %", "test %"), lines)


# --- performance.md --------------------------------------------------------------------------------------

ROUNDS = {
    "svhn": ("SVHN / CNN, SemiSFL", "0.055"),
    "cifar10": ("CIFAR-10 / AlexNet, SemiSFL", "0.21"),
    "cifar10::fedswitch-sl": ("– FedSwitch-SL", ""),
    "cifar10::supervised": ("– Supervised-only", ""),
    "cifar10::fedswitch": ("– FedSwitch", "0.45"),
    "cifar10::semifl": ("– SemiFL", "0.55"),
    "cifar10::fedmatch": ("– FedMatch", "0.80"),
    "stl10": ("STL-10 / VGG13, SemiSFL", "1.0"),
    "image100": ("IMAGE-100 / VGG16, SemiSFL", "5.0"),
    "cifar10:resnet18": ("CIFAR-10 / ResNet-18, SemiSFL", ""),
    "cifar10:wrn-28-2": ("CIFAR-10 / WRN-28-2, SemiSFL", "25 % of the matrix product"),
}


def gpu_rounds() -> str:
    """Return the newest measurement of each item, and by how much it misses its target."""
    calls = measured("gpu/rounds")["calls"]
    newest = {one["item"]: one for call in calls for one in call["rows"]}
    lines = []
    for item, (title, target) in ROUNDS.items():
        one = newest[item]
        seconds, share = one["seconds_a_round"], one["share_of_matrix_product_percent"]
        misses = ""
        if target:
            wanted = float(target.split()[0])
            far = 1 - share / wanted if "%" in target else seconds / wanted - 1
            misses = "reached" if far <= 0 else f"{far:.0%}"
        numbers = (f"{seconds:.3g}", f"{one['tflops']:.0f}", f"{share:.0f} %")
        more = (f"{one['peak_gib']:.1f}", f"{one['start_up_seconds']:.0f}", target, misses)
        lines.append((title, *numbers, *more))
    head = ("", "s per round", "TFLOP/s", "share of the matrix product", "GPU memory, GiB")
    return table((*head, "start-up, s", "target", "missed by"), lines)


# --- metrics.md ------------------------------------------------------------------------------------------


def metrics_table(metrics: Iterable[Metric]) -> str:
    """Return a table with a line per metric."""
    lines = [
        (
            *(f"`{one.key}`", one.meaning, one.unit, one.missing, one.methods),
            f"`{one.prometheus}`" if one.prometheus else "",
        )
        for one in metrics
    ]
    return table(("key", "what", "unit", "not there", "methods", "Prometheus"), lines)


def metrics_of_section(title: str) -> str:
    metrics = [one for one in declared(RoundMetrics) if one.section == title]
    return metrics_table(sorted(metrics, key=lambda one: one.key != "round"))


SECTIONS = ("Training", "Losses", "Pseudo-labels", "Test", "Cost")


TABLES: dict[str, Callable[[], str]] = {
    **frontier.TABLES,
    **CPU_TABLES,
    **own_images.TABLES,
    **photos.TABLES,
    **attacks.TABLES,
    "digits-costs": digits_costs,
    "compared": compared,
    "pairs": pairs,
    "ablation": ablation,
    "clustering": clustering,
    "codecs": codecs,
    "weights": weights,
    "gpu-rounds": gpu_rounds,
    **{f"metrics-{title.lower()}": partial(metrics_of_section, title) for title in SECTIONS},
}
