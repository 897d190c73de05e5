"""Build the web edition into build/site, from the committed notebooks. Nothing is executed.

    python tools/build_site.py [--to folder] [sphinx-build's options]

Sphinx wants its sources in one folder, and the address of a page follows from its place there. So
index.md, notebooks/, exercises/ and docs/ are laid out in a folder of their own, as they lie in the
repository: links between them stay right. SITE_URL is the address where the site will be
published; pages work without it, the sitemap and the social card need it.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

import matplotlib

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402

from attention_lib.show import new_figure  # noqa: E402
from attention_lib.show.tiles import tile_grid  # noqa: E402

PAGES = ("site/*.md", "notebooks/*.ipynb", "exercises/*.ipynb", "docs/*.md", "docs/images/*")


def lay_out(folder):
    """The pages' sources in folder, which is made new."""
    shutil.rmtree(folder, ignore_errors=True)
    for pattern in PAGES:
        for path in ROOT.glob(pattern):
            place = folder / path.relative_to(
                ROOT / "site" if pattern.startswith("site/") else ROOT
            )
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


def social_card(path):
    """What a link to the site shows elsewhere: 1200 x 630 pixels."""
    fig, (words, grid) = new_figure(12, 6.3, ncols=2, width_ratios=(1.15, 1))
    fig.get_layout_engine().set(h_pad=0.3)
    tile_grid(768, 768, 128, 128, current=(2, 3), arrows=False, ax=grid)
    words.axis("off")
    words.text(0.03, 0.75, "FlashAttention", fontsize=40, weight="bold")
    words.text(0.03, 0.62, "and memory-efficient kernels", fontsize=24)
    promise = "A course you run: predict a number,\ncount every byte, explain."
    words.text(0.03, 0.32, promise, fontsize=19)
    fig.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(fig)


def build(to, options=()):
    """Sphinx's exit status: 0 if the pages are in `to` and there was no warning."""
    from sphinx.cmd.build import main

    work = to.parent / f"{to.name}-work"
    lay_out(work / "source")
    if (to / "sitemap.xml").is_file():  # what was built before: pages may have gone since
        shutil.rmtree(to)
    folders = (work / "source", to, "-c", ROOT / "site", "-d", work / "doctrees")
    status = main([*map(str, folders), "-E", "-W", "--keep-going", "-q", *options])
    if status == 0:
        social_card(to / "_static" / "social-card.png")
    return status


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=ROOT / "build/site", help="default: build/site")
    arguments, options = parser.parse_known_args()
    status = build(arguments.to.resolve(), options)
    if not status and not os.environ.get("SITE_URL"):
        print("SITE_URL is not set: sitemap and social card have no host.", file=sys.stderr)
    sys.exit(status)
