"""PyTorch's side of ./run bench: the commands time, verify and info of bench_heed.c, over the same inputs.

time answers with the seconds of each way PyTorch has for the case, taken as bench_heed.c takes them:

    flash, math    torch.nn.functional.scaled_dot_product_attention, held to that backend
    plain          matmul, softmax, matmul
    masked         key stride only: plain over all keys, those off the stride masked out

With a key stride the other ways get the keys sliced: k[:, :, ::stride].
"""
import json
import math
import os
import statistics
import sys
import time
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MASK32 = 0xFFFFFFFF


def random_tensor(seed, shape, dtype):
    """Uniform from -1 to 1, exclusive, in steps of 2^-23, or with 16 bits of 2^-7; bench_heed.c has the same formula."""
    bits = 24 if dtype == torch.float32 else 8
    i = torch.arange(math.prod(shape), dtype=torch.int64)
    h = ((i + seed * 0x9E3779B9) & MASK32) * 2654435761 & MASK32
    h = (h ^ h >> 15) * 2246822519 & MASK32
    return (((h ^ h >> 13) >> (32 - bits)).to(torch.float32) / (1 << (bits - 1)) - 1).reshape(shape).to(dtype)


class Case:
    def __init__(self, words):
        number = lambda key, otherwise: int(words.get(key, otherwise))
        B, Hq, Sq, D = number("B", 1), number("Hq", 1), number("Sq", 1), number("D", 64)
        Hk, Sk = number("Hk", Hq), number("Sk", Sq)
        dtype = DTYPES[words.get("dtype", "fp32")]
        self.backward = words.get("pass") == "backward"
        self.causal, self.stride, self.gqa = bool(number("causal", 0)), number("stride", 1), Hq != Hk
        self.scale = 1 / math.sqrt(D)
        self.q = random_tensor(1, (B, Hq, Sq, D), dtype)
        self.k = random_tensor(2, (B, Hk, Sk, D), dtype)
        self.v = random_tensor(3, (B, Hk, Sk, D), dtype)
        self.inputs = (self.q, self.k, self.v)
        for tensor in self.inputs:
            tensor.requires_grad_(self.backward)
        self.d_o = random_tensor(4, (B, Hq, Sq, D), dtype)
        hidden = torch.full((Sq, Sk), -math.inf, dtype=dtype)
        self.causal_mask = hidden.triu(1 + Sk - Sq) if self.causal else None
        self.dropout, self.term = 0.0, None  # what is added to the scores, or hides them
        if words.get("with") in ("mask", "padding"):
            shape = (1, 1, Sq, Sk) if words["with"] == "mask" else (B, 1, 1, Sk)
            self.term = random_tensor(5, shape, torch.float32) > -0.4
        elif words.get("with") == "bias":
            self.term = random_tensor(6, (1, Hq, Sq, Sk), dtype)
        elif words.get("with") == "dropout":
            self.dropout = 0.1
        self.stride_mask = torch.where(torch.arange(Sk) % self.stride == 0, 0.0, -math.inf).to(dtype)

    def sdpa(self, backend):
        k, v = self.k[:, :, :: self.stride], self.v[:, :, :: self.stride]
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(self.q, k, v, attn_mask=self.term, dropout_p=self.dropout,
                                                is_causal=self.causal, enable_gqa=self.gqa)

    def plain(self, stride, mask):
        q, k, v = self.q, self.k[:, :, ::stride], self.v[:, :, ::stride]
        if self.gqa:  # one matmul for the query heads of a key head: their rows, stacked
            q = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
        scores = q @ k.transpose(-2, -1) * self.scale
        if mask is not None:
            scores = scores + mask
        if self.term is not None:
            scores = scores + self.term if self.term.is_floating_point() else scores.masked_fill(~self.term, -math.inf)
        P = torch.softmax(scores, -1)
        return ((torch.dropout(P, self.dropout, True) if self.dropout else P) @ v).reshape(self.q.shape)

    def ways(self):
        ways = {
            "flash": lambda: self.sdpa(SDPBackend.FLASH_ATTENTION),
            "math": lambda: self.sdpa(SDPBackend.MATH),
            "plain": lambda: self.plain(self.stride, self.causal_mask),
        }
        if self.stride > 1:
            ways["masked"] = lambda: self.plain(1, self.stride_mask)
        return ways

    def call_of(self, way):
        """What is timed: the forward without a graph, or the gradients of an existing one."""
        if not self.backward:
            return way
        o = way()
        return lambda: torch.autograd.grad(o, self.inputs, self.d_o, retain_graph=True)


def time_of(call, min_time, clock):
    start, calls = clock(), 0
    while calls == 0 or clock() - start < min_time / 10:
        call()
        calls += 1
    each = (clock() - start) / calls
    batch = math.ceil(5e-4 / each) if each < 5e-4 else 1
    samples, end = [], clock() + min_time
    while len(samples) < 3 or clock() < end:
        start = clock()
        for _ in range(batch):
            call()
        samples.append((clock() - start) / batch)
    return statistics.median(samples)


def answer(line):
    command, *rest = line.split()
    if command == "info":
        return {"torch": torch.__version__, "threads": torch.get_num_threads()}
    words = dict(word.split("=", 1) for word in rest)
    torch.set_num_threads(int(words.get("threads", 1)))
    case = Case(words)
    if command == "verify":
        if not case.backward:
            return {"o": case.plain(case.stride, case.causal_mask).flatten().tolist()}
        gradients = case.call_of(case.ways()["plain"])()
        return {name: g.flatten().tolist() for name, g in zip(("dq", "dk", "dv"), gradients)}
    result, clock = {}, time.process_time if words.get("clock") == "cpu" else time.perf_counter
    with torch.set_grad_enabled(case.backward):
        for name, way in case.ways().items():
            try:
                result[name] = time_of(case.call_of(way), float(words.get("min_time", 0.2)), clock)
            except RuntimeError as error:  # a way that this version does not offer for this case
                result.setdefault("refused", {})[name] = str(error).splitlines()[0]
    return result


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of a way that this version does not offer, which the answer says
    for request in sys.stdin:
        print(json.dumps(answer(request)), flush=True)
