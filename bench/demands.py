"""Figures with the bounds that they must keep. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from proof.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    what: str
    found: str
    bound: str
    holds: bool

    def told(self) -> dict[str, object]:
        return {"what": self.what, "found": self.found, "must_be": self.bound, "holds": self.holds}


def at_most(what: str, found: float, bound: float, unit: str = "") -> Demand:
    """A `found` of NaN means that nothing was measured. In that case the demand does not hold."""
    unit = f" {unit}" if unit else ""
    text = "never" if math.isinf(found) else "not measured" if math.isnan(found) else f"{found:,.2f}{unit}"
    return Demand(what=what, found=text, bound=f"≤ {bound:g}{unit}", holds=found <= bound)


def none_of(what: str, count: int) -> Demand:
    return Demand(what=what, found=f"{count:,}", bound="0", holds=count == 0)


def table(title: str, demands: Sequence[Demand], note: str = "") -> Table:
    return Table(
        title=title,
        head=("", "found", "must be", "holds"),
        rows=[(one.what, one.found, one.bound, "yes" if one.holds else "**no**") for one in demands],
        note=note,
    )
