"""Notebook 22: a warp of the backward kernels in numpy, its budget, and two pictures.

`TRIES` is the log of what was tried with backward_wgmma.cu and not kept.
"""

import math

import numpy as np
from matplotlib.patches import FancyArrowPatch, Rectangle

from attention_lib.gpu.fragments import LANES, ldmatrix, mma, places
from attention_lib.gpu.gradients import HEAD_DIMENSIONS
from attention_lib.inputs import check_choice
from attention_lib.show.style import COLOURS, new_figure

# Notes taken while backward_wgmma.cu was tuned, one H200, 2026-11-29: what was changed, and what
# became of its speed. The variants were not kept, so this is a log and no recording.
TRIES = (
    ("wait for dK at the end of its tile", "d = 128", "-1%"),
    ("wait for dK at the end of its tile", "d = 64", "+1 to +5%"),
    ("each block begins with another tile of queries", "", "-1%"),
    ("dS from P in float, not from P in 16 bits", "d = 128", "-2 to -15%"),
    ("dS from P in float, not from P in 16 bits", "d = 64", "registers spill"),
)


# ---------------------------------------------------------------- one warp, in fragments


def product_abt(A, B):
    """A B^T by a warp: A (16, d), B (n, d), both rows of a tile. Returns n / 8 fragments of C."""
    lane = np.arange(LANES)
    C = np.zeros((len(B) // 8, LANES, 4), np.float32)
    for k in range(0, A.shape[1], 16):
        a = ldmatrix(A, lane % 16, k + lane // 16 * 8)
        for n in range(0, len(B), 16):
            b = ldmatrix(B, n + lane % 8 + lane // 16 * 8, k + lane // 8 % 2 * 8)
            C[n // 8] = mma(C[n // 8], a, b[:, :4])
            C[n // 8 + 1] = mma(C[n // 8 + 1], a, b[:, 4:])
    return C


def product_ab(A, B):
    """A B by a warp: A (16, n) as n / 8 fragments of C in 16 bits, B (n, d). Fragments of C."""
    lane = np.arange(LANES)
    C = np.zeros((B.shape[1] // 8, LANES, 4), np.float32)
    for k in range(0, len(B), 16):
        a = np.concatenate([A[k // 8], A[k // 8 + 1]], axis=1)  # two C fragments are one A
        for n in range(0, B.shape[1], 16):
            b = ldmatrix(B, k + lane % 16, n + lane // 16 * 8, transposed=True)
            C[n // 8] = mma(C[n // 8], a, b[:, :4])
            C[n // 8 + 1] = mma(C[n // 8 + 1], a, b[:, 4:])
    return C


def warp_backward(K, V, Q, dO, L2, D):
    """A warp of backward.cu for one tile: four of the five products, all in fragments.

    K, V: 16 keys, (16, d); Q, dO: a tile of queries, (Br, d); float16, d and Br multiples of 16.
    L2 = L log2(e) and D: (Br,), float32. Returns the fragments of dK (without the scale) and dV,
    float32, and of dS^T, float16, which goes to shared memory for the fifth product.
    """
    query = 8 * np.arange(len(Q) // 8)[:, None, None] + places("C")[:, :, 1]  # of each number
    c = np.float32(math.log2(math.e) / math.sqrt(K.shape[1]))
    P = np.exp2(product_abt(K, Q) * c - L2[query]).astype(np.float16)  # score, transposed
    dV = product_ab(P, dO)  # accumulate
    dP = product_abt(V, dO)
    dS = (P * (dP - D[query])).astype(np.float16)
    return product_ab(dS, Q), dV, dS


# ---------------------------------------------------------------- budgets


def tile_rows(d):
    """Queries of a tile, in both kernels."""
    return 128 if d == 64 else 64


def registers(kernel, d):
    """{moment of a tile: {what a thread holds: registers}}, worked out from the code.

    kernel: "mma" or "wgmma". In both, 16 keys lie in one warp: a thread holds 1/32 of 16 rows.
    Addresses, counters and what the compiler needs besides are not in it.
    """
    check_choice("kernel", kernel, ("mma", "wgmma"))
    if d not in HEAD_DIMENSIONS:
        raise ValueError(f"d is {d!r}; accepted: 64, 128")
    Br = tile_rows(d)
    size = {"dK": d // 2, "dV": d // 2, "S": Br // 2, "dP": Br // 2, "dQ": 32}
    size |= {"P": Br // 4, "dS": Br // 4}  # 16 bits: two numbers a register
    if kernel == "mma":  # one product after the other
        moments = {"S": "S", "dP": "P dP", "dK": "dS", "dQ": "dQ"}
    else:  # products at work while the next is prepared
        moments = {"S and dP": "S dP", "dP and dV": "P dP", "dQ and dK": "P dS dQ"}
    return {at: {x: size[x] for x in ("dK", "dV", *held.split())} for at, held in moments.items()}


def shared_parts(kernel, d):
    """{what lies in shared memory: bytes} of a block of `keys`; the sum is Kernel.shared(d)."""
    check_choice("kernel", kernel, ("mma", "wgmma"))
    Br, two = tile_rows(d), 2 if kernel == "wgmma" else 1
    parts = {
        "K, V": 2 * 128 * d * 2,
        "Q, dO, twice": 2 * 2 * Br * d * 2,
        "dS": two * 128 * Br * 2,
        "L, D, twice": 2 * 2 * Br * 4,
    }
    return parts if kernel == "mma" else parts | {"dQ in float": 2 * 16_384, "barriers": 80}


# ---------------------------------------------------------------- pictures

FILLS = {
    "dK": (COLOURS["q_outer"], ""),
    "dV": (COLOURS["sram"], ""),
    "S": ("white", "//"),
    "P": (COLOURS["hbm"], ""),
    "dP": ("white", ".."),
    "dS": ("#dddddd", "xx"),
    "dQ": (COLOURS["standard"], ""),
}


def draw_registers(budgets, limits):
    """Registers of a thread at each moment, stacked.

    budgets: title -> what `registers` returns; limits: title -> the most that a thread may have.
    """
    heights = [len(b) for b in budgets.values()]
    fig, axes = new_figure(
        8.6, 0.45 * sum(heights) + 1.5, nrows=len(budgets), sharex=True,
        height_ratios=heights, squeeze=False,
    )  # fmt: skip
    for ax, (title, moments) in zip(axes[:, 0], budgets.items(), strict=True):
        for y, held in enumerate(moments.values()):
            left = 0
            for name, n in held.items():
                fill, hatch = FILLS[name]
                ax.barh(-y, n, left=left, color=fill, hatch=hatch, edgecolor="black", height=0.75)
                ax.text(left + n / 2, -y, f"{name} {n}", ha="center", va="center", fontsize=9,
                        bbox=dict(facecolor="white", edgecolor="none", pad=0.8))  # fmt: skip
                left += n
            ax.text(left, -y, f"  {left}", va="center", weight="bold")
        ax.axvline(limits[title], color=COLOURS["limit"], linestyle="--", linewidth=1.5)
        ax.text(limits[title] + 2, 0, f"limit\n{limits[title]}", va="center", fontsize=9)
        ax.set_yticks([-y for y in range(len(moments))], list(moments))
        ax.set_title(title, loc="left", fontsize=11)
        ax.grid(axis="y", visible=False)
    axes[-1, 0].set(xlabel="registers of a thread", xlim=(0, 285))
    return fig


def _arrow(ax, start, end):
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color="black",
                                 linewidth=1.2, shrinkA=0, shrinkB=0))  # fmt: skip


def draw_owners(n=4):
    """Tiles of S: what one block of threads goes through, with K/V outside and with Q outside."""
    fig, axes = new_figure(9.2, 4.0, ncols=2)
    for ax, keys_outside in zip(axes, (True, False), strict=True):
        for i in range(n):
            for j in range(n):
                mine = (j if keys_outside else i) == 1
                ax.add_patch(
                    Rectangle((j, i), 1, 1, facecolor=COLOURS["sram"] if mine else "white",
                              hatch=".." if mine else "", edgecolor="black")
                )  # fmt: skip
        for k in range(n):
            mine = keys_outside or k == 1
            fill = COLOURS["hbm"] if keys_outside else COLOURS["sram"]
            ax.add_patch(Rectangle((n + 0.9, k + 0.15), 0.9, 0.7, edgecolor="black",
                                   facecolor=fill if mine else "white"))  # fmt: skip
            ax.text(n + 1.35, k + 0.5, "dQ", ha="center", va="center")
            if keys_outside:
                _arrow(ax, (2.0, k + 0.5), (n + 0.85, k + 0.5))
            mine = keys_outside and k == 1
            ax.add_patch(Rectangle((k + 0.08, n + 0.25), 0.84, 0.6, edgecolor="black",
                                   facecolor=COLOURS["sram"] if mine else "white"))  # fmt: skip
            ax.text(k + 0.5, n + 0.55, "dK, dV", ha="center", va="center", fontsize=9)
        if keys_outside:
            words = "keys: dK, dV in registers;\nadds to every dQ, in HBM"
        else:
            _arrow(ax, (n, 1.5), (n + 0.85, 1.5))
            words = "queries: dQ in registers;\nno dK, no dV"
        ax.set_title(words, loc="left", fontsize=11)
        ax.set(xlim=(-0.6, n + 1.9), ylim=(n + 1.0, -0.5), aspect="equal")
        ax.text(n / 2, -0.15, "keys", ha="center", va="bottom", fontsize=10)
        ax.text(-0.15, n / 2, "queries", ha="right", va="center", rotation=90, fontsize=10)
        ax.axis("off")
    return fig
