"""Notebook 24: do two trainings agree? From recordings, or small enough for a CPU: no torch."""

import ast
import itertools
from importlib import resources

import numpy as np

from attention_lib.inputs import check_positive_int
from attention_lib.show.style import COLOURS, new_figure
from attention_lib.tiled import flash_attention_q_outer


def smooth(losses, width=20):
    """The mean of each `width` losses in a row: 1 - width + len(losses) numbers."""
    return np.convolve(losses, np.ones(width) / width, "valid")


def distances(rows, a, b, seed=0):
    """How far runs of attentions a and b are apart, from the same start: a list, a number a pair.

    rows: those of the recording "train". A number is the largest difference between two curves of
    smoothed losses, in nats. a == b: each pair of different runs, once.
    """
    if a == b:
        pairs = itertools.combinations(_curves(rows, a, seed), 2)
    else:
        pairs = itertools.product(_curves(rows, a, seed), _curves(rows, b, seed))
    return [float(np.abs(x - y).max()) for x, y in pairs]


def kinds(rows, seed=0):
    """The distances from one start by kind of pair: name of the kind -> list of numbers in nats.

    Torch's attentions are all but "ours". Each pair of runs is in one kind.
    """
    theirs = sorted({r["attention"] for r in rows if r["seed"] == seed} - {"ours"})
    pairs = {
        "ours, twice": [("ours", "ours")],
        "one of torch's, twice": [(a, a) for a in theirs],
        "two of torch's": itertools.combinations(theirs, 2),
        "ours and one of torch's": [("ours", a) for a in theirs],
    }
    return {
        kind: [x for a, b in some for x in distances(rows, a, b, seed)]
        for kind, some in pairs.items()
    }


def noise(rows, seed=0):
    """The largest distance between two runs of torch's, the same backend twice included: nats."""
    found = kinds(rows, seed)
    return max(found["one of torch's, twice"] + found["two of torch's"])


def between_starts(rows, attention="flash"):
    """The least distance between a run from seed 0 and one from seed 1, in nats."""
    starts = [_curves(rows, attention, seed) for seed in (0, 1)]
    return min(float(np.abs(x - y).max()) for x, y in itertools.product(*starts))


def _curves(rows, attention, seed):
    return [smooth(r["losses"]) for r in rows if (r["attention"], r["seed"]) == (attention, seed)]


def show_part(file, name, after=None):
    """Print a class or function of attention_lib/gpu/<file>.py, which needs torch to be imported.

    Without its docstring. after: text of a line to begin at, or None.
    Raises ValueError for a name, or text, that is not there.
    """
    text = (resources.files("attention_lib.gpu") / f"{file}.py").read_text(encoding="utf-8")
    found = {x.name: x for x in ast.parse(text).body if hasattr(x, "name")}
    if name not in found:
        raise ValueError(f"name is {name!r}; accepted: {', '.join(found)}")
    node, lines = found[name], text.splitlines()
    first = node.body[0]
    skip = range(0)
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        skip = range(first.lineno, first.end_lineno + 1)
    part = [lines[n - 1] for n in range(node.lineno, node.end_lineno + 1) if n not in skip]
    start = 0 if after is None else next((n for n, x in enumerate(part) if after in x), None)
    if start is None:
        raise ValueError(f"after is {after!r}; accepted: text of a line of {name}")
    print("\n".join(part[start:]).rstrip())


# ---------------------------------------------------------------- a training for a CPU

N, WIDTH, LETTERS, BATCH, BACK = 24, 16, 8, 8, 3


