"""`semisfl bench`: seconds per round by preset and method, and how they grow with the clients."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from semisfl.costs.timed_rounds import ALL_CONTRIBUTE, Timed, matrix_product, settings, shares
from semisfl.settings.catalog import DATA, METHODS
from semisfl.settings.config import Config

# On a CPU a round at the paper's settings takes half a minute.
FEWER_STEPS = {"svhn": ("clients.steps=5", "server.steps=10")}
# Client steps of the two short rounds from which a CPU's whole rounds are extrapolated.
SHORT, LONGER = 1, 4
MOST_IMAGES = 50_000
ON_GPU, ON_CPU = ("cifar10", "svhn", "stl10", "image100"), ("digits", "svhn")


def rounds_of_methods(
    device: str, names: Sequence[str], counted: int, quick: bool, product: float
) -> list[dict[str, Any]]:
    """Time every method with every preset; ``product`` is the speed of `matrix_product`."""
    rows = []
    for preset in names:
        known = DATA[preset]
        for method in METHODS if not quick else ("semisfl", "supervised"):
            fewer = () if device.startswith("cuda") else FEWER_STEPS.get(preset, ())
            options = settings(
                preset, f"method={method}", "server.pretrain_rounds=0", *ALL_CONTRIBUTE, *fewer
            )
            timed = Timed(options, known.shape, device, _images(preset), known.classes)
            measured = timed.measured(counted)
            row = {"preset": preset, "method": method, "steps": options.clients.steps, **measured}
            row["share_of_matrix_product_percent"] = 100 * row["tflops"] / product
            if method == "semisfl":
                row["shares_percent"] = shares(timed.kernels())
            rows.append(row)
            del timed
    return rows


def _images(preset: str) -> int:
    return min(DATA[preset].images or MOST_IMAGES, MOST_IMAGES)


def seconds_per_round(preset: str, method: str, device: str) -> float:
    """Return the seconds of a preset's round. A CPU takes minutes for one: extrapolate from short rounds."""
    base = preset.split("+")[0]
    config = settings(preset, f"method={method}", *ALL_CONTRIBUTE)

    def measured(options: Config, counted: int) -> float:
        known = DATA[base]
        timed = Timed(options, known.shape, device, _images(base), known.classes)
        return median(timed.rounds(counted))

    steps, supervised = config.clients.steps, config.server.steps
    if device.startswith("cuda") or steps <= LONGER:
        return measured(config, 3)
    few, more = (
        measured(
            settings(
                preset,
                *(f"method={method}", *ALL_CONTRIBUTE, f"clients.steps={count}"),
                f"server.steps={max(1, supervised * count // steps)}",
            ),
            1,
        )
        for count in (SHORT, LONGER)
    )
    return extrapolated((SHORT, few), (LONGER, more), steps)


def extrapolated(few: tuple[int, float], more: tuple[int, float], steps: int) -> float:
    """Return the seconds of a round with ``steps`` on the line through two shorter rounds; it never falls."""
    slope = max(0.0, (more[1] - few[1]) / (more[0] - few[0]))
    return more[1] + slope * (steps - more[0])


def growth(device: str) -> list[dict[str, Any]]:
    """Return a GPU's memory for cifar10 by the total number of clients, and its time by that of active ones."""
    rows = []
    for total, active in ((10, 10), (100, 10), (1000, 10), (100, 20), (100, 40), (100, 80)):
        timed = Timed(
            settings("cifar10", f"clients.total={total}", f"clients.active={active}"),
            DATA["cifar10"].shape,
            device,
        )
        seconds = median(timed.rounds(3))
        numbers = {"seconds_a_round": seconds, "peak_gib": timed.peak_gib}
        rows.append({"clients": total, "active": active, **numbers})
        del timed
    return rows


def timings(
    device: str = "auto", quick: bool = False, presets: Sequence[str] = ()
) -> dict[str, Any]:
    """Return all timings; ``quick`` leaves out the baselines and the growth with the clients."""
    from semisfl.engine.hardware import Hardware
    from semisfl.runs.environment import environment

    chosen = Hardware(device).device
    cuda = chosen.type == "cuda"
    names = presets or (ON_GPU if cuda else ON_CPU)
    counted, product = 5 if cuda else 3, matrix_product(chosen)
    result: dict[str, Any] = {
        "environment": environment(str(chosen)),
        "matrix_product_tflops": product,
        "rounds": rounds_of_methods(str(chosen), names, counted, quick, product),
    }
    if cuda and not quick and not presets:
        result["growth"] = growth(str(chosen))
    return result
