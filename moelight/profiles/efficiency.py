"""Measured speeds by size of the work, as interpolated curves; the caller defines the units of the axes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """``y`` at each ``x``, both above 0, ``x`` ascending; linear on log-log axes, constant beyond the ends."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    @overload
    def at(self, x: float) -> float: ...
    @overload
    def at(self, x: Array) -> Array: ...
    def at(self, x: Any) -> Any:
        """``y`` at ``x``, a number or an array."""
        values = np.exp(np.interp(np.log(np.maximum(x, 1e-9)), np.log(self.x), np.log(self.y)))
        return values if isinstance(x, np.ndarray) else float(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Surface:
    """Curves measured at several sizes of one operand, interpolated on a logarithmic scale of size, constant beyond.

    A single curve has size 0.
    """

    name: str
    sizes: tuple[float, ...]
    curves: tuple[Curve, ...]

    @overload
    def at(self, x: float, size: float = 0.0) -> float: ...
    @overload
    def at(self, x: Array, size: float = 0.0) -> Array: ...
    def at(self, x: Any, size: float = 0.0) -> Any:
        above = bisect_left(self.sizes, size)
        if above in (0, len(self.sizes)):
            return self.curves[max(0, above - 1)].at(x)
        low, high = self.sizes[above - 1], self.sizes[above]
        share = float(np.log(size / low) / np.log(high / low))
        return self.curves[above - 1].at(x) ** (1 - share) * self.curves[above].at(x) ** share

    def times(self, factor: float) -> Surface:
        curves = (replace(curve, y=tuple(y * factor for y in curve.y)) for curve in self.curves)
        return replace(self, curves=tuple(curves))
