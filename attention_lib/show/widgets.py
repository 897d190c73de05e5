"""What the explorers share: controls, the shell around a picture, and the still without a kernel.

An explorer is a pure function from a state to a `Picture`, and a list of `Control`s. The shell
shows the picture that belongs to the values of the controls, and computes nothing.
"""

import base64
from html import escape
from itertools import product
from typing import NamedTuple

from attention_lib.inputs import check_choice
from attention_lib.show.svg import SMALLEST


class Picture(NamedTuple):
    """An <svg> as text, and in words what it shows."""

    svg: str
    alt: str


class Control(NamedTuple):
    """One thing to change: name of the argument, label, accepted values, the one to start from.

    Numbers make a slider, words a list, True and False a box to tick.
    """

    name: str
    label: str
    values: tuple
    start: object


def words(value):
    """A value as one reads it."""
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def state_of(controls, **changes):
    """The start values with some changed. ValueError for a name or value that no control has."""
    state = {control.name: control.start for control in controls}
    accepted = {control.name: control.values for control in controls}
    for name, value in changes.items():
        check_choice("name", name, tuple(state))
        if value not in accepted[name]:
            options = ", ".join(map(repr, accepted[name]))
            raise ValueError(f"{name} is {value!r}; accepted: {options}")
    return state | changes


def frames_of(draw, controls, **grid):
    """The pictures of a grid of states, for a page without a kernel: a list of (state, svg, alt).

    grid: name of a control -> the values to take; controls left out keep their start value. In a
    state the keys are the controls' labels. The first values of all make the first frame.
    """
    start = state_of(controls)
    labels = {control.name: control.label for control in controls}
    made = []
    for values in product(*grid.values()):
        state = dict(zip(grid, values, strict=True))
        picture = draw(**start | state)
        made.append(({labels[name]: value for name, value in state.items()}, *picture))
    return made


def still(name, picture, controls):
    """What a saved notebook keeps of an explorer: its picture and its words, as MIME data."""
    # An image, since JupyterLab shows no bare SVG of a notebook that it does not trust yet.
    data = base64.b64encode(picture.svg.encode()).decode()
    alt = escape(picture.alt, quote=True)
    labels = ", ".join(control.label for control in controls)
    html = (
        f'<div data-explorer="{escape(name)}" style="overflow-x:auto">'
        f'<img alt="{alt}" style="max-width:100%;min-width:{SMALLEST}px" '
        f'src="data:image/svg+xml;base64,{data}"/>'
        f"<p><em>Figure: {alt}</em></p>"
        f"<p>Run this cell to change it: {escape(labels)}.</p></div>"
    )
    return {"text/html": html, "text/plain": picture.alt}


# ipywidgets gives its sliders no name and no words, and JupyterLab takes the arrow keys for
# itself. This repairs both where a notebook runs scripts; elsewhere the mouse and Tab still work.
ASSIST = """
const wait = setInterval(() => {
  const box = element.closest('.explorer');
  if (!box) return;
  clearInterval(wait);
  for (const one of box.querySelectorAll('.widget-inline-hbox')) {
    const label = one.querySelector('label')?.textContent;
    const handle = one.querySelector('.noUi-handle');
    const control = handle ?? one.querySelector('select, input');
    control?.setAttribute('data-lm-suppress-shortcuts', 'true');
    if (!handle) continue;
    handle.setAttribute('aria-label', label);
    const readout = one.querySelector('.widget-readout');
    const say = () => {
      if (handle.getAttribute('aria-valuetext') !== readout.textContent)
        handle.setAttribute('aria-valuetext', readout.textContent);
    };
    new MutationObserver(say).observe(handle, {attributeFilter: ['aria-valuetext']});
    new MutationObserver(say).observe(readout, {childList: true});
    say();
  }
  box.querySelector('.explorer-words .widget-html-content').setAttribute('aria-live', 'polite');
}, 50);
"""


def _control(widgets, control, value):
    look = dict(description=control.label, style={"description_width": "initial"})
    if isinstance(value, bool):
        made = widgets.Checkbox(value, indent=False, **look)
        made.layout = {"width": "auto", "margin": "2px 1.2em 2px 0"}
        return made
    options = [(words(v), v) for v in control.values]
    if isinstance(value, str):
        made = widgets.Dropdown(options=options, value=value, **look)
        made.layout.width = "auto"
    else:
        made = widgets.SelectionSlider(options=options, value=value, **look)
        made.layout.width = "19em"
    made.layout.margin = "2px 1.2em 2px 0"
    return made


def explorer(name, draw, controls, **changes):
    """The widget: the controls, the picture that draw(**state) gives, and its words.

    changes: start values other than the controls' own. Without a kernel the still is seen.
    """
    import ipywidgets as widgets  # 0.2 s, and only those who use an explorer need it

    state = state_of(controls, **changes)
    start = draw(**state)

    class Explorer(widgets.VBox):
        def _repr_mimebundle_(self, **kwargs):
            return super()._repr_mimebundle_(**kwargs) | still(name, start, controls)

    made = {c.name: _control(widgets, c, state[c.name]) for c in controls}
    # In a narrow window the picture scrolls: smaller than it is it could not be read.
    svg, alt = widgets.HTML(layout={"width": "100%", "overflow": "auto"}), widgets.HTML()
    alt.add_class("explorer-words")

    def show(_=None):
        picture = draw(**{key: control.value for key, control in made.items()})
        svg.value, alt.value = picture.svg, f"<p>{escape(picture.alt)}</p>"

    show()
    for control in made.values():
        control.observe(show, "value")
    script = {"output_type": "display_data", "metadata": {}}
    script["data"] = {"application/javascript": ASSIST, "text/plain": ""}
    row = widgets.HBox(list(made.values()), layout=widgets.Layout(flex_flow="row wrap"))
    box = Explorer([row, svg, alt, widgets.Output(outputs=(script,))])
    box.add_class("explorer")
    return box
