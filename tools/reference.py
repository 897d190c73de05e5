"""Make docs/glossary.md and docs/cheat_sheet.md from the library.

    python tools/reference.py                     write both
    python tools/reference.py --check             write nothing; exit 1, naming what would change
    python tools/reference.py --print sheet.html  the cheat sheet as a page that prints on one sheet

The glossary is attention_lib.glossary. In the cheat sheet a formula is a line of Python. That line
is evaluated beside the library's function at several sizes, and nothing is written if the two
differ; what is printed is made from the same line. Every other number is computed by the library,
and a row of the decision table that says "less" is refused when it is not.
"""

import argparse
import ast
import math
import random
import re
import sys
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from attention_lib import (  # noqa: E402
    backward,
    decode,
    glossary,
    hardware,
    memory,
    online,
    reference,
    sparse,
    tiled,
    traffic,
)
from attention_lib.show.course_map import NOTEBOOKS  # noqa: E402

GENERATED = "<!-- Made by tools/reference.py from attention_lib. Do not edit: `make reference`. -->"
LIBRARY = dict(
    backward=backward,
    decode=decode,
    hardware=hardware,
    online=online,
    reference=reference,
    sparse=sparse,
    tiled=tiled,
    traffic=traffic,
    State=online.State,
)


class Refused(Exception):
    """The sheet and the library say different things."""


# ---------------------------------------------------------------- formulas


class Formula(NamedTuple):
    """A row: `text` is printed, and must give what `library` gives.

    Both are Python: an expression each, or assignments to the same names. when: a condition on the
    sizes, printed too; words: how it is printed.
    """

    what: str
    text: str
    library: str
    when: str = "True"
    words: str = ""


class Step(Formula):
    """A formula with arrays. m, l and L are columns, so that they go with the rows of a matrix."""


STEPS = (
    Step(
        "attention",
        "S = Q @ K.T / sqrt(d); P = softmax(S); O = P @ V",
        "O, S, P = reference.standard_attention(Q, K, V)",
    ),
    Step(
        "online update",
        "m_new = max(m, rowmax(S)); l_new = exp(m - m_new) * l + rowsum(exp(S - m_new)); "
        "O_new = exp(m - m_new) * O + exp(S - m_new) @ V",
        "m_new, l_new, O_new = online.update(State(m[:, 0], l[:, 0], O), S, V)",
    ),
    Step(
        "merge of two",
        "m = max(m_a, m_b); l = exp(m_a - m) * l_a + exp(m_b - m) * l_b; "
        "O = exp(m_a - m) * O_a + exp(m_b - m) * O_b",
        "m, l, O = online.merge("
        "State(m_a[:, 0], l_a[:, 0], O_a), State(m_b[:, 0], l_b[:, 0], O_b))",
    ),
    Step(
        "finish",
        "L = m + log(l); O_out = O / l",
        "O_out, L = online.finish(State(m[:, 0], l[:, 0], O))",
    ),
    Step(
        "backward",
        "P = exp(S - L); D = rowsum(dO * O); dP = dO @ V.T; dS = P * (dP - D); dV = P.T @ dO; "
        "dQ = dS @ K / sqrt(d); dK = dS.T @ Q / sqrt(d)",
        "dQ, dK, dV = backward.flash_backward(Q, K, V, O, L[:, 0], dO, 2, 3)",
    ),
)

