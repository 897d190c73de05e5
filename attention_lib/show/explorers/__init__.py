"""Explorers: pictures that follow a few controls, each drawn from what the library computes.

    explore("roofline")             a widget
    explore("roofline", gpu="H200") the same, from another start
    EXPLORERS["roofline"].draw(...) one picture: an <svg> as text, and its words
    FRAMES["roofline"]()            pictures of a small grid of states, for the web edition

Each module has CONTROLS, a pure function `draw` from their values to a `Picture`, and `frames`.
"""

from attention_lib.inputs import check_choice
from attention_lib.show import stepper
from attention_lib.show.explorers import (
    context,
    ladder,
    masks,
    roofline,
    softmax,
    sram,
    traffic,
)
from attention_lib.show.widgets import explorer

EXPLORERS = {
    "softmax": softmax,
    "roofline": roofline,
    "sram": sram,
    "traffic": traffic,
    "masks": masks,
    "context": context,
    "ladder": ladder,
}
FRAMES = {name: module.frames for name, module in EXPLORERS.items()} | {"stepper": stepper.frames}


def explore(name, **state):
    """The explorer with this name, as a widget. state: where it starts, e.g. gpu="H200".

    Raises ValueError for an unknown name, control or value.
    """
    check_choice("name", name, tuple(EXPLORERS))
    module = EXPLORERS[name]
    return explorer(name, module.draw, module.CONTROLS, **state)
