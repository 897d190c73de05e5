"""A question answered by pressing a button, where a notebook can show one.

Each letter is a button: Tab reaches it, Enter or Space presses it. Radio buttons would be the
usual thing, but ipywidgets gives them no group, so that arrow keys do nothing, and JupyterLab
takes arrows and letters for itself as long as the focus is not in a field for text.
"""

import re
from html import escape

from attention_lib.checks.kinds import Choice

VIEW = "application/vnd.jupyter.widget-view+json"


def form(q, judge):
    """The widget for a Choice or a Number; judge(id, answer) gives the Result that it shows.

    What the browser gets is the letters or a field, and with an answer its reply: nothing that
    tells which is right.
    """
    import ipywidgets as widgets  # 0.2 s, and only those who use a form need it

    reply = widgets.HTML()

    def say(answer):
        reply.value = judge(q.id, answer)._repr_html_()

    if isinstance(q, Choice):
        parts = [widgets.Button(description=x, tooltip=q.options[x]) for x in q.options]
        for button in parts:
            button.on_click(lambda pressed: say(pressed.description))
            button.layout.width = "4em"
        parts = [widgets.HTML(f"{escape(q.id)}, your answer:"), *parts]
    else:
        field = widgets.Text(description=f"{q.id}, your answer ({q.unit}):")
        field.style.description_width = "initial"
        field.layout.width = "auto"
        field.on_msg(lambda _, sent, __: sent.get("event") == "submit" and say(number(field.value)))
        button = widgets.Button(description="Answer", tooltip=f"Answer {q.id}")
        button.on_click(lambda _: say(number(field.value)))
        parts = [field, button]
    row = widgets.HBox(parts, layout=widgets.Layout(flex_flow="row wrap"))
    return widgets.VBox([row, reply])


def number(text):
    """What was typed, as a number: "12289", "12,289", "1.5e3". Other text stays text."""
    text = text.strip()
    if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?", text):
        text = text.replace(",", "")
    try:
        return float(text)
    except ValueError:
        return text or None


def show(q, text, judge):
    """The question as text, then the form. A notebook without its kernel keeps the text."""
    from IPython import get_ipython
    from IPython.display import display

    display(text)
    if hasattr(get_ipython(), "kernel"):
        bundle = form(q, judge)._repr_mimebundle_()
        display({VIEW: bundle[VIEW]}, raw=True)
