"""How many blocks of threads one SM holds at a time: the room there is, over what a block takes.

Limits of an SM: 65,536 registers, 2048 threads, 32 blocks, and its shared memory. A warp gets its
registers in pieces of 256, and each block takes 1 KiB of shared memory for the system.
Source: NVIDIA, Hopper Tuning Guide, sections 1.4.1.1 and 1.4.2.4; CUDA C++ Programming Guide,
"Technical Specifications per Compute Capability" (8.0, 9.0 and 10.0 are alike).
"""

from attention_lib.hardware import find_gpu
from attention_lib.inputs import check_positive_int

REGISTERS, THREADS, BLOCKS, SYSTEM = 65_536, 2048, 32, 1024


def room(registers, threads, shared, gpu="H200"):
    """Blocks that one SM has room for, by each of its limits: {limit: blocks}.

    registers: of a thread; threads: of a block; shared: bytes of a block. Raises ValueError.
    """
    check_positive_int("registers", registers)
    check_positive_int("threads", threads)
    check_positive_int("shared", shared, 0)
    warps = -(-threads // 32)
    of_a_warp = -(-32 * registers // 256) * 256
    return {
        "registers": REGISTERS // (of_a_warp * warps),
        "shared memory": find_gpu(gpu).sram_per_sm // (shared + SYSTEM),
        "threads": THREADS // (32 * warps),
        "blocks": BLOCKS,
    }


def blocks_per_sm(registers, threads, shared, gpu="H200"):
    """Blocks that one SM holds at a time: the smallest of its limits."""
    return min(room(registers, threads, shared, gpu).values())


def occupancy(registers, threads, shared, gpu="H200"):
    """Threads that one SM holds at a time, over the 2048 that it could."""
    return blocks_per_sm(registers, threads, shared, gpu) * threads / THREADS
