"""A small GPT, trained with the course's kernels and with the framework's: do the losses agree?

    python -m attention_lib.gpu.train                train, and print the losses
    python -m attention_lib.gpu.train --recorded     print those that were recorded
    python -m attention_lib.gpu.train --out FILE     train, and write a recording

The text is the source of this library: the model learns to write Python. Two layers, 300 steps,
the same weights and the same batches for every attention; what differs is the rounding. How much
that alone changes a loss is seen by the framework's own backends, one against the other, and by
the same training run again: some sums are added up in any order.
A row: attention ("ours", or a backend of torch), seed, run, losses (natural logarithm, a value a
step), seconds. Imports torch.
"""

import itertools
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_lib import gpu
from attention_lib.gpu import recordings

STEPS, BATCH, N, WIDTH, HEADS, LAYERS, BYTES = 300, 16, 512, 256, 4, 2, 256
BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "math": "MATH"}
SEEDS, RUNS = (0, 1), 4
KERNELS = ("overlap", "backward_wgmma.cu")  # what ours runs on a Hopper GPU
COMMAND = "python -m attention_lib.gpu.train --out FILE"


class Block(nn.Module):
    """One layer: attention, then two linear maps with a GELU between, each added to its input."""

    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.QKV, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, N, _ = x.shape
        Q, K, V = self.QKV(self.norm_1(x)).view(batch, N, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        O = F.scaled_dot_product_attention(Q, K, V, is_causal=True)  # looked up at each call
        x = x + self.out(O.transpose(1, 2).reshape(batch, N, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Bytes in, scores for the next byte out: (batch, N) integers -> (batch, N, 256)."""

    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(BYTES, WIDTH), nn.Embedding(N, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES)

    def forward(self, tokens):
        place = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(place))))


def text():
    """The bytes of this library's source, as a tensor of integers on the GPU."""
    files = sorted(Path(__file__).parent.parent.rglob("*.py"))
    whole = b"\n".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8).long().cuda()


def batches(seed, steps=STEPS):
    """steps batches of the text, (BATCH, N + 1) each: the same for the same seed."""
    data, draw = text(), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        start = torch.randint(len(data) - N - 1, (BATCH, 1), generator=draw).cuda()
        yield data[start + torch.arange(N + 1, device="cuda")]


def using(attention):
    """A context in which scaled_dot_product_attention is ours, or a backend of torch."""
    if attention == "ours":
        return gpu.registered()
    return sdpa_kernel(getattr(SDPBackend, BACKENDS[attention]))


def train(attention="ours", seed=0, steps=STEPS, report=None):
    """Train a new GPT; returns (model, losses), losses a list of floats, one a step.

    report(step, losses): called after each step, to draw something.
    """
    torch.manual_seed(seed)
    model = GPT().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    with using(attention) as used:
        for batch in batches(seed, steps):
            with torch.autocast("cuda", torch.bfloat16):
                scores = model(batch[:, :-1])
            loss = F.cross_entropy(scores.flatten(0, 1).float(), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            if report:
                report(len(losses), losses)
    if attention == "ours" and set(used) != {"ours"}:
        raise RuntimeError(f"the framework computed some of the attention: {dict(used)}")
    return model, losses


@torch.no_grad()
def write(model, start="def ", length=200, seed=0):
    """Let the model go on from a text: a string of so many bytes more."""
    draw = torch.Generator("cuda").manual_seed(seed)
    tokens = torch.tensor([list(start.encode())], device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        for _ in range(length):
            scores = model(tokens[:, -N:])[0, -1].float()
            token = torch.multinomial(torch.softmax(scores, -1), 1, generator=draw)
            tokens = torch.cat([tokens, token[None]], 1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def measure():
    """The rows: every attention from each of two starts, RUNS times."""
    rows = []
    for seed, run, attention in itertools.product(SEEDS, range(RUNS), ("ours", *BACKENDS)):
        begin = time.perf_counter()
        _, losses = train(attention, seed)
        rows.append(
            {"attention": attention, "seed": seed, "run": run}
            | {"losses": [round(x, 4) for x in losses]}
            | {"seconds": round(time.perf_counter() - begin, 1)}
        )
    return rows


def show(rows):
    """The rows as lines of text: some of the losses."""
    steps = (1, 50, 100, 200, 300)
    yield f"{'attention':11}{'seed':>5}{'run':>5}" + "".join(f"{n:>8}" for n in steps)
    for r in rows:
        some = (r["losses"][n - 1] for n in steps if n <= len(r["losses"]))
        yield f"{r['attention']:11}{r['seed']:5}{r['run']:5}" + "".join(f"{x:8.3f}" for x in some)


def record():
    """The rows, and where they are from."""
    shape = {"steps": STEPS, "batch": BATCH, "N": N, "width": WIDTH, "heads": HEADS}
    rows = measure()
    written = write(train("ours")[0])
    return recordings.provenance(COMMAND, KERNELS) | shape | {"written": written, "rows": rows}


def main(argv=None):
    recordings.command_line("train", __doc__.split("\n")[0], record, show, argv)


if __name__ == "__main__":
    main()
