"""heed.distributed: attention over sequences that are spread over the ranks of a torch.distributed group.

import heed.distributed as hd

x = hd.shard(x, 1, shards="zigzag")                           # this rank's tokens
o = hd.attention(q, k, v, causal=True, shards="zigzag")       # with autograd; all ranks call it

python -m heed.distributed.plan --gpus 1024 --tokens 10M      # what each method would cost
"""

from heed.distributed._attention import attention, positions, shard, unshard
from heed.distributed._link import CommunicationError, DisagreementError, Record, record
from heed.distributed._plan import Cost, Machine, Task, costs, machine_of

__all__ = [
    "CommunicationError",
    "Cost",
    "DisagreementError",
    "Machine",
    "Record",
    "Task",
    "attention",
    "costs",
    "machine_of",
    "positions",
    "record",
    "shard",
    "unshard",
]
