"""A character-level GPT learns Shakespeare's sonnets, once with heed's attention and once with PyTorch's.

    python train.py [--steps 400] [--plot loss.png] [--device cpu|cuda] [--attention heed,torch]

Both runs start from the same weights and see the same batches, so that their loss curves lie on each other. About a
minute on a CPU, seconds on a GPU.
"""
import argparse
import pathlib
import statistics
import sys
import time

import heed
import torch
from torch import nn
from torch.nn import functional as F

TEXT = pathlib.Path(__file__).with_name("sonnets.txt").read_text()
LETTERS = sorted(set(TEXT))
ATTENTIONS = {
    "heed": lambda q, k, v: heed.attention(q, k, v, causal=True),
    "torch": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
}


class Block(nn.Module):
    def __init__(self, width, heads, attention):
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, attention, context, layers=3, width=96, heads=3):
        super().__init__()
        self.context = context
        self.letters, self.positions = nn.Embedding(len(LETTERS), width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, attention) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(LETTERS))
        for embedding in self.letters, self.positions:
            nn.init.normal_(embedding.weight, std=0.05)

    def forward(self, tokens):
        x = self.letters(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def write(self, start, count):
        tokens = torch.tensor([[LETTERS.index(c) for c in start]], device=self.head.weight.device)
        for _ in range(count):
            weights = F.softmax(self(tokens[:, -self.context:])[:, -1] / 0.7, -1)
            tokens = torch.cat([tokens, torch.multinomial(weights, 1)], 1)
        return "".join(LETTERS[t] for t in tokens[0])


def train(name, o):
    """The losses, the seconds of a typical step, and the model."""
    torch.manual_seed(0)
    model = GPT(ATTENTIONS[name], o.context).to(o.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1, (n + 1) / 20))
    data = torch.tensor([LETTERS.index(c) for c in TEXT])
    batches = torch.Generator().manual_seed(1)
    losses, times = [], []
    for step in range(o.steps):
        at = torch.randint(len(data) - o.context - 1, (o.batch, 1), generator=batches)
        piece = data[at + torch.arange(o.context + 1)].to(o.device)
        start = time.perf_counter()
        loss = F.cross_entropy(model(piece[:, :-1]).flatten(0, 1), piece[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm.step()
        losses.append(loss.item())  # waits for the GPU
        times.append(time.perf_counter() - start)
        if step % 50 == 0 or step == o.steps - 1:
            print(f"{name:6} step {step:4}  loss {losses[-1]:.4f}", flush=True)
    return losses, statistics.median(times[len(times) // 5:]), model


def plot(curves, path):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    for (name, losses), style in zip(curves.items(), ("-", "--")):
        pyplot.plot(losses, style, label=name)
    pyplot.xlabel("step"), pyplot.ylabel("loss, nats for each character"), pyplot.legend(), pyplot.grid(alpha=0.3)
    pyplot.savefig(path, dpi=150)
    print(f"loss curves: {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--attention", default="heed,torch")
    parser.add_argument("--plot", metavar="FILE")
    o = parser.parse_args()
    if o.plot:
        try:
            import matplotlib  # noqa: F401  # before the training, not after
        except ImportError as error:
            parser.error(f"--plot: needs matplotlib ({error})")
    curves, seconds, model = {}, {}, None
    for name in o.attention.split(","):
        curves[name], seconds[name], trained = train(name, o)
        model = model or trained
    print("\n" + model.write("Shall I ", 200) + "\n")
    print(", ".join(f"{name}: {1e3 * s:.1f} ms for a step, loss {curves[name][-1]:.4f}" for name, s in seconds.items()))
    if o.plot:
        plot(curves, o.plot)
    if len(curves) == 2:
        apart = max(abs(a - b) for a, b in zip(*curves.values()))
        print(f"the curves are at most {apart:.4f} apart; a step with heed takes {seconds['heed'] / seconds['torch']:.2f} "
              "of the time with PyTorch")
        return apart > 0.05
    return 0


if __name__ == "__main__":
    sys.exit(main())
