"""The rows of a comparison with the reference library, as every family's `verify` gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One quantity of one case, compared with the reference. `ok` is False for a difference that is not finite."""

    case: str
    quantity: str
    difference: float
    tolerance: float
    ok: bool

    @classmethod
    def judge(cls, case: str, quantity: str, difference: float, tolerance: float) -> Self:
        """A row whose `ok` says that the difference is within the tolerance."""
        # NaN compares false with everything, so it can never pass.
        return cls(case, quantity, difference, tolerance, ok=0.0 <= difference <= tolerance)

    def judged_by(self, tolerance: float) -> VerifyRow:
        """The same comparison under another tolerance."""
        return VerifyRow.judge(self.case, self.quantity, self.difference, tolerance)
