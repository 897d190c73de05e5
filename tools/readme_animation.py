"""The moving picture of the README: notebook 03's run, tile by tile, from its trace.

    python tools/readme_animation.py           write docs/images/stepper.svg and stepper_still.svg
    python tools/readme_animation.py --check   write nothing; exit 1 if they would change

An SVG moved by its style sheet: sharp at any size, small, and it stands still by itself for readers
who asked for less motion. GitHub shows such a file as it is.
"""

import sys
from pathlib import Path

import numpy as np

from attention_lib import HBM, block_sizes
from attention_lib.show.stepper import edges, grid, trace
from attention_lib.show.svg import group, picture, rect, text
from attention_lib.tiled import blocks, unfused_attention

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images"
N, D, M = 1000, 64, 50_000
RUNS, HOLDS = 5, 2.5  # seconds
STILL = 40  # the step that the still shows
COUNTS = 24  # how often a number changes
WIDTH = 440


def main(arguments):
    run, standard = runs()
    pictures = {
        "stepper.svg": animation(run, standard),
        "stepper_still.svg": animation(run, standard, moving=False),
    }
    changed = False
    for name, svg in pictures.items():
        path = FOLDER / name
        if path.is_file() and path.read_text(encoding="utf-8") == svg:
            continue
        changed = True
        print(f"{'would change' if '--check' in arguments else 'written'}: {path.name}")
        if "--check" not in arguments:
            FOLDER.mkdir(parents=True, exist_ok=True)
            path.write_text(svg, encoding="utf-8", newline="\n")
    return int(changed and "--check" in arguments)


def runs():
    """Algorithm 1, recorded, and what the unfused loop moves for the same input, in elements."""
    Q, K, V = np.random.default_rng(0).standard_normal((3, N, D), dtype=np.float32)
    standard = HBM()
    unfused_attention(Q, K, V, hbm=standard)
    return trace(Q, K, V, *block_sizes(M, D), M=M), standard.reads + standard.writes


def animation(run, standard, moving=True):
    """The picture as SVG. standard: the elements that the unfused loop moved for the same input."""
    moved, last = run.steps[-1].moved, len(run.steps) - 1
    times = f"{standard / moved:.1f} times less"
    rules, parts = [], []

    def seen(shapes, name, when, at_rest):
        """Shapes that are there during `when` only: (begin, end) in steps, end None for ever."""
        begin, end = (None if k is None else 100 * k / last * RUNS / (RUNS + HOLDS) for k in when)
        stops = "0%{opacity:0}" if begin else ""
        stops += f"{begin:.2f}%{{opacity:1}}"
        stops += "100%{opacity:1}" if end is None else f"{end:.2f}%,100%{{opacity:0}}"
        rules.append(f"@keyframes {name}{{{stops}}}.{name}{{animation-name:{name}}}")
        if moving or at_rest:
            style = "" if at_rest else " rest"
            parts.append(group(shapes, 0, 0, name=f"a {name}{style}"))

    tiles, w, h = grid(run, 0)
    parts.append(group(tiles, 0, 52))
    across = edges(N, blocks(N, run.Bc), 300)
    down = edges(N, blocks(N, run.Br), 300)
    for k, step in enumerate(run.steps):
        if step.tile is None:
            continue
        (top, bottom), (left, right) = down[step.tile[0]], across[step.tile[1]]
        x, y, dx, dy = 46 + left, 86 + top, right - left, bottom - top
        seen([rect(x, y, dx, dy, "pale", "edge", 0.8)], f"d{k}", (k, None), k < STILL)
        now = [
            rect(x, y, dx, dy, "sram", "ink", 2.6),
            rect(x, 66, dx, 14, "sram", "ink", 2.2),
            rect(26, y, 14, dy, "sram", "ink", 2.2),
            rect(352, y, 14, dy, "sram", "ink", 2.2),
        ]
        seen(now, f"s{k}", (k - 1, None if k == last else k), k == STILL)
    parts += [
        text(14, 26, "FlashAttention: one tile of the score matrix at a time", 19, bold=True),
        text(46, 410, "Blue: on chip now. Pale: used and dropped. Orange: in HBM.", 13),
    ]
    right = 420
    parts += [text(right, 92, "On chip (SRAM): five tiles, and it never grows", 15, bold=True)]
    x = right
    for name, size in run.hbm.peak_tiles.items():
        dx = size / M * WIDTH
        parts.append(rect(x, 102, dx, 30, "sram", "ink", 1))
        if dx > 16:
            parts.append(text(x + dx / 2, 122, name, 15, "on", "middle", bold=True))
        x += dx
    parts.append(rect(right, 102, WIDTH, 30, "none", "ink", 1.4, dash="5 4"))
    parts.append(text(right, 150, f"{run.hbm.peak_on_chip:,} of {M:,} elements", 13))

    bars = {
        "Standard attention": (standard, "standard", "//", 196),
        "FlashAttention": (moved, "flash", "", 276),
    }
    for n, (name, (total, colour, hatch, y)) in enumerate(bars.items()):
        grow = f"b{n}"
        steps = [step.moved / moved if n else k / last for k, step in enumerate(run.steps)]
        stops = "".join(
            f"{100 * k / last * RUNS / (RUNS + HOLDS):.2f}%{{transform:scaleX({part:.4f})}}"
            for k, part in enumerate(steps)
        )
        rules.append(f"@keyframes {grow}{{{stops}}}.{grow}{{animation-name:{grow}}}")
        parts.append(text(right, y, f"{name} moves", 15, bold=True))
        bar = rect(right, y + 10, total / standard * WIDTH, 28, colour, "ink", 1, hatch)
        parts.append(group([bar], name=f"a grow {grow}"))
        for c in range(COUNTS + 1):
            k = round(c * last / COUNTS)
            count = text(
                right + WIDTH, y, f"{round(steps[k] * total):,} elements", 15, "ink", "end", True
            )
            end = None if c == COUNTS else round((c + 1) * last / COUNTS)
            seen([count], f"n{n}x{c}", (k, end), c == COUNTS)
    verdict = text(right, 354, f"{times}, and the same result", 19, bold=True)
    seen([verdict], "end", (last, None), True)
    parts.append(
        text(right, 376, f"Elements to and from HBM, N = {N}, d = {D}, counted in a run", 13)
    )
    css = (
        f".a{{animation:0s step-end infinite;animation-duration:{RUNS + HOLDS}s}}.rest{{opacity:0}}"
    )
    css += ".grow{transform-box:fill-box;transform-origin:left}" + "".join(rules)
    css += "@media(prefers-reduced-motion:reduce){.a{animation:none}}"
    if moving:
        parts.insert(0, f"<style>{css}</style>")
    return picture(parts, alt(run, standard), right + WIDTH + 16, 428) + "\n"


def alt(run, standard):
    """What the README says to those who do not see the picture."""
    moved = run.steps[-1].moved
    return (
        f"FlashAttention walks through a score matrix of {run.Tr} by {run.Tc} tiles, one at a "
        f"time. On chip are only the tile and its blocks of K, V, Q and O: "
        f"{run.hbm.peak_on_chip:,} elements at most. At the end it has moved {moved:,} "
        f"elements to and from HBM. Standard attention moves {standard:,}: "
        f"{standard / moved:.1f} times as many, for the same result."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
