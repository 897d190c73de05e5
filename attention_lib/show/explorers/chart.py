"""Axes, marks and rows of a chart, as parts for attention_lib.show.svg."""

import math
from typing import NamedTuple

from attention_lib.show.svg import circle, line, path, rect, text

WIDTH = 760  # of every explorer
SHAPES = ("square", "circle", "triangle", "diamond")


class Axis(NamedTuple):
    """Maps numbers from low to high onto pixels from start to stop, by their logarithm or not."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = True

    def __call__(self, x):
        """The pixel of x. ValueError for a number that is not on the axis."""
        if not self.low <= x <= self.high:
            raise ValueError(f"x is {x!r}; accepted: {self.low} to {self.high}, the axis")
        scale = math.log if self.log else float
        share = (scale(x) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return self.start + share * (self.stop - self.start)

    def powers(self, base, most=9):
        """The powers of base on the axis, thinned out to at most `most`."""
        first = math.ceil(math.log(self.low, base) - 1e-9)
        last = math.floor(math.log(self.high, base) + 1e-9)
        step = -(-(last - first + 1) // most)
        return [base**k for k in range(first, last + 1, step)]


def mark(shape, x, y, colour, size=7, edge="ink", width=1.2):
    """A point: one of SHAPES, about 2 * size wide."""
    if shape == "circle":
        return circle(x, y, size, colour, edge, width)
    if shape == "square":
        return rect(x - size, y - size, 2 * size, 2 * size, colour, edge, width)
    corners = {
        "triangle": [(0, -1.2), (1.15, 0.9), (-1.15, 0.9)],
        "diamond": [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)],
    }[shape]
    points = [(x + size * dx, y + size * dy) for dx, dy in corners]
    return path(points, edge, width, colour, close=True)


def rows(entries, axis, top, height=30, label=130):
    """One row for each (label, value, words, colour, shape, chosen): a stalk and a point.

    label: pixels left of the axis for the labels. The words stand right of the point.
    """
    parts = []
    for k, (name, value, said, colour, shape, chosen) in enumerate(entries):
        y, x = top + k * height, axis(value)
        if chosen:
            parts.append(
                rect(axis.start - label, y - height / 2 + 1, axis.stop - axis.start + label + 110,
                     height - 2, "faint", "edge", 0.8)
            )  # fmt: skip
        parts += [
            text(axis.start - label + 8, y + 5, name, 13, bold=chosen),
            line(axis.start, y, x, y, "edge", 3 if chosen else 1.5),
            mark(shape, x, y, colour, 7 if chosen else 6),
            text(x + 14, y + 5, said, 13, bold=chosen),
        ]
    return parts


def ticks_below(axis, values, y, top, said=str):
    """Grid lines from top to y, with their values below."""
    parts = [line(axis(v), top, axis(v), y, "edge", 0.5, "2 4") for v in values]
    parts += [text(axis(v), y + 16, said(v), 12, anchor="middle") for v in values]
    return [*parts, line(axis.start, y, axis.stop, y, "ink", 1.2)]


def ticks_left(axis, values, x, right, said=str):
    """Grid lines from x to right, with their values on the left."""
    parts = [line(x, axis(v), right, axis(v), "edge", 0.5, "2 4") for v in values]
    parts += [text(x - 6, axis(v) + 4, said(v), 12, anchor="end") for v in values]
    return [*parts, line(x, axis.start, x, axis.stop, "ink", 1.2)]


def short(x):
    """A number to four digits, and all digits before the point: 0.01234, 56.78, 12,345."""
    return f"{x:,.0f}" if abs(x) >= 999.95 else f"{x:.4g}"


def amount(size):
    """Bytes as KiB, MiB, GiB or TiB, to three digits."""
    units = ["KiB", "MiB", "GiB", "TiB"]
    size /= 1024
    while size >= 999.5 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.3g} {units[0]}" if size < 999.5 else f"{size:,.0f} {units[0]}"