# Elements that one head moves, Nk = N.
TRAFFIC = (
    Formula("standard", "4*N*d + 4*N**2", "traffic.standard_traffic(N, d)"),
    Formula("Algorithm 1", "2*N*d + Tc*(3*N*d + 4*N)", "traffic.flash_traffic(N, d, Br, Bc)"),
    Formula(
        "Algorithm 1, causal",
        "2*N*d + (3*d + 4) * sum(N - Br*(b*Bc // Br) for b in range(Tc))",
        "traffic.flash_traffic(N, d, Br, Bc, causal=True)",
    ),
    Formula("Q outside", "2*N*d + N + 2*N*d*Tr", "traffic.q_outer_traffic(N, d, Br, Bc)"),
    Formula(
        "Q outside, causal",
        "2*N*d + N + 2*d * sum(min(N, Bc*ceil(min((a + 1)*Br, N) / Bc)) for a in range(Tr))",
        "traffic.q_outer_traffic(N, d, Br, Bc, causal=True)",
    ),
    Formula(
        "any account",
        "R_Q*(c_Q*N*d + c_s*N) + 2*N*d*R_KV + sigma*N**2",
        "traffic.general_traffic(N, d, R_Q=R_Q, c_Q=c_Q, c_s=c_s, R_KV=R_KV, sigma=sigma)",
    ),
    Formula(
        "block-sparse, K/V outside",
        "2*N*d + s*Tc*(3*N*d + 4*N)",
        "sparse.block_sparse_traffic(N, d, block_mask, Br, Bc)",
        "N % Br == N % Bc == 0",
        "if blocks fit",
    ),
    Formula(
        "block-sparse, Q outside",
        "2*N*d + N + 2*N*d*s*Tr",
        "sparse.block_sparse_q_outer_traffic(N, d, block_mask, Br, Bc)",
        "N % Br == N % Bc == 0",
        "if blocks fit",
    ),
    Formula("standard backward", "8*N*d + 7*N**2", "backward.standard_backward_traffic(N, d)"),
    Formula(
        "tiled backward (FlashAttention-2)",
        "6*N*d + N + Tc*(4*N*d + 2*N)",
        "backward.flash_backward_traffic(N, d, Br, Bc)",
    ),
    Formula(
        "Algorithm 4 (FlashAttention)",
        "4*N*d + Tc*(5*N*d + 2*N)",
        "backward.flash_backward_traffic(N, d, Br, Bc, variant='Algorithm 4')",
    ),
    Formula(
        "split-KV decode",
        "2*N*d + rows*(splits*(3*d + 4) + d + 1)",
        "decode.split_kv_traffic(N, d, splits, group=rows)",
    ),
    Formula(
        "paged decode",
        "2*N*d + ceil(N / page) + rows*(2*d + 1)",
        "decode.paged_traffic(N, d, page, rows=rows)",
    ),
    Formula(
        "window and sinks, one query",
        "2*d*min(N, w + sinks) + 2*d + 1",
        "decode.window_traffic(1, d, w, sinks, Nk=N)",
    ),
    Formula("ring of R, all links", "2*N*d*(R - 1)", "sum(decode.ring_link_traffic(N, d, R))"),
)

OTHER = (
    Formula("blocks for M", "Bc = ceil(M / (4*d)); Br = min(Bc, d)",
            "Br, Bc = tiled.block_sizes(M, d)"),
    Formula("tiles on chip", "2*Bc*d + 2*Br*d + Br*Bc + 2*Br", "traffic.tile_elements(Br, Bc, d)"),
    Formula(
        "the same, backward",
        "4*Bc*d + 3*Br*d + 2*Br*Bc + 2*Br",
        "backward.backward_tile_elements(Br, Bc, d)",
    ),
    Formula("FLOPs forward", "4*N**2*d", "matmul_flops(tiled.flash_attention_q_outer)"),
    Formula("FLOPs standard backward", "8*N**2*d", "matmul_flops(backward.unfused_backward)"),
    Formula("FLOPs tiled backward", "10*N**2*d", "matmul_flops(backward.flash_backward)"),
    Formula(
        "bytes stored, standard",
        "h*e*(4*N*d + 2*N**2)",
        "traffic.attention_memory(N, d, h, method='standard', element_bytes=e)['total']",
    ),
    Formula(
        "bytes stored, tiled",
        "h*(4*N*d*e + 8*N)",
        "traffic.attention_memory(N, d, h, method='flash', element_bytes=e)['total']",
    ),
    Formula(
        "intensity, Q outside",
        "4*N**2*d / (e*(2*N*d + N + 2*N*d*Tr))",
        "traffic.arithmetic_intensity(N, d, Br, element_bytes=e)",
    ),
    Formula("ridge", "peak / bandwidth", "hardware.ridge(gpu)"),
    Formula(
        "time, at least",
        "max(work / peak, moved / bandwidth)",
        "max(hardware.time_bound(gpu, work, moved)[:2])",
    ),
    Formula(
        "tokens a device that hide its link",
        "ceil(e*peak / (2*link))",
        "decode.ring_overlap(peak, link, element_bytes=e)",
    ),
)  # fmt: skip

