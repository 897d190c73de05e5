"""The ladder of kernels: recorded speeds of every rung, beside the framework's backends."""

from functools import cache

from attention_lib.gpu import bench, recordings
from attention_lib.gpu.ladder import LADDER
from attention_lib.show.explorers.chart import WIDTH, Axis, rows, short, ticks_below
from attention_lib.show.svg import picture, text
from attention_lib.show.widgets import Control, Picture, frames_of

BACKENDS = {"flash": "torch: FLASH", "cudnn": "torch: cuDNN", "efficient": "torch: EFFICIENT",
            "math": "torch: MATH"}  # fmt: skip
RUNGS = {rung.name: rung.idea for rung in LADDER}
CONTROLS = (
    Control("rung", "Rung", tuple(RUNGS), "pipeline"),
    Control("N", "N", bench.SIZES, 16_384),
    Control("d", "d", bench.HEADS_D, 128),
    Control("causal", "Causal", (True, False), False),
)


@cache
def recorded():
    """The recording, and its float16 rows by (kernel, d, N, causal)."""
    record = recordings.read("bench")
    rows_ = [row for row in record["rows"] if row["dtype"] == "float16"]
    return record, {(r["kernel"], r["d"], r["N"], r["causal"]): r for r in rows_}


def draw(rung, N, d, causal):
    """The picture. rung: a name of the ladder, which the others are compared with."""
    record, speed = recorded()
    mine = speed[rung, d, N, causal]
    X = Axis(0.1, 2000, 190, 630)
    entries = [
        (f"{k} {name}", value := speed[name, d, N, causal]["tflops"], short(value),
         "flash", "circle", name == rung)
        for k, name in enumerate(RUNGS)
    ]  # fmt: skip
    entries += [
        (label, mine[key], short(mine[key]), "standard", "square", False)
        for key, label in BACKENDS.items()
        if mine[key]  # None where a backend refused the shape
    ]
    last = 56 + 30 * len(entries)
    mask = "causal" if causal else "no mask"
    place = f"N = {N:,}, d = {d}, {mask}, float16"
    parts = [
        text(14, 24, f"TFLOP/s: {place}", 15, bold=True),
        *ticks_below(X, X.powers(10), last, 38, said=lambda v: f"{v:g}"),
        *rows(entries, X, 56, 30, 178),
        text(410, last + 34, "TFLOP/s, log scale", 12, anchor="middle"),
        text(14, last + 60, f"{rung}: {RUNGS[rung]}", 14, bold=True),
        text(14, last + 82, f"{_times(mine, 'flash')}. Recorded on one {record['device']}, "
             f"{record['date']}, torch {record['torch']}.", 12.5),
    ]  # fmt: skip
    alt = (
        f"Recorded speeds at {place}, in TFLOP/s: "
        + ", ".join(f"{name} {said}" for name, _, said, *_ in entries)
        + f". {rung}: {_times(mine, 'flash')}. One {record['device']}, {record['date']}."
    )
    return Picture(picture(parts, alt, WIDTH, last + 98, f"The ladder at {place}"), alt)


def _times(row, backend):
    """The rung's speed as a multiple of a backend's, in words."""
    if not row[backend]:
        return f"{BACKENDS[backend]} did not run"
    return f"{row['tflops'] / row[backend]:.3g} times {BACKENDS[backend]}"


def frames():
    """Each rung at each d, N = 4096 and 16,384."""
    grid = dict(rung=tuple(RUNGS)[::-1], N=bench.SIZES[1:], d=bench.HEADS_D)
    return frames_of(draw, CONTROLS, **grid)
