"""attention_lib: the library behind the course "FlashAttention and Memory-Efficient Kernels".

Read the modules in this order; each opens with what it is for and where its algorithm comes from.

    reference   softmax, standard attention and its gradients: the definition
    online      the state (m, l, O), which takes attention one piece at a time
    tiled       FlashAttention's loops, and the unfused loop they replace
    memory      HBM: every load and store of those loops, counted
    traffic     the closed forms that the counts must equal
    backward    the gradients, tiled, with P rebuilt from O and L; its closed forms
    sparse      masks over tiles, and the loops that skip what they leave out; its closed forms
    decode      one query against a long cache: split, packed, paged, windowed, in a ring
    hardware    GPUs as data, the roofline, what fits in SRAM
"""

from attention_lib.backward import (
    flash_backward,
    flash_backward_traffic,
    standard_backward_traffic,
)
from attention_lib.hardware import GPUS, ridge, roofline, your_gpu
from attention_lib.memory import HBM, OnChipOverflow
from attention_lib.reference import softmax, standard_attention, standard_backward
from attention_lib.sparse import block_sparse_attention, block_sparse_attention_q_outer
from attention_lib.tiled import (
    block_sizes,
    flash_attention,
    flash_attention_q_outer,
    unfused_attention,
)
from attention_lib.traffic import flash_traffic, q_outer_traffic, standard_traffic

__version__ = "0.1.0"
__all__ = [
    "GPUS",
    "HBM",
    "OnChipOverflow",
    "block_sizes",
    "block_sparse_attention",
    "block_sparse_attention_q_outer",
    "flash_attention",
    "flash_attention_q_outer",
    "flash_backward",
    "flash_backward_traffic",
    "flash_traffic",
    "q_outer_traffic",
    "ridge",
    "roofline",
    "softmax",
    "standard_attention",
    "standard_backward",
    "standard_backward_traffic",
    "standard_traffic",
    "unfused_attention",
    "your_gpu",
]