# N, d, Br, Bc. The first four fit.
SHAPES = (
    (256, 16, 32, 64),
    (512, 64, 64, 64),
    (512, 128, 128, 128),
    (1024, 64, 128, 32),
    (1000, 64, 64, 196),
    (300, 32, 48, 100),
    (7, 5, 3, 2),
    (1, 1, 1, 1),
)


def sizes(N, d, Br, Bc):
    """Everything that a closed form may name, at these sizes."""
    Tr, Tc = -(-N // Br), -(-N // Bc)
    block_mask = np.random.default_rng(N).random((Tr, Tc)) < 0.4
    rng = random.Random(N)
    some = {
        name: rng.randint(1, 9)
        for name in (
            "R_Q",
            "c_Q",
            "c_s",
            "R_KV",
            "sigma",
            "rows",
            "splits",
            "page",
            "w",
            "sinks",
            "R",
            "h",
        )
    }
    gpu = hardware.GPUS["A100-80"]
    return dict(
        N=N, d=d, Br=Br, Bc=Bc, Tr=Tr, Tc=Tc, M=4 * Bc * d - 1, e=rng.choice((1, 2, 4)), **some,
        block_mask=block_mask, s=Fraction(int(block_mask.sum()), Tr * Tc), gpu=gpu,
        peak=gpu.tensor_flops, bandwidth=gpu.bandwidth, work=10**12, moved=rng.randint(1, 10**10),
        link=1e11,
        ceil=math.ceil, sum=sum, min=min, max=max, range=range,
        matmul_flops=lambda loop: matmul_flops(loop, N, d, Br, Bc),
    )  # fmt: skip


def matmul_flops(loop, N, d, Br, Bc):
    """The FLOPs of the matrix products that a run of this loop counted."""
    hbm = memory.HBM()
    x = np.zeros((N, d), np.float32)
    if loop is backward.unfused_backward:
        loop(x, x, x, np.zeros((N, N), np.float32), x, Br, hbm=hbm)
    elif loop is backward.flash_backward:
        loop(x, x, x, x, np.zeros(N, np.float32), x, Br, Bc, hbm=hbm)
    else:
        loop(x, x, x, Br, Bc, hbm=hbm)
    return hbm.matmul_flops


def matrices(seed):
    """The arrays that a step may name. O and L are what the forward pass gives for Q, K and V."""
    rng = np.random.default_rng(seed)
    Nq, Nk, d = 5, 7, 4
    Q, dO = rng.standard_normal((2, Nq, d))
    K, V = rng.standard_normal((2, Nk, d))
    O, L = tiled.flash_attention_q_outer(Q, K, V, 2, 3)
    names = dict(Q=Q, K=K, V=V, S=Q @ K.T / math.sqrt(d), L=L[:, None], dO=dO, d=d)
    for suffix in ("", "_a", "_b"):
        names["m" + suffix] = 3 * rng.standard_normal((Nq, 1))
        names["l" + suffix] = 1 + rng.random((Nq, 1))
        names["O" + suffix] = rng.standard_normal((Nq, d))
    return names | dict(O=O)


ROW_BY_ROW = dict(
    sqrt=math.sqrt, exp=np.exp, log=np.log, max=np.maximum,
    rowmax=lambda x: x.max(axis=1, keepdims=True), rowsum=lambda x: x.sum(axis=1, keepdims=True),
    softmax=lambda x: np.exp(x) / np.exp(x).sum(axis=1, keepdims=True),
)  # fmt: skip


def prove(row):
    """Raise Refused unless the printed line gives what the library gives, wherever it must."""
    if isinstance(row, Step):
        places = [matrices(seed) | ROW_BY_ROW for seed in range(3)]
    else:
        places = [sizes(*shape) for shape in SHAPES]
        places = [place for place in places if eval(row.when, dict(place))]
    if len(places) < 3:
        raise Refused(f"{row.what}: only {len(places)} sizes to try it at")
    for place in places:
        printed, computed = run(row.text, place), run(row.library, place | LIBRARY)
        names = [name for name in computed if name in printed]
        if len(names) != len(computed):
            raise Refused(f"{row.what}: the line gives {[*printed]}, the library {[*computed]}")
        for name in names:
            if not same(printed[name], computed[name]):
                at = {k: place[k] for k in ("N", "d", "Br", "Bc") if k in place}
                raise Refused(
                    f"{row.what}: {row.text} gives {printed[name]} for {name or 'it'}, "
                    f"{row.library} gives {computed[name]}, at {at or 'random arrays'}"
                )


def run(line, place):
    """The names that the line assigns, with their values; an expression's value has the name ''."""
    names = assigned(line)
    line = line if names else f"result = {line}"
    scope = dict(place)
    exec(line, scope)
    return {name: scope[name] for name in names} or {"": scope["result"]}


def assigned(line):
    """The names on the left of the line's assignments."""
    found = []
    for statement in ast.parse(line).body:
        if isinstance(statement, ast.Assign):
            found += [n.id for n in ast.walk(statement.targets[0]) if isinstance(n, ast.Name)]
    return found


def same(a, b):
    """Exactly, for whole numbers; up to rounding for others. A column and a vector may be equal."""
    if isinstance(a, (int, Fraction)) and isinstance(b, (int, Fraction)):
        return a == b
    a, b = np.asarray(a, float), np.asarray(b, float)
    return a.size == b.size and np.allclose(a.reshape(b.shape), b, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- from a line of Python to LaTeX

MATRICES = {"Q", "K", "V", "S", "P", "O", "dO", "dP", "dS"}
GREEK = {"sigma": r"\sigma"}
# How tightly a part binds. TAIL: a product that ends in a sum, which takes in what follows it.
SUM, TAIL, PRODUCT, POWER, ATOM = range(1, 6)


def latex(line):
    """The line as the papers would print it, each statement a formula of its own."""
    parts = []
    for s in ast.parse(line).body:
        left = f"{name_latex(s.targets[0].id)} = " if isinstance(s, ast.Assign) else ""
        parts.append(f"${left}{term(s.value)}$")
    return ", ".join(parts)


def name_latex(name):
    stem, _, index = name.partition("_")
    if not index and len(name) == 2 and name[0] in "BTN":
        stem, index = name
    if stem in GREEK:
        stem = GREEK[stem]
    elif len(stem) == 2 and stem[0] == "d":
        stem = rf"\mathrm{{d}}{stem[1]}"
    elif len(stem) > 1:
        stem = rf"\text{{{stem}}}"
    if len(index) > 1 and index != "KV":
        index = rf"\text{{{index}}}"
    index = index if len(index) == 1 else f"{{{index}}}" * bool(index)
    return f"{stem}_{index}" if index else stem


def term(node, least=SUM):
    """A part of an expression; in brackets if it binds less than its place asks for."""
    text, binds = _term(node)
    return text if binds >= least else f"({text})"


def _term(node):
    match node:
        case ast.Constant(value=int(value)):
            return str(value), ATOM
        case ast.Name(id=name):
            return name_latex(name), ATOM
        case ast.Attribute(value=value, attr="T"):
            return f"{term(value, ATOM)}^T", ATOM
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return f"{term(left)} + {term(right, TAIL)}", SUM
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return f"{term(left)} - {term(right, TAIL)}", SUM
        case ast.BinOp(left=ast.Name(id=a) as left, op=ast.Mult(), right=right) if a in MATRICES:
            return rf"{term(left)} \circ {term(right, POWER)}", PRODUCT
        case ast.BinOp(left=left, op=(ast.Mult() | ast.MatMult()) as op, right=right):
            return product(left, op, right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return f"{term(left, PRODUCT)} / {term(right, POWER)}", PRODUCT
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
            return rf"\lfloor {term(left)} / {term(right, POWER)} \rfloor", ATOM
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=power)):
            return f"{term(left, ATOM)}^{power}", POWER
        case ast.Call(func=ast.Name(id="sqrt"), args=[x]):
            return rf"\sqrt{{{term(x)}}}", ATOM
        case ast.Call(func=ast.Name(id="exp"), args=[x]):
            return f"e^{{{term(x)}}}", ATOM
        case ast.Call(func=ast.Name(id="ceil"), args=[x]):
            return rf"\lceil {term(x)} \rceil", ATOM
        case ast.Call(func=ast.Name(id="sum"), args=[ast.GeneratorExp(elt=x, generators=[g])]):
            over, last = name_latex(g.target.id), term(g.iter.args[0])
            return rf"\sum_{{{over}=0}}^{{{last}-1}} {term(x, PRODUCT)}", TAIL
        case ast.Call(func=ast.Name(id=("max" | "min" | "log") as name), args=args):
            return rf"\{name}({', '.join(map(term, args))})", ATOM
        case ast.Call(func=ast.Name(id=name), args=[x]):
            return rf"\text{{{name}}}({term(x)})", ATOM
    raise Refused(f"no way to print {ast.unparse(node)}")


def product(left, op, right):
    """Factors side by side, as one writes them; a dot beside a word."""
    ends_in_sum = isinstance(right, ast.Call) and right.func.id == "sum"
    quotient = isinstance(left, ast.BinOp) and isinstance(left.op, ast.Div)  # a / bc is a / (bc)
    a = term(left, ATOM if quotient else PRODUCT)
    b = term(right, TAIL if ends_in_sum else POWER)
    nearest = left.right if isinstance(left, ast.BinOp) else left
    if any(isinstance(x, ast.Name) and name_latex(x.id)[:5] == r"\text" for x in (nearest, right)):
        between = r" \cdot "
    elif isinstance(op, ast.MatMult):
        between = r"\ "
    else:
        between = " " if re.search(r"\\[a-z]+$", a) or b[0] == "\\" else ""
    return a + between + b, TAIL if ends_in_sum else PRODUCT


# ---------------------------------------------------------------- when to use what


def less(more, fewer, what=""):
    """How many times less, as words; Refused if it is not less."""
    if not more > fewer:
        raise Refused(f"the sheet says that {fewer} is less than {more}: {what}")
    ratio = more / fewer
    return f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}"


