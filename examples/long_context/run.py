"""A transformers model over several processes, none of which has the whole sequence; and the same model on one process.

    python run.py                        4 layers over 4 processes: logits, loss and gradients agree with one process
    python run.py --ranks 2 --tokens 4096 --method ring --trace trace

The model is small and random: nothing is downloaded. Every rank has its own tokens, in zigzag order, so that all of them have
as much work under the causal mask. Linear layers and norms work on tokens one by one and need no change; attention is
heed.distributed's. With more than one machine, start the ranks with torchrun and keep everything in work().
"""
import argparse
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import heed
import heed.distributed as hd
from heed.integrations.transformers import register_distributed


def model(implementation):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8,
                         num_key_value_heads=4, max_position_embeddings=1 << 20, attn_implementation=implementation)
    return LlamaForCausalLM(config)


def text(tokens):
    """Tokens, and for each of them the next one."""
    ids = torch.randint(512, (1, tokens + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def step(net, ids, labels, positions, tokens):
    """Logits, and gradients of the mean loss over all tokens, of which these are some."""
    logits = net(input_ids=ids, position_ids=positions, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens
    loss.backward()
    return logits.detach(), loss.detach()


def work(rank, args, address):
    torch.set_num_threads(1)
    heed.set_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=args.ranks)
    register_distributed(shards="zigzag", method=args.method)
    net = model("heed_distributed")
    ids, labels = (hd.shard(t, 1, shards="zigzag") for t in text(args.tokens))
    positions = hd.positions(args.tokens, shards="zigzag")[None]
    with hd.record() as record:
        logits, loss = step(net, ids, labels, positions, args.tokens)
    for p in net.parameters():  # each rank has the part of its own tokens
        dist.all_reduce(p.grad)
    dist.all_reduce(loss)
    if args.trace:
        record.save(f"{args.trace}.{rank}.json", rank)
    whole = hd.unshard(logits, 1, shards="zigzag")
    if rank == 0:
        print(f"{args.ranks} processes, {ids.shape[1]} of {args.tokens} tokens each: loss {loss:.6f}; sent "
              f"{record.sent_bytes / 1e6:.1f} MB, computed {record.seconds('compute'):.2f} s, waited {record.seconds('wait'):.2f} s")
        failures = compare(net, whole, loss, args.tokens)
        dist.destroy_process_group()
        sys.exit(failures)
    dist.destroy_process_group()


def compare(net, logits, loss, tokens):
    alone = model("sdpa")
    ids, labels = text(tokens)
    want, want_loss = step(alone, ids, labels, torch.arange(tokens)[None], tokens)
    print(f"1 process: loss {want_loss:.6f}")
    pairs = {"logits": (logits, want), "loss": (loss, want_loss)}
    pairs |= {name: (p.grad, q.grad) for (name, p), q in zip(net.named_parameters(), alone.parameters())}
    off = {name: float((a - b).abs().max() / b.abs().max()) for name, (a, b) in pairs.items()}
    worst = max(off, key=off.get)
    failures = [name for name, value in off.items() if not value < 1e-4]
    print(f"{'ok  ' if not failures else 'FAIL'}  logits, loss and {len(off) - 2} gradients: at most {off[worst]:.1e} of the "
          f"largest element apart ({worst})")
    return len(failures)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--method", default="auto", choices=["auto", "ring", "all_gather", "ulysses", "ulysses_ring"])
    parser.add_argument("--trace", help="write what each rank did and waited for, for chrome://tracing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, (args, f"{folder}/meet"), args.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
