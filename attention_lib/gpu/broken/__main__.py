"""Launch one of the kernels on a GPU, for compute-sanitizer to watch; see __init__.py."""

import sys
from pathlib import Path

from attention_lib import gpu
from attention_lib.gpu import broken
from attention_lib.gpu.own import on_gpu


def main(name, file=None):
    if not gpu.available():
        raise SystemExit(f"NoGPU: {gpu.missing()}.")
    import cupy

    cupy.cuda.set_allocator(None)  # in a pool an access past the end may hit a neighbour
    text = broken.source(name) if file is None else Path(file).read_text(encoding="utf-8")
    outputs = on_gpu(text, broken.example(name))
    print("the GPU has no room for this tensor" if outputs is None else outputs)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[1] not in broken.NAMES:
        names = "|".join(broken.NAMES)
        raise SystemExit(f"usage: python -m attention_lib.gpu.broken {names} [FILE]")
    main(*sys.argv[1:])