def percent(part, whole):
    """part on top of whole, in percent; Refused if it takes away."""
    if part < 0:
        raise Refused(f"the sheet says that {part} comes on top of {whole}")
    return f"{100 * part / whole:.2g}%"


def training():
    N, d = 4096, 64
    standard = traffic.standard_traffic(N, d) + backward.standard_backward_traffic(N, d)
    ours = traffic.q_outer_traffic(N, d, 128, 128)
    ours += backward.flash_backward_traffic(N, d, 128, 128)
    small = (64, 16, 16, 16)
    forward, unfused, rebuilt = (
        matmul_flops(loop, *small) // (2 * 64 * 64 * 16)
        for loop in (tiled.flash_attention, backward.unfused_backward, backward.flash_backward)
    )
    return (
        f"N = 4096, d = 64, blocks of 128: {less(standard, ours)}x less traffic forward and "
        f"backward, for {forward + rebuilt} matrix products in place of {forward + unfused}"
    )


def prefill():
    N, d = 4096, 64
    flops = 4 * N * N * d
    before = flops / (2 * traffic.standard_traffic(N, d))
    after = traffic.arithmetic_intensity(N, d, 128)
    causal = traffic.q_outer_traffic(N, d, 128, 128, True)
    less(after, before)
    dense = traffic.q_outer_traffic(N, d, 128, 128)
    return (
        f"{before:.0f} to {after:.0f} FLOP/byte (an A100-80 waits for memory below "
        f"{hardware.ridge('A100-80'):.0f}); tiles that causality hides are skipped: "
        f"{less(dense, causal)}x less"
    )


