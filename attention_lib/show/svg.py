"""Pictures as strings of SVG: fast enough to follow a hand, sharp at any zoom, text stays text.

A part is a string. `rect`, `line`, `path`, `circle` and `text` make one, `rects` and `texts` many
of one look, `group` moves some, and `picture` wraps them up with words for those who do not see it:

    bar = rect(10, 10, 80, 20, fill="hbm", edge="ink", hatch="//")
    picture([bar, text(14, 24, "in HBM", colour="on")], "One bar: all data is in HBM.", 120, 40)

Coordinates are pixels, y runs down. A colour is a name: those of `COLOURS` in
attention_lib.show.style, and
    ink, paper    text and lines, and what lies behind them; light on dark in a dark theme
    on            text on a filled shape, black in both themes
    faint, edge   the fill of a quiet shape, and its outline
    pale          the fill of what is done: ink can be read on it
    none          nothing drawn
A picture follows the theme of JupyterLab, of the web edition or of VS Code, and where there is
none of these the reader's own light or dark setting. A hatch lies over the fill: "//" stripes,
".." dots, "xx" crosses.
"""

import re
import zlib
from html import escape

from attention_lib.show.style import COLOURS

# Blue and green are lighter on a dark ground; the other colours stand out on both.
LIGHT = COLOURS | dict(
    ink="#16202A",
    paper="#FFFFFF",
    on="#000000",
    faint="#EEF3F7",
    pale="#B9D6EA",
    edge="#5B6770",
    limit="#000000",
)
DARK = LIGHT | dict(
    ink="#E8EDF2", paper="#15191E", faint="#2A323B",
    pale="#24506F", edge="#9AA7B2", limit="#FFFFFF",
    standard="#F0803C", flash="#4DA6E8", q_outer="#2FC79B",
)  # fmt: skip
HATCHES = {
    "//": '<path class="s-edge" stroke-width="1.1" d="M-2 2L2-2M0 8L8 0M6 10L10 6"/>',
    "xx": '<path class="s-edge" stroke-width="1.1" d="M0 0L8 8M0 8L8 0"/>',
    "..": '<path class="s-edge" stroke-width="1.8" stroke-linecap="round" d="M2 2h.01M6 6h.01"/>',
}
SMALLEST = 560
_HATCH_IDS = {"//": "stripes", "xx": "crosses", "..": "dots"}


def number(x):
    """A coordinate, to a tenth of a pixel, as short as it can be written."""
    return f"{round(float(x), 1) + 0.0:.10g}"  # + 0.0: no -0


def _attributes(**values):
    """name="value" for all that are not None; class_ is class, and _ in a name is -."""
    written = ""
    for name, value in values.items():
        if value is not None:
            value = number(value) if isinstance(value, (int, float)) else escape(str(value))
            written += f' {name.rstrip("_").replace("_", "-")}="{value}"'
    return written


def _paint(fill, edge):
    for name in (fill, edge):
        if name != "none" and name not in LIGHT:
            raise ValueError(f"colour is {name!r}; accepted: none, {', '.join(LIGHT)}")
    return f"f-{fill}" + (f" s-{edge}" if edge != "none" else "")


def _hatched(hatch):
    if hatch not in HATCHES:
        raise ValueError(f"hatch is {hatch!r}; accepted: {', '.join(HATCHES)}")
    return f' style="fill:url(#al-{_HATCH_IDS[hatch]})"'


def rect(x, y, width, height, fill="none", edge="none", line=1, hatch="", dash=None, tip=None):
    """A rectangle. hatch: a key of HATCHES or "". line: the outline's width. tip: words on hover.

    Raises ValueError for an unknown colour or hatch, as all parts do.
    """
    box = _attributes(x=x, y=y, width=max(0, width), height=max(0, height))
    look = _attributes(class_=_paint(fill, edge), stroke_width=line, stroke_dasharray=dash)
    words = f"<title>{escape(tip)}</title>" if tip else ""
    if not hatch:
        return f"<rect{box}{look}>{words}</rect>" if words else f"<rect{box}{look}/>"
    under = "" if fill == "none" else f"<rect{box}{_attributes(class_=_paint(fill, 'none'))}/>"
    return f"{under}<rect{box}{look}{_hatched(hatch)}>{words}</rect>"


def rects(boxes, fill="none", edge="none", line=1, hatch=""):
    """Many rectangles (x, y, width, height) of one look, as one short shape."""
    d = "".join(
        f"M{number(x)} {number(y)}h{number(w)}v{number(h)}h{number(-w)}z" for x, y, w, h in boxes
    )
    look = _attributes(class_=_paint(fill, edge), stroke_width=line)
    if not d or not hatch:
        return f'<path d="{d}"{look}/>' if d else ""
    under = "" if fill == "none" else f'<path d="{d}"{_attributes(class_=_paint(fill, "none"))}/>'
    return f'{under}<path d="{d}"{look}{_hatched(hatch)}/>'


def line(x1, y1, x2, y2, colour="ink", width=1, dash=None):
    """A straight line. dash: lengths drawn and left out, e.g. "4 3"."""
    ends = _attributes(x1=x1, y1=y1, x2=x2, y2=y2)
    look = _attributes(class_=_paint("none", colour), stroke_width=width, stroke_dasharray=dash)
    return f"<line{ends}{look}/>"


