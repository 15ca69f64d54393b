# %% [markdown]
# # FlashAttention, step by step
#
# Attention over N = 128 tokens of d = 32 dimensions: O = softmax(Q K^T / sqrt(d)) V. Written down like that it needs the
# N x N matrix of scores in memory. FlashAttention never has more than one tile of it. This file is both a program
# (`python demo.py`) and a notebook: the `# %%` lines are its cells.

# %%
import sys

import heed
import torch
from heed.bench import milliseconds

N, d = 128, 32
torch.set_printoptions(precision=6, sci_mode=False)


# %% [markdown]
# ## The inputs
# The numbers of the C program beside this file: rand() of glibc in its default state. It is an additive feedback
# generator, r_i = r_(i-3) + r_(i-31), filled from the seed 1 and stirred 310 times.

# %%
def rand_of_glibc(count):
    ring = [1]
    for _ in range(30):
        ring.append(ring[-1] * 16807 % 2147483647)
    ring += ring[:3]
    while len(ring) < 344 + count:
        ring.append((ring[-3] + ring[-31]) & 0xFFFFFFFF)
    return [word >> 1 for word in ring[344:]]


numbers = torch.tensor(rand_of_glibc(4 * N * d), dtype=torch.float64) * 2 / 2147483647 - 1
Q, K, V, dO = numbers.reshape(N, d, 4).permute(2, 0, 1).float()
print("Q", Q[:3, :3], sep="\n")

# %% [markdown]
# ## The plain way
# Three steps and an N x N matrix P. In fp64, to compare everything else with.

# %%
S = Q.double() @ K.double().T / d**0.5
P = torch.softmax(S, dim=-1)
O = P @ V.double()
print(f"P has {P.numel()} numbers, O has {O.numel()}")

# %% [markdown]
# ## Online softmax
# Take the keys in tiles of 32. For each row keep three things: the largest score so far m, the sum l of exp(score - m),
# and the weighted sum of values `acc`. When a tile brings a larger score, everything so far was scaled by exp(-m_old)
# instead of exp(-m_new): multiply it by exp(m_old - m_new), and go on as if nothing had happened.

# %%
m, l, acc = torch.full((N, 1), -torch.inf), torch.zeros(N, 1), torch.zeros(N, d)
for j in range(0, N, 32):
    tile = Q @ K[j:j + 32].T / d**0.5                   # [N, 32]: all of S that exists at a time
    m_new = torch.maximum(m, tile.amax(1, keepdim=True))
    p = torch.exp(tile - m_new)
    correction = torch.exp(m - m_new)                   # 0 for the first tile, where m = -inf
    l = l * correction + p.sum(1, keepdim=True)
    acc = acc * correction + p @ V[j:j + 32]
    m = m_new
    print(f"keys 0..{j + 31:3}: row 0 has m = {m[0].item():.4f}, l = {l[0].item():8.4f}, "
          f"o_0 = {(acc / l)[0, 0].item():9.6f}")
online = acc / l
lse = (m + torch.log(l)).squeeze(1)
print(f"largest difference from the plain way: {(online - O).abs().max():.1e}")

# %% [markdown]
# ## Backward without P
# P is not stored. But P = exp(S - lse), so with the N numbers lse any tile of P can be had again from Q and K. And the
# softmax's gradient needs of each row only delta_i = sum_j P_ij dP_ij, which is dO_i . O_i:
#
#     dV = P^T dO      dP = dO V^T      dS = P * (dP - delta)      dQ = dS K / sqrt(d)      dK = dS^T Q / sqrt(d)

# %%
delta = (dO * online).sum(1, keepdim=True)
dQ, dK, dV = torch.zeros(N, d), torch.zeros(N, d), torch.zeros(N, d)
for j in range(0, N, 32):
    keys = slice(j, j + 32)
    p = torch.exp(Q @ K[keys].T / d**0.5 - lse[:, None])
    dV[keys] = p.T @ dO
    dS = p * (dO @ V[keys].T - delta)
    dK[keys] = dS.T @ Q / d**0.5
    dQ += dS @ K[keys] / d**0.5

# %% [markdown]
# ## The same with heed
# One call each way. `four` makes a [batch, heads, tokens, dimensions] view of a matrix.

# %%
four = lambda matrix: matrix[None, None]
leaves = [t.clone().requires_grad_() for t in (Q, K, V)]
o, heed_lse = heed.attention(*map(four, leaves), return_lse=True)
gradients = torch.autograd.grad(o, leaves, four(dO))
print("O", o[0, 0, :3, :3].detach(), sep="\n")
for name, gradient in zip(("dQ", "dK", "dV"), gradients):
    print(name, gradient[:3, :3], sep="\n")

exact = [t.double().requires_grad_() for t in (Q, K, V)]
truth = torch.autograd.grad(torch.softmax(exact[0] @ exact[1].T / d**0.5, -1) @ exact[2], exact, dO.double())
errors = {"O": (o[0, 0] - O).abs().max(), "lse": (heed_lse[0, 0] - torch.logsumexp(S, 1)).abs().max()}
errors |= {name: (ours - t).abs().max() for name, ours, t in zip(("dQ", "dK", "dV"), gradients, truth)}
errors |= {name + " by hand": (ours - t).abs().max() for name, ours, t in zip(("dQ", "dK", "dV"), (dQ, dK, dV), truth)}
print("largest difference from fp64: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))

# %% [markdown]
# ## How long it takes

# %%
for device in [torch.device("cpu")] + [torch.device("cuda")] * torch.cuda.is_available():
    q, k, v, do = (four(t).to(device).requires_grad_(t is not dO) for t in (Q, K, V, dO))
    with torch.no_grad():
        forward = milliseconds(lambda: heed.attention(q, k, v), device)
    o = heed.attention(q, k, v)
    backward = milliseconds(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True), device)
    print(f"{device.type}: forward {1e3 * forward:.1f} us, backward {1e3 * backward:.1f} us")

if not max(errors.values()) < 1e-5:
    sys.exit("heed and fp64 disagree")