def small_memory():
    N, found = 4096, []
    for d in (64, 128):
        standard, M = traffic.standard_traffic(N, d), 1
        while traffic.flash_traffic(N, d, *tiled.block_sizes(M, d)) >= standard:
            M += 1
        found.append(f"{M:,} (d = {d})")
    return f"N = 4096: Algorithm 1 moves less than standard only from M = {' or '.join(found)}"


def long_cache():
    Nk, d, splits = 65_536, 128, 16
    standard = traffic.standard_traffic(1, d, Nk=Nk)
    one, many = (decode.split_kv_traffic(Nk, d, n) for n in (1, splits))
    intensity = 4 * Nk * d / (2 * many)
    if not intensity < min(map(hardware.ridge, hardware.GPUS)):
        raise Refused("the sheet says that decode waits for memory")
    return (
        f"65,536 keys, d = 128: {intensity:.1f} FLOP/byte, and standard moves only "
        f"{percent(standard - one, one)} more: no bytes to save; {splits} splits cost "
        f"{percent(many - one, one)} and give a head {splits} thread blocks, not 1"
    )


def grouped():
    each = 4 * decode.split_kv_traffic(65_536, 128, 1)
    packed = decode.split_kv_traffic(65_536, 128, 1, group=4)
    return f"4 query heads on a KV head: {less(each, packed)}x less than K and V for each of them"