def path(points, colour="ink", width=2, fill="none", close=False, dash=None):
    """The points (x, y) joined by straight lines; close=True joins the last to the first."""
    d = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points) + ("Z" if close else "")
    look = _attributes(class_=_paint(fill, colour), stroke_width=width, stroke_dasharray=dash)
    return f'<path d="{d}"{look}/>'


def circle(x, y, radius, fill="ink", edge="none", line=1, tip=None):
    """A circle, e.g. a point of a curve."""
    shape = _attributes(cx=x, cy=y, r=radius, class_=_paint(fill, edge), stroke_width=line)
    return f"<circle{shape}>" + (f"<title>{escape(tip)}</title>" if tip else "") + "</circle>"


def text(x, y, words, size=13, colour="ink", anchor="start", bold=False, mono=False, turn=None):
    """Words with their baseline at y. anchor: start, middle or end. turn: degrees, clockwise."""
    look = _attributes(
        x=x, y=y, class_=_paint(colour, "none") + (" mono" if mono else ""), font_size=size,
        text_anchor=None if anchor == "start" else anchor,
        font_weight="bold" if bold else None,
        transform=None if turn is None else f"rotate({number(turn)} {number(x)} {number(y)})",
    )  # fmt: skip
    return f"<text{look}>{escape(str(words), quote=False)}</text>"


def texts(places, size=13, colour="ink", anchor="start"):
    """Many short words of one look: places is (x, y, words) for each."""
    spans = "".join(
        f"<tspan{_attributes(x=x, y=y)}>{escape(str(words), quote=False)}</tspan>"
        for x, y, words in places
    )
    look = _attributes(class_=_paint(colour, "none"), font_size=size, text_anchor=anchor)
    return f"<text{look}>{spans}</text>" if spans else ""


def group(parts, x=0, y=0, hidden=False, name=None):
    """The parts as one, moved by (x, y). hidden=True keeps its words from screen readers.

    name: its class, for a style sheet that moves it.
    """
    look = _attributes(
        class_=name,
        transform=f"translate({number(x)} {number(y)})" if x or y else None,
        aria_hidden="true" if hidden else None,
    )
    return f"<g{look}>{''.join(parts)}</g>"


def picture(parts, alt, width, height, title=None):
    """The parts as an <svg>, to show inside a page or to keep as a file of its own.

    alt: what to see, in words, 20 characters or more, or ValueError. title: a short name; without
    it the first sentence of alt. The picture shrinks with its page, down to SMALLEST pixels: then
    the page scrolls, so that text can be made larger by zooming.
    """
    if not isinstance(alt, str) or len(alt.strip()) < 20:
        raise ValueError(f"alt is {alt!r}; accepted: a sentence that says what to see")
    title = title or alt.split(". ")[0].rstrip(".")
    body = "".join(parts)
    used = {key for key, name in _HATCH_IDS.items() if f"#al-{name})" in body}
    # Ids are of the page, not of the picture: two pictures must not share any.
    mark = f"al{zlib.crc32((alt + body).encode()):08x}"
    hatches = "".join(
        f'<pattern id="{mark}-{_HATCH_IDS[key]}" width="8" height="8" '
        f'patternUnits="userSpaceOnUse">{HATCHES[key]}</pattern>'
        for key in HATCHES
        if key in used
    )
    body = body.replace("url(#al-", f"url(#{mark}-")
    inside = f"<style>{style(body + hatches)}</style><defs>{hatches}</defs>{body}"
    W, H, least = number(width), number(height), number(min(width, SMALLEST))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="attn" viewBox="0 0 {W} {H}" '
        f'width="{W}" height="{H}" style="min-width:{least}px" '
        f'role="img" aria-labelledby="{mark}-t" aria-describedby="{mark}-d">'
        f'<title id="{mark}-t">{escape(title)}</title><desc id="{mark}-d">{escape(alt)}</desc>'
        f"{inside}</svg>"
    )


def style(body):
    """The style sheet of a picture: the colours that its shapes name, in both themes."""
    used = set(re.findall(r"\b[fs]-\w+", body))
    paints = [
        (name, f"{kind}-{name}", what)
        for name in LIGHT
        for kind, what in (("f", "fill"), ("s", "stroke"))
        if f"{kind}-{name}" in used
    ]
    names = [name for name in LIGHT if name == "paper" or name in {x for x, _, _ in paints}]
    light = ";".join(f"--{name}:{LIGHT[name]}" for name in names)
    dark = ";".join(f"--{name}:{DARK[name]}" for name in names if DARK[name] != LIGHT[name])
    lit = '[data-jp-theme-light="true"] .attn,[data-theme="light"] .attn,.vscode-light .attn'
    dim = '[data-jp-theme-light="false"] .attn,[data-theme="dark"] .attn,.vscode-dark .attn'
    rules = "".join(f".attn .{css}{{{what}:var(--{name})}}" for name, css, what in paints)
    return (
        f".attn,{lit}{{{light}}}@media(prefers-color-scheme:dark){{.attn{{{dark}}}}}{dim}{{{dark}}}"
        ".attn{max-width:100%;height:auto;background:var(--paper);"
        "font-family:system-ui,'DejaVu Sans',sans-serif}.attn .mono{font-family:monospace}"
        f".attn .f-none{{fill:none}}{rules}"
    )