class Tiny:
    """One layer of attention that learns to name the letter BACK places before, in numpy.

    Everything but the attention is a linear map. weights: name -> array, of this dtype. The same
    seed gives the same weights and the same batches.
    """

    def __init__(self, dtype=np.float32, seed=0):
        self.random = np.random.default_rng(seed)
        shapes = {"letter": (LETTERS, WIDTH), "place": (N, WIDTH), "out": (WIDTH, LETTERS)}
        shapes |= dict.fromkeys(("Q", "K", "V"), (WIDTH, WIDTH))
        self.weights = {
            name: (0.5 * self.random.standard_normal(shape)).astype(dtype)
            for name, shape in shapes.items()
        }
        self.moments = {name: [0 * w, 0 * w] for name, w in self.weights.items()}
        self.steps = 0

    def draw(self):
        """A batch: (BATCH, N) letters as integers."""
        return self.random.integers(LETTERS, size=(BATCH, N))

    def forward(self, tokens):
        w = self.weights
        x = w["letter"][tokens] + w["place"]
        Q, K, V = (x @ w[name] for name in "QKV")
        O, L = flash_attention_q_outer(Q, K, V, 8, 8, causal=True)
        scores = (O @ w["out"])[:, BACK:]
        scores = scores - scores.max(axis=-1, keepdims=True)
        logs = scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
        return x, Q, K, V, O, L, logs

    def gradients(self, tokens, backward):
        """The loss, mean of -log(probability of the right letter), and {name: gradient}.

        backward(Q, K, V, O, L, dO, Br, Bc, causal=True) -> dQ, dK, dV.
        """
        x, Q, K, V, O, L, logs = self.forward(tokens)
        w, letter = self.weights, np.eye(LETTERS, dtype=x.dtype)[tokens]
        right, count = letter[:, :-BACK], BATCH * (N - BACK)
        loss = -(logs * right).sum() / count
        dscores = np.zeros((BATCH, N, LETTERS), x.dtype)
        dscores[:, BACK:] = (np.exp(logs) - right) / count
        dO = dscores @ w["out"].T
        parts = dict(zip("QKV", backward(Q, K, V, O, L, dO, 8, 8, causal=True), strict=True))
        gradient = {name: np.einsum("bni,bnj->ij", x, part) for name, part in parts.items()}
        dx = sum(part @ w[name].T for name, part in parts.items())
        gradient["out"] = np.einsum("bni,bnj->ij", O, dscores)
        gradient["place"] = dx.sum(axis=0)
        gradient["letter"] = np.einsum("bnl,bni->li", letter, dx)
        return float(loss), gradient

    def step(self, gradient, rate=0.02):
        """Adam, with its usual constants."""
        self.steps += 1
        for name, g in gradient.items():
            m, v = self.moments[name]
            m += 0.1 * (g - m)
            v += 0.001 * (g * g - v)
            size = np.sqrt(v / (1 - 0.999**self.steps)) + 1e-8
            self.weights[name] -= rate * m / (1 - 0.9**self.steps) / size


def train_tiny(backward, steps=150, dtype=np.float32, seed=0):
    """Train a new Tiny with this backward pass; the losses, one a step. Seconds on a CPU."""
    check_positive_int("steps", steps)
    model, losses = Tiny(dtype, seed), []
    for _ in range(steps):
        loss, gradient = model.gradients(model.draw(), backward)
        model.step(gradient)
        losses.append(loss)
    return losses


# ---------------------------------------------------------------- pictures

STYLES = (
    (COLOURS["flash"], "-", "o"),
    (COLOURS["standard"], "--", "s"),
    (COLOURS["q_outer"], ":", "^"),
    (COLOURS["hbm"], "-.", "D"),
    (COLOURS["quiet"], "-", "v"),
)


def draw_losses(curves, width=20, lines=()):
    """Smoothed losses against the step. curves: label -> losses; lines: (label, loss) levels."""
    fig, ax = new_figure(8.4, 3.9)
    for k, (label, losses) in enumerate(curves.items()):
        colour, style, marker = STYLES[k % len(STYLES)]
        y = smooth(losses, width)
        steps = np.arange(width, width + len(y))
        ax.plot(steps, y, style, color=colour, marker=marker, markevery=(5 * k, 40), markersize=6,
                label=label, alpha=0.9)  # fmt: skip
    for label, level in lines:
        ax.axhline(level, color=COLOURS["limit"], linestyle=(0, (1, 3)), linewidth=1.2)
        ax.annotate(label, (1, level), xycoords=("axes fraction", "data"), xytext=(0, 3),
                    textcoords="offset points", ha="right", va="bottom", fontsize=9.5)  # fmt: skip
    ax.set(xlabel="step", ylabel=f"loss, mean of {width} steps" if width > 1 else "loss")
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


