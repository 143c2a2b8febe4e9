"""Published prices of a chip-hour, and the caps of a launch that follow from them."""

from collections.abc import Mapping
from dataclasses import dataclass

from tomat.base.errors import TomatError
from tomat.hardware.chips import Slice

READ_ON = "2026-11-27"
# Source: skypilot-org/skypilot-catalog, catalogs/v8/gcp/vms.csv at 006059e0, which is from Google's price list. Prices
# are those of whole slices divided by their chips. Google's page is https://cloud.google.com/tpu/pricing.

CHIP_HOUR_USD: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "v6e": {
        "asia-northeast1": (3.24, 0.94352),
        "asia-south1": (3.24, 2.27),
        "asia-southeast1": (2.97, 0.36292),
        "europe-west4": (2.97, 1.03748),
        "us-central1": (2.7, 0.54421),
        "us-east1": (2.7, 0.54421),
        "us-east4": (2.7, 0.57766),
        "us-east5": (2.7, 1.215),
        "us-south1": (2.7, 1.35),
        "us-west1": (2.7, 0.54421),
    },
    "v5p": {
        "europe-west1": (4.45946, 1.78378),
        "europe-west4": (4.2525, 1.34849),
        "us-central1": (4.2, 0.8357),
        "us-east1": (4.2, 0.8357),
        "us-east5": (4.2, 1.68),
        "us-south1": (4.779, 1.31614),
    },
    "v5e": {
        "asia-east1": (1.38948, 0.55579),
        "asia-northeast1": (1.54104, 0.4244),
        "asia-southeast1": (1.56, 0.78),
        "europe-north1": (1.32132, 0.66066),
        "europe-west1": (1.32132, 0.52853),
        "europe-west3": (1.416, 0.38997),
        "europe-west4": (1.56, 0.44498),
        "northamerica-northeast1": (1.32132, 0.36389),
        "southamerica-west1": (1.716, 0.47259),
        "us-central1": (1.2, 0.24493),
        "us-east1": (1.2, 0.24493),
        "us-east4": (1.2, 0.6),
        "us-east5": (1.2, 0.6),
        "us-south1": (1.416, 0.5664),
        "us-west1": (1.2, 0.24493),
        "us-west4": (1.2, 0.48),
    },
}
"""Chip -> region -> US dollars for an hour of one chip, (on demand, spot). Spot prices change up to once a day
(https://cloud.google.com/spot-vms/pricing). Prices under a contract differ."""

MARGIN_SECONDS = 180.0
"""Time before a cap for stopping the training in good order and giving the slice back."""


@dataclass(frozen=True)
class Caps:
    """Limits that end a launch, however far the training is. Only time with a slice counts."""

    price: float | None
    """US dollars for a chip-hour; None: not known."""
    price_is: str
    max_hours: float | None = None
    max_cost: float | None = None
    """US dollars, for the chips alone."""

    def hours(self, tpu_slice: Slice) -> float | None:
        """Hours with a slice that both caps allow; None without a cap."""
        by_cost = None
        if self.max_cost is not None and self.price is not None:
            by_cost = self.max_cost / (self.price * tpu_slice.n_chips)
        return min((hours for hours in (self.max_hours, by_cost) if hours is not None), default=None)

    def cost(self, tpu_slice: Slice, hours: float) -> float | None:
        return None if self.price is None else self.price * tpu_slice.n_chips * hours

    def words(self, tpu_slice: Slice) -> str:
        said = f"{tpu_slice.n_chips} chips, price not known ({self.price_is})"
        if self.price is not None:
            hourly = self.price * tpu_slice.n_chips
            said = f"{tpu_slice.n_chips} chips x ${self.price:.3f} = ${hourly:.2f} an hour ({self.price_is})"
        hours = self.hours(tpu_slice)
        if hours is None:
            return f"{said}; no cap: --max_hours and --max_cost set one"
        cost = self.cost(tpu_slice, hours)
        return f"{said}; at most {hours:.2f} h with a slice" + (f", ${cost:.2f}" if cost is not None else "")


def caps_of(
    tpu_slice: Slice,
    zone: str,
    *,
    spot: bool = False,
    max_hours: float | None = None,
    max_cost: float | None = None,
    price: float | None = None,
) -> Caps:
    """The caps of a launch. `price` is the user's own, of a chip-hour. A cap on cost needs a known price."""
    price_is = "as given"
    if price is None:
        found = CHIP_HOUR_USD.get(tpu_slice.chip.name, {}).get(zone.rpartition("-")[0])
        kind = "spot" if spot else "on demand"
        if found is not None:
            price, price_is = found[1 if spot else 0], f"{kind}, read {READ_ON}; yours: --chip_hour_price"
        else:
            price_is = f"no {kind} price of {tpu_slice.chip.name} in {zone}; yours: --chip_hour_price"
    if max_cost is not None and price is None:
        said = f"--max_cost needs a price, and tomat knows none of {tpu_slice.chip.name} in {zone}"
        raise TomatError(f"{said}; give --chip_hour_price, in US dollars (https://cloud.google.com/tpu/pricing).")
    caps = Caps(price, price_is, max_hours, max_cost)
    hours = caps.hours(tpu_slice)
    if hours is not None and hours * 3600 <= 2 * MARGIN_SECONDS:
        raise TomatError(
            f"the caps leave {hours * 60:.1f} minutes with a slice, and stopping and giving it back takes "
            f"{MARGIN_SECONDS / 60:.0f} of them; raise --max_hours or --max_cost."
        )
    return caps
