"""The visual language: a palette that survives colour blindness and grey print, and one way out.

Colour never carries a meaning alone: a series also has its own marker or hatch, and a label.
"""

import base64
import io

import matplotlib.pyplot as plt
from IPython.display import Markdown, display

# Okabe and Ito's palette, ordered so that neighbours differ in lightness as well.
COLOURS = {
    "standard": "#D55E00",  # vermilion: the unfused version, everywhere
    "flash": "#0072B2",  # blue: Algorithm 1, K/V outside
    "q_outer": "#009E73",  # green: the swapped order
    "hbm": "#E69F00",  # orange: what lives in HBM
    "sram": "#56B4E9",  # sky: what is on chip
    "limit": "#000000",
    "quiet": "#999999",
}
HATCHES = {"standard": "//", "flash": "", "q_outer": "..", "hbm": "", "sram": ""}
MARKERS = {"standard": "s", "flash": "o", "q_outer": "^"}

_RC = {
    "figure.dpi": 100,
    "figure.facecolor": "white",  # a light panel of its own, so that it reads in a dark theme
    "savefig.facecolor": "white",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "lines.linewidth": 2,
    "svg.hashsalt": "attention_lib",
}


def new_figure(width=7, height=3.6, **subplots):
    """A figure in the course's style: returns fig, axes as plt.subplots does. Sizes in inches."""
    with plt.rc_context(_RC):
        return plt.subplots(figsize=(width, height), layout="constrained", **subplots)


def figure(fig, alt):
    """Show fig with `alt`: what to see in it, in words, as alt text and as a caption.

    Raises ValueError unless alt says something (20 characters or more). Closes the figure.
    """
    if not isinstance(alt, str) or len(alt.strip()) < 20:
        raise ValueError(f"alt is {alt!r}; accepted: a sentence that says what to see")
    with plt.rc_context(_RC):
        png = io.BytesIO()
        fig.savefig(png, format="png", metadata={"Software": None})
    plt.close(fig)
    bundle = {"image/png": base64.b64encode(png.getvalue()).decode(), "text/plain": alt}
    display(bundle, raw=True, metadata={"image/png": {"alt": alt}})
    display(Markdown(f"*Figure: {alt}*"))