def draw_apart(differences, limit, label="noise", first=1, style=0):
    """How far curves are from one of them, on a log axis, and a line for what is noise.

    differences: label -> one number a step, 0 or more; first: the step of the first. style: where
    in STYLES to begin, so that a curve looks the same in two pictures.
    """
    fig, ax = new_figure(8.4, 3.9)
    for k, (name, values) in enumerate(differences.items(), style):
        colour, dashes, marker = STYLES[k % len(STYLES)]
        y = np.where(np.asarray(values) > 0, values, np.nan)  # a log axis has no zero
        ax.plot(range(first, first + len(y)), y, dashes, color=colour, marker=marker, markersize=6,
                markevery=(5 * k, 40), label=name, alpha=0.9)  # fmt: skip
    ax.axhline(limit, color=COLOURS["limit"], linewidth=1.2)
    ax.annotate(label, (0, limit), xycoords=("axes fraction", "data"), xytext=(6, 4),
                textcoords="offset points", fontsize=10)  # fmt: skip
    ax.set_yscale("log")
    ax.set(xlabel="step", ylabel="difference of the loss")
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


def draw_distances(starts, level, label):
    """A dot for each pair of runs, on a log axis, a row for each kind; a bar at each median.

    starts: title -> kinds(...), a panel each. level, label: a line to compare with, in nats.
    """
    fig, axes = new_figure(9.4, 3.4, ncols=len(starts), sharey=True, squeeze=False)
    for ax, (title, found) in zip(axes[0], starts.items(), strict=True):
        for y, values in enumerate(found.values()):
            colour, _, marker = STYLES[y % len(STYLES)]
            up = y + 0.22 * np.sin(2.4 * np.arange(len(values)))  # beside one another
            ax.plot(values, up, marker, color=colour, markersize=4.5, alpha=0.6)
            ax.plot([np.median(values)] * 2, [y - 0.36, y + 0.36], color=COLOURS["limit"])
        ax.axvline(level, color=COLOURS["limit"], linestyle=(0, (1, 3)), linewidth=1.2)
        ax.annotate(label, (level, 1), xycoords=("data", "axes fraction"), xytext=(-4, -2),
                    textcoords="offset points", ha="right", va="top", fontsize=9.5)  # fmt: skip
        ax.set_xscale("log")
        ax.set(xlabel="distance of two loss curves", xlim=(4e-5, 0.1))
        ax.set_yticks(range(len(found)), found)
        ax.set_title(title, fontsize=11)
    axes[0][0].invert_yaxis()
    return fig


def live_plot(steps, every=10):
    """A progress bar and a loss plot that grow while a training runs: a `report` for train.train.

    Shows itself at once, in a notebook. every: steps between two drawings of the plot.
    """
    import ipywidgets as widgets
    import matplotlib.pyplot as plt
    from IPython.display import display

    bar = widgets.IntProgress(max=steps, description=f"0 of {steps}")
    plot = widgets.Output()
    shown = widgets.VBox([bar, plot])
    display(shown)

    def report(step, losses):
        bar.value, bar.description = step, f"{step} of {steps}"
        if step % every == 0 or step == steps:
            fig, ax = new_figure(7, 3)
            ax.plot(range(1, step + 1), losses, color=COLOURS["flash"])
            ax.set(xlabel="step", ylabel="loss", xlim=(0, steps), ylim=(0, losses[0] * 1.05))
            with plot:
                plot.clear_output(wait=True)
                display(fig)
            plt.close(fig)

    report.shown = shown
    return report
