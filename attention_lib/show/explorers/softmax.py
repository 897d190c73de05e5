"""Online softmax on a row that you set: m, l and every rescale, and what comes without it."""

import math

import numpy as np

from attention_lib import online, softmax
from attention_lib.show.explorers.chart import WIDTH, Axis
from attention_lib.show.svg import line, path, picture, rect, text
from attention_lib.show.widgets import Control, Picture

KEYS = 8
ROWS = {  # what the web edition offers in place of eight sliders
    "rising": (-2.0, -1.0, 0.0, 0.5, 1.0, 2.0, 3.0, 4.0),
    "falling": (4.0, 3.0, 2.0, 1.0, 0.5, 0.0, -1.0, -2.0),
    "all equal": (1.0,) * KEYS,
    "one large, in the middle": (0.0, 0.5, -1.0, 0.0, 5.0, -0.5, 0.0, 1.0),
}
SCORES = tuple(k / 2 for k in range(-12, 13))
START = (1.0, 0.5, 2.0, -1.0, 4.0, 3.0, 0.0, -2.0)
CONTROLS = (
    Control("chunk", "Keys in a chunk", (1, 2, 4, 8), 2),
    Control("rescale", "Rescale", (True, False), True),
    *(Control(f"x{k}", f"Score {k}", SCORES, START[k]) for k in range(KEYS)),
)


def steps(scores, chunk, rescale):
    """The states after each chunk, from `online.update`; V is the identity, so O holds weights.

    Without the rescale the old m counts as the new one, so that the factor is 1.
    """
    S, V = np.array([scores]), np.eye(len(scores))
    states = [online.start(1, len(scores))]
    for k in range(0, len(scores), chunk):
        part = S[:, k : k + chunk]
        state = states[-1]
        if not rescale:
            state = state._replace(m=np.maximum(state.m, part.max(axis=1)))
        states.append(online.update(state, part, V[k : k + chunk]))
    return states


def draw(chunk, rescale, **scores):
    """The picture. chunk: 1, 2, 4 or 8. rescale: bool. x0 to x7: the scores."""
    row = tuple(scores[f"x{k}"] for k in range(KEYS))
    return draw_row(row, chunk, rescale)


def draw_row(row, chunk, rescale):
    """As draw, with the eight scores as one tuple."""
    states = steps(row, chunk, rescale)
    weights = online.finish(states[-1])[0][0]
    right = softmax(np.array(row))
    error = float(np.abs(weights - right).max())
    left, wide = 150, 72
    high, low = Axis(-6.5, 6.5, 180, 40, log=False), Axis(0, 1, 440, 330, log=False)
    parts = [
        text(14, 24, "Scores", 15, bold=True),
        text(14, 44, "m: the bold line", 12),
        *(
            text(14, 216 + 22 * k, words, 13)
            for k, words in enumerate(("old l and O", "new m", "new l"))
        ),
        text(14, 316, "Weights", 15, bold=True),
        rect(14, 330, 12, 12, "q_outer", "ink", 0.8),
        text(32, 341, "softmax(x)", 12),
        rect(14, 350, 12, 12, "flash", "ink", 0.8, "//"),
        text(32, 361, "from m, l, O", 12),
        line(left, high(0), left + KEYS * wide, high(0), "edge", 1),
        line(left, low(0), left + KEYS * wide, low(0), "ink", 1.2),
    ]
    for k, score in enumerate(row):
        x, y = left + k * wide, high(score)
        parts += [
            rect(x + 20, min(y, high(0)), 32, abs(y - high(0)), "hbm", "ink", 0.8),
            text(x + 36, 196, f"x{k} = {score:g}", 12, anchor="middle"),
            rect(x + 14, low(right[k]), 20, low(0) - low(right[k]), "q_outer", "ink", 0.8),
            rect(x + 38, low(weights[k]), 20, low(0) - low(weights[k]), "flash", "ink", 0.8, "//"),
            text(x + 36, low(max(right[k], weights[k])) - 5, f"{weights[k]:.3f}", 12,
                 anchor="middle"),
            text(x + 36, 457, f"x{k}", 12, anchor="middle"),
        ]  # fmt: skip
    said = []
    for n, (old, new) in enumerate(zip(states, states[1:], strict=False)):
        x = left + n * chunk * wide
        parts.append(line(x, 30, x, 445, "edge", 1, "4 4"))
        m, l = float(new.m[0]), float(new.l[0])
        factor = math.exp(float(old.m[0]) - m) if rescale else 1.0
        said.append(f"{factor:.3g}")
        end = x + chunk * wide
        parts += [
            path([(x, high(m)), (end, high(m))], "ink", 3),
            text(x + 6, 216, f"× {factor:.3g}", 13),
            text(x + 6, 238, f"{m:g}", 13),
            text(x + 6, 260, f"{l:.4g}", 13),
        ]
    parts.append(line(left + KEYS * wide, 30, left + KEYS * wide, 445, "edge", 1, "4 4"))
    verdict = (
        "The weights equal softmax(x)."
        if error < 1e-12
        else f"Wrong: a weight is off by {error:.3f}."
    )
    parts.append(text(left, 288, verdict, 15, bold=True))
    last = states[-1]
    alt = (
        f"Online softmax over 8 scores in chunks of {chunk}, rescale {'on' if rescale else 'off'}. "
        f"What was there is multiplied by {', '.join(said)}. "
        f"At the end m = {float(last.m[0]):g}, l = {float(last.l[0]):.4g}. {verdict}"
    )
    title = "Online softmax on one row"
    return Picture(picture(parts, alt, WIDTH, 468, title), alt)


def frames():
    """Four rows, three chunks, with and without the rescale."""
    return [
        ({"Row": name, "Keys in a chunk": chunk, "Rescale": on}, *draw_row(row, chunk, on))
        for name, row in ROWS.items()
        for chunk in (2, 4, 8)
        for on in (True, False)
    ]