def pages():
    length, d, page = 65_536, 128, 16
    plain = decode.paged_traffic(length, d, length)
    return (
        f"pages of {page}: the block table costs "
        f"{percent(decode.paged_traffic(length, d, page) - plain, plain)} of traffic, and at "
        f"most {page - 1} slots of a sequence stay empty"
    )


def endless():
    full = decode.window_traffic(1, 128, 65_536, Nk=65_536)
    window = decode.window_traffic(1, 128, 1024, 4, Nk=65_536)
    if decode.window_traffic(1, 128, 1024, 4, Nk=10**6) != window:
        raise Refused("the sheet says that a window's traffic stays the same")
    return (
        f"1024 keys and 4 sinks at 65,536: {less(full, window)}x less, and no more later; the "
        "other keys are gone, so it is another function"
    )


def pattern():
    N, d, B = 4096, 64, 128
    mask = sparse.butterfly(N // B)
    dense = traffic.q_outer_traffic(N, d, B, B)
    ours = sparse.block_sparse_q_outer_traffic(N, d, mask, B, B)
    a, b = sparse.strided(1024, 128)
    tokens, seen = a | b, sparse.causal(1024 // 128)
    touched = (sparse.touched(tokens, 128, 128) & seen).sum() / seen.sum()
    if touched != 1:
        raise Refused("the sheet says that a strided pattern of tokens saves no tile")
    return (
        f"butterfly of {N // B} blocks: density {sparse.density(mask):.3f}, {less(dense, ours)}x "
        f"less; strided by single tokens (l = 128, N = 1024) it touches all causal 128-tiles"
    )


def many_gpus():
    N, d, R = 65_536, 128, 8
    sent = decode.ring_link_traffic(N, d, R)
    if len(set(sent)) != 1:
        raise Refused("the sheet says that all devices of the ring send the same")
    need = decode.ring_overlap(hardware.GPUS["H100"].tensor_flops, 1e11)
    return (
        f"N = 65,536, d = 128, R = 8: {sent[0]:,} elements a device; hidden behind the work from "
        f"{need:,} tokens a device (H100, a link of 100 GB/s)"
    )


# situation, what to use, the claim, the notebook
DECISIONS = (
    ("Training", "Q outside; backward from O and L", training, "08"),
    ("Prefill: many queries at once", "Q outside, causal tiles skipped", prefill, "09"),
    ("Little on-chip memory, or large d", "compute the traffic first", small_memory, "06"),
    ("Decode: one query, a long cache", "split-KV", long_cache, "12"),
    ("Decode with GQA", "the group's queries in one tile", grouped, "12"),
    ("Many caches of unknown length", "pages", pages, "12"),
    ("A stream without end", "window and sinks", endless, "12"),
    ("Sparse attention", "a pattern of whole tiles", pattern, "10"),
    ("Longer than one GPU holds", "a ring", many_gpus, "12"),
)


# ---------------------------------------------------------------- pages


def table(*rows):
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def formula_rows(formulas):
    for row in formulas:
        prove(row)
        library = re.search(r"\w+\.(\w+)\(", row.library)
        name = library[1] if library else "HBM.matmul_flops"
        what = f"{row.what} ({row.words})" if row.words else row.what
        yield what, latex(row.text), f"`{name}`"


def gpu_rows():
    columns = {
        "tensor TFLOP/s": "tensor TFLOP/s",
        "fp32 TFLOP/s": "fp32 TFLOP/s",
        "bandwidth GB/s": "GB/s",
        "memory GiB": "memory, GiB",
        "SMs": "SMs",
        "shared KiB/block": "SRAM/block, KiB",
        "L2 MiB": "L2, MiB",
        "ridge FLOP/byte": "ridge, FLOP/byte",
    }
    yield ["GPU", *columns.values()]
    for row in hardware.table():
        numbers = (round(row[name], 1) for name in columns)
        yield [row["GPU"].removeprefix("NVIDIA "), *(f"{number:g}" for number in numbers)]


def size_rows(N=4096):
    def counts(d):
        standard, stored = traffic.standard_traffic(N, d), 2 * N * N
        blocks = tiled.block_sizes(50_000, d)
        yield "standard", standard, standard
        yield "Algorithm 1, M = 50,000", traffic.flash_traffic(N, d, *blocks), standard
        yield "Q outside, blocks of 128", traffic.q_outer_traffic(N, d, 128, 128), standard
        yield "each once", traffic.general_traffic(N, d), standard
        standard = backward.standard_backward_traffic(N, d)
        yield "standard backward", standard, standard
        tiles = backward.flash_backward_traffic(N, d, 128, 128)
        yield "tiled backward, blocks of 128", tiles, standard
        parts = traffic.attention_memory(N, d, 1, method="standard", element_bytes=1)
        yield "stored: S and P", parts["S"] + parts["P"], stored
        yield "stored: Q, K, V, O", parts["QKVO"], stored

    yield ["elements of a head, N = 4096", "d = 64", "MiB", "less", "d = 128", "MiB", "less"]
    for small, large in zip(counts(64), counts(128), strict=True):
        cells = [small[0]]
        for _, elements, standard in (small, large):
            cells += [f"{elements:,}", f"{2 * elements / 2**20:.1f}", f"{standard / elements:.2f}x"]
        yield cells


def cheat_sheet():
    """The page, as Markdown. Raises Refused if it would not be true."""
    files = {stem[:2]: stem for stem, *_ in NOTEBOOKS}
    decisions = [("When", "Use", "Because", "See")]
    for situation, use, claim, number in DECISIONS:
        link = f"[{number}](../notebooks/{files[number]}.ipynb)"
        decisions.append((situation, use, claim(), link))
    head = ("", "formula", "in attention_lib")
    return "\n\n".join(
        [
            GENERATED,
            "# Cheat sheet",
            "Symbols are in the [glossary](glossary.md). Every formula was held against the "
            "library when this page was made. m, l, L and D are columns; "
            r"$\circ$ is element by element.",
            "## The algebra",
            table(head, *formula_rows(STEPS)),
            "## Traffic: elements that one head moves, N queries and N keys (decode: N keys)",
            "Tr = ceil(N / Br), Tc = ceil(N / Bc); s: density of the block mask; rows: the queries "
            "that share a KV head's keys; w: window.",
            table(head, *formula_rows(TRAFFIC)),
            "## Sizes, work, limits (e: bytes an element, h: heads)",
            table(head, *formula_rows(OTHER)),
            "## Numbers (MiB at 2 bytes)",
            table(*size_rows()),
            "## GPUs: peaks from documents; sources in `attention_lib.hardware`",
            table(*gpu_rows()),
            "## When to use what",
            table(*decisions),
        ]
    ) + "\n"  # fmt: skip


def glossary_page():
    titles = {stem[:2]: (stem, title) for stem, title, *_ in NOTEBOOKS}
    rows = [("Term", "Symbol", "Meaning", "Unit or shape", "Taught in", "In attention_lib")]
    for t in glossary.TERMS:
        stem, title = titles[t.notebook]
        link = f"[{t.notebook} · {title}](../notebooks/{stem}.ipynb)"
        symbol = ", ".join(f"`{x}`" for x in t.symbol.split(", ") if x)
        library = f"`{t.library}`" if t.library else ""
        rows.append((f"**{t.term}**", symbol, t.meaning, t.unit, link, library))
    return "\n\n".join(
        [
            GENERATED,
            "# Glossary",
            "The words and symbols of the course. Formulas and numbers are on the "
            "[cheat sheet](cheat_sheet.md).",
            table(*rows),
        ]
    ) + "\n"  # fmt: skip


PAGES = {"docs/cheat_sheet.md": cheat_sheet, "docs/glossary.md": glossary_page}

CSS = """
@page { margin: 8mm }
body { font: 6.8pt/1.08 sans-serif; margin: 0 }
h1 { font-size: 11pt; margin: 0 } h2 { font-size: 8pt; margin: 0.9mm 0 0.3mm } p { margin: 0 }
table { border-collapse: collapse; width: 100% }
th, td { border-bottom: 0.2pt solid #999; padding: 0.1mm 1mm; text-align: left }
a { color: inherit } .anchor-link { display: none }
"""


def printable():
    """The cheat sheet as one HTML page for A4 or Letter; formulas as MathML, no network."""
    from nbconvert.filters.markdown_mistune import markdown2html_mistune

    from tools.grading.pages import with_formulas

    body = with_formulas(markdown2html_mistune(cheat_sheet()))
    return (
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>Cheat sheet</title>'
        f"<style>{CSS}</style><body>{body}</body></html>\n"
    )


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="report only, write nothing")
    parser.add_argument("--print", type=Path, metavar="FILE", help="write the sheet for a printer")
    options = parser.parse_args(arguments)
    try:
        pages = {ROOT / name: page() for name, page in PAGES.items()}
        if options.print:
            pages = {options.print: printable()}
    except Refused as reason:
        print(f"nothing written. {reason}", file=sys.stderr)
        return 1
    changed = [p for p, text in pages.items() if not p.is_file() or p.read_text("utf-8") != text]
    for path in changed:
        print("would change" if options.check else "wrote", path)
        if not options.check:
            path.write_text(pages[path], encoding="utf-8", newline="\n")
    return int(options.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
