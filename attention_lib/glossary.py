"""The words and symbols of the course, as data: what each means, and where it is taught.

docs/glossary.md is made of it (tools/reference.py). Symbols are the papers' (FlashAttention, arXiv
2205.14135; FlashAttention-2, arXiv 2307.08691) and the names in this library. Sizes are elements
unless a unit says otherwise.
"""

from typing import NamedTuple


class Term(NamedTuple):
    """One entry. meaning is one sentence that does without the word itself."""

    term: str
    meaning: str
    notebook: str  # its number: where the term is taught
    symbol: str = ""  # as in formulas and code; several are separated by ", "
    unit: str = ""  # the unit of a number, or the shape of an array
    library: str = ""  # the object in attention_lib, as module.name


# In alphabetical order.
TERMS = (
    Term(
        "account",
        "A statement of how often each array crosses a boundary between two memories.",
        "11",
        library="traffic.ACCOUNTS",
    ),
    Term(
        "Algorithm 1",
        "FlashAttention's loop: K/V blocks outside, Q blocks inside.",
        "03",
        library="tiled.flash_attention",
    ),
    Term(
        "align",
        "Which corner of the scores the causal diagonal starts from, if Nq and Nk differ.",
        "03",
        library="reference.causal_offset",
    ),
    Term(
        "arithmetic intensity",
        "The arithmetic that a piece of work does for each byte that it moves.",
        "01",
        unit="FLOP/byte",
        library="traffic.arithmetic_intensity",
    ),
    Term(
        "atomic add",
        "A read, a sum and a write of one number that no other thread block can come between.",
        "09",
    ),
    Term(
        "attention",
        "A weighted mean of the rows of V for each query, with weights from its scores.",
        "01",
        library="reference.standard_attention",
    ),
    Term(
        "attention sinks",
        "The first few keys of a sequence, kept visible when the window has moved on.",
        "12",
        library="decode.window_attention",
    ),
    Term(
        "backward pass",
        "The computation of the gradients of a loss from the gradient of the output.",
        "08",
        library="backward.flash_backward",
    ),
    Term(
        "bandwidth",
        "How much a memory delivers in a second.",
        "01",
        unit="bytes/s",
        library="hardware.GPU",
    ),
    Term(
        "bank",
        "One of the 32 columns of shared memory, 4 bytes wide; each gives one address at a time.",
        "15",
        library="gpu.fragments.ldmatrix_passes",
    ),
    Term(
        "barrier",
        "A place in a kernel where the threads of a block wait until all of them have come.",
        "14",
        library="gpu.standin.run_block",
    ),
    Term(
        "block",
        "Neighbouring rows of Q, or of K and V, that are loaded together.",
        "03",
        symbol="Br, Bc",
        unit="rows",
        library="tiled.blocks",
    ),
    Term(
        "block mask",
        "A small boolean array that says which tiles of scores are computed.",
        "10",
        unit="(Tr, Tc)",
        library="tiled.which_tiles",
    ),
    Term(
        "block rule",
        "The paper's choice of Bc and Br from the size of the chip's memory and from d.",
        "06",
        library="tiled.block_sizes",
    ),
    Term(
        "block table",
        "The list of a sequence's pages, in the order of its tokens.",
        "12",
        library="decode.PagedKVCache",
    ),
    Term(
        "butterfly",
        "A pattern in which i sees j if they are equal or differ in one binary digit.",
        "10",
        library="sparse.butterfly",
    ),
    Term(
        "causal mask",
        "The rule that hides every key which comes after the query.",
        "03",
        library="reference.hide",
    ),
    Term(
        "closed form",
        "A formula that gives a count without running the loop.",
        "04",
        library="traffic.flash_traffic",
    ),
    Term(
        "D",
        "The dot product of a row of dO and the same row of O: what softmax's gradient needs.",
        "08",
        symbol="D",
        unit="(Nq,)",
        library="backward.flash_backward",
    ),
    Term(
        "decode",
        "The phase in which a model makes one token after the other: one query, many keys.",
        "12",
        library="decode.split_kv_attention",
    ),
    Term(
        "density",
        "The fraction of the tiles, or of the scores, that a pattern keeps.",
        "10",
        symbol="s",
        unit="0 to 1",
        library="sparse.density",
    ),
    Term(
        "distributed shared memory",
        "The shared memory of all blocks of a cluster: each of their threads has access.",
        "23",
    ),
    Term(
        "double buffer",
        "Two places for a tile: one is worked on while the other is filled.",
        "15",
    ),
    Term(
        "DRAM",
        "The chips that hold the GPU's large memory, behind the L2 cache.",
        "11",
        unit="bytes",
    ),
    Term(
        "dropout",
        "Setting a random part of P to zero during training.",
        "07",
    ),
    Term(
        "fixed pattern",
        "One's own run of l tokens, and the last c tokens of each run.",
        "10",
        library="sparse.fixed",
    ),
    Term(
        "FlashAttention-2 order",
        "The loop with Q blocks outside, K/V blocks inside, and one division for each row.",
        "09",
        library="tiled.flash_attention_q_outer",
    ),
    Term(
        "FLOP",
        "One addition or one multiplication of two numbers.",
        "01",
        library="memory.HBM.matmul",
    ),
    Term(
        "fragment",
        "The few numbers of a small matrix that one lane holds in its registers.",
        "15",
        library="gpu.fragments.split",
    ),
    Term(
        "fused kernel",
        "One program on the GPU that does several steps without HBM between them.",
        "07",
    ),
    Term(
        "GQA packing",
        "The queries of all heads that share K and V, as the rows of one tile.",
        "23",
        library="decode.packed_attention",
    ),
    Term(
        "gradients",
        "How much a loss changes for each element of an array.",
        "08",
        symbol="dQ, dK, dV, dO, dS, dP",
        unit="shape of Q, K, V, O, S, P",
        library="reference.standard_backward",
    ),
    Term(
        "grouped-query attention (GQA)",
        "Several query heads share one head of K and V.",
        "12",
        library="decode.packed_attention",
    ),
    Term(
        "HBM",
        "The large memory of a GPU, outside the chip that computes.",
        "01",
        unit="elements, or bytes",
        library="memory.HBM",
    ),
    Term(
        "head",
        "One of the independent copies of the operation that a layer runs side by side.",
        "07",
        symbol="h",
        library="heads.for_each_head",
    ),
    Term(
        "head dimension",
        "The length of one row of Q, K, V and O.",
        "01",
        symbol="d",
        unit="elements",
    ),
    Term(
        "kernel",
        "A program that the GPU runs once over all its data, from HBM to HBM.",
        "01",
        library="memory.HBM.launch",
    ),
    Term(
        "keys",
        "The rows that queries are compared with.",
        "01",
        symbol="K",
        unit="(Nk, d)",
    ),
    Term(
        "KV cache",
        "K and V of all tokens so far, kept for the tokens to come.",
        "12",
        library="decode.PagedKVCache",
    ),
    Term(
        "L2 cache",
        "The memory on the chip that all SMs share, between them and DRAM.",
        "11",
        unit="bytes",
        library="hardware.GPU",
    ),
    Term(
        "lane",
        "The number of a thread within its warp.",
        "15",
        unit="0 to 31",
    ),
    Term(
        "launch",
        "The start of a kernel with a number of blocks and a number of threads in each.",
        "14",
        library="gpu.standin.run_grid",
    ),
    Term(
        "load and store",
        "The copy of a tile from HBM to the chip, and back.",
        "01",
        library="memory.Tensor.load",
    ),
    Term(
        "local pattern",
        "Oneself and a fixed number of keys before.",
        "10",
        library="sparse.local",
    ),
    Term(
        "log-sum-exp",
        "m + log(l): the one number a row that the backward pass needs to make P again.",
        "02",
        symbol="L",
        unit="(Nq,)",
        library="online.finish",
    ),
    Term(
        "loop order",
        "Which of the two block loops is outside: K/V or Q.",
        "09",
    ),
    Term(
        "mask",
        "Which keys each query may see: booleans, or numbers added to the scores (-inf hides).",
        "07",
        unit="(Nq, Nk)",
        library="reference.hide",
    ),
    Term(
        "matmul FLOPs",
        "The additions and multiplications of the matrix products alone.",
        "03",
        unit="FLOP",
        library="memory.HBM.matmul",
    ),
    Term(
        "mbarrier",
        "A counter in shared memory at which threads wait for a copy's bytes, or for each other.",
        "19",
    ),
    Term(
        "merge",
        "Two states over different keys become the state over all of them.",
        "02",
        library="online.merge",
    ),
    Term(
        "multi-query attention (MQA)",
        "All query heads share one head of K and V.",
        "12",
        library="decode.packed_attention",
    ),
    Term(
        "occupancy",
        "The threads that an SM can hold at a time, over the most that it could.",
        "14",
        unit="0 to 1, or %",
        library="gpu.occupancy.occupancy",
    ),
    Term(
        "on-chip memory size",
        "How much the paper's algorithm may hold at a time.",
        "06",
        symbol="M",
        unit="elements",
        library="tiled.block_sizes",
    ),
    Term(
        "online softmax",
        "A row's weights from one piece of it at a time, by way of m and l.",
        "02",
        library="online.update",
    ),
    Term(
        "output",
        "The result: one row for each query.",
        "01",
        symbol="O",
        unit="(Nq, d)",
    ),
    Term(
        "page",
        "A stretch of the KV cache with room for a fixed number of tokens.",
        "12",
        unit="tokens",
        library="decode.PagedKVCache",
    ),
    Term(
        "partial result",
        "The state (m, l, O) over some of the keys.",
        "12",
        symbol="m, l, O",
        unit="(Nq,), (Nq,), (Nq, d)",
        library="online.State",
    ),
    Term(
        "pass",
        "One turn of shared memory, in which each bank gives at most one address.",
        "15",
        unit="128 bytes",
        library="gpu.fragments.ldmatrix_passes",
    ),
    Term(
        "passes",
        "How often a loop goes over what belongs to the queries (c_Q arrays), or to the keys.",
        "11",
        symbol="R_Q, c_Q, R_KV",
        library="traffic.general_traffic",
    ),
    Term(
        "peak memory",
        "The most that is held at one moment.",
        "05",
        unit="elements, or bytes",
        library="memory.HBM.peak_on_chip",
    ),
    Term(
        "persistent kernel",
        "A launch whose blocks take one piece of work after another until none is left.",
        "20",
    ),
    Term(
        "ping-pong",
        "Two groups of warps in turns: one multiplies while the other computes its exponentials.",
        "21",
    ),
    Term(
        "prefill",
        "The phase in which a model reads all tokens of a prompt at once.",
        "11",
    ),
    Term(
        "probabilities",
        "The weights of the keys: softmax of each row of S.",
        "01",
        symbol="P",
        unit="(Nq, Nk)",
        library="reference.softmax",
    ),
    Term(
        "queries",
        "The rows that ask: each gets one row of the output.",
        "01",
        symbol="Q",
        unit="(Nq, d)",
    ),
    Term(
        "race",
        "Two threads use one element, one of them writes it, and nothing keeps them in order.",
        "14",
        library="gpu.standin.Report",
    ),
    Term(
        "ragged",
        "Said of a length that is not a multiple of the block: the last block is shorter.",
        "03",
    ),
    Term(
        "recomputation",
        "Making something again in place of storing it.",
        "05",
        library="backward.backward_tiles",
    ),
    Term(
        "register",
        "The memory inside an SM that arithmetic reads directly.",
        "06",
    ),
    Term(
        "rescale",
        "Multiply l and O by exp(m_old - m_new) when the maximum has risen.",
        "02",
        library="online.update",
    ),
    Term(
        "ridge",
        "The arithmetic intensity at which computing and loading take equally long.",
        "01",
        unit="FLOP/byte",
        library="hardware.ridge",
    ),
    Term(
        "ring attention",
        "Devices in a circle pass K/V blocks on, and each merges what comes by.",
        "12",
        library="decode.ring_attention",
    ),
    Term(
        "roofline",
        "The most FLOP/s that work of a given arithmetic intensity can reach on a GPU.",
        "01",
        unit="FLOP/s",
        library="hardware.roofline",
    ),
    Term(
        "row maximum",
        "The largest score that a query has met so far.",
        "02",
        symbol="m",
        unit="(Nq,)",
        library="online.State",
    ),
    Term(
        "row sum",
        "The sum of exp(score - m) that a query has met so far.",
        "02",
        symbol="l",
        unit="(Nq,)",
        library="online.State",
    ),
    Term(
        "scores",
        "The dot products of queries and keys, divided by sqrt(d).",
        "01",
        symbol="S",
        unit="(Nq, Nk)",
    ),
    Term(
        "sequence length",
        "The number of tokens: Nq on the side of the queries, Nk on that of the keys.",
        "01",
        symbol="N, Nq, Nk",
        unit="tokens",
    ),
    Term(
        "setmaxnreg",
        "The instruction with which a warpgroup gives registers back, or takes more of them.",
        "20",
    ),
    Term(
        "share of the peak",
        "The FLOP/s that were reached, divided by those that the GPU has on paper (utilisation).",
        "13",
        unit="0 to 1, or %",
        library="hardware.peak",
    ),
    Term(
        "shared memory",
        "The part of an SM's memory that a thread block manages by itself.",
        "06",
        unit="bytes",
        library="hardware.sram_use",
    ),
    Term(
        "sliding window",
        "Each query sees only the last few keys, itself among them.",
        "12",
        symbol="w",
        unit="tokens",
        library="decode.window_attention",
    ),
    Term(
        "softmax",
        "The exponential of each number in a row, divided by the row's sum of them.",
        "02",
        library="reference.softmax",
    ),
    Term(
        "spill",
        "Variables that find no free register and go to a slower memory.",
        "06",
    ),
    Term(
        "split-KV",
        "The keys in parts that are worked on at the same time, and then merged.",
        "12",
        library="decode.split_kv_attention",
    ),
    Term(
        "SRAM",
        "The small and fast memory on the chip.",
        "01",
        unit="elements, or bytes",
        library="hardware.sram_use",
    ),
    Term(
        "stand-in",
        "A model of a GPU on the CPU that runs a kernel and watches every access.",
        "14",
        library="gpu.standin.run_grid",
    ),
    Term(
        "standard attention",
        "Three kernels, with S and P in HBM between them.",
        "01",
        library="tiled.unfused_attention",
    ),
    Term(
        "statistics",
        "The c_s numbers that cross for each row beside Q and O: l and m, or L.",
        "11",
        symbol="c_s",
    ),
    Term(
        "streaming multiprocessor (SM)",
        "One of the many processors of a GPU, with registers and SRAM of its own.",
        "01",
        library="hardware.GPU",
    ),
    Term(
        "strided pattern",
        "The last l tokens, and every l-th token before.",
        "10",
        library="sparse.strided",
    ),
    Term(
        "tail guard",
        "The test that keeps a thread from an element behind the end of the data.",
        "14",
    ),
    Term(
        "tensor core",
        "The unit of an SM that multiplies small matrices.",
        "01",
        unit="FLOP/s",
        library="hardware.peak",
    ),
    Term(
        "thread block",
        "The threads that run together on one SM and share its memory.",
        "01",
        library="hardware.blocks_per_sm",
    ),
    Term(
        "thread block cluster",
        "A few blocks that run at the same time, on neighbouring SMs, and can wait for each other.",
        "23",
    ),
    Term(
        "tile",
        "The part of a matrix that belongs to one block of rows and one of columns.",
        "03",
        unit="(Br, Bc) of S; (Br, d) or (Bc, d)",
        library="traffic.tile_elements",
    ),
    Term(
        "tile counts",
        "How many blocks cover the queries, and how many cover the keys.",
        "03",
        symbol="Tr, Tc, T",
        unit="ceil(N / Br), ceil(N / Bc)",
    ),
    Term(
        "TMA",
        "Hopper's copy engine, which moves a whole tile at one thread's request.",
        "19",
    ),
    Term(
        "traffic",
        "What crosses between HBM and the chip, in both directions together.",
        "04",
        unit="elements, or bytes",
        library="traffic.general_traffic",
    ),
    Term(
        "values",
        "The rows that are averaged.",
        "01",
        symbol="V",
        unit="(Nk, d)",
    ),
    Term(
        "warp",
        "32 threads of a thread block that run in step.",
        "09",
    ),
    Term(
        "warpgroup",
        "Four warps, 128 threads, that order a matrix product together.",
        "19",
    ),
    Term(
        "wgmma",
        "Hopper's matrix product of 128 threads, which reads shared memory and runs on its own.",
        "19",
    ),
    Term(
        "XOR swizzle",
        "A permutation of the pieces of each row, so that a column lies in different banks.",
        "15",
        library="gpu.fragments.swizzled",
    ),
)


def symbols():
    """All symbols of the glossary: symbol -> its terms."""
    found = {}
    for entry in TERMS:
        for symbol in filter(None, entry.symbol.split(", ")):
            found.setdefault(symbol, []).append(entry.term)
    return found
