"""Do two trainings agree? From the recording of attention_lib.gpu.train: no GPU, no torch."""

import numpy as np


def smooth(losses, width=20):
    """The mean of each `width` losses in a row: 1 - width + len(losses) numbers."""
    return np.convolve(losses, np.ones(width) / width, "valid")


def apart(rows, a, b, seed=0):
    """The largest difference between the smoothed losses of two attentions, from the same start."""
    curve = {r["attention"]: smooth(r["losses"]) for r in rows if r["seed"] == seed}
    return float(np.abs(curve[a] - curve[b]).max())


def noise(rows, seed=0):
    """The largest difference between any two of the framework's own backends: rounding alone."""
    theirs = sorted({r["attention"] for r in rows if r["seed"] == seed} - {"ours"})
    return max(apart(rows, a, b, seed) for a in theirs for b in theirs if a < b)
