"""Processes for the tests of heed.distributed: started once, they take one case after the other. A case is a function
of the module distributed_cases, called on every rank with a group of the first few ranks."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import socket
import traceback
from typing import Any

TIMEOUT, BRIEF = 60, 5  # seconds that a rank waits for another; where one is expected to die


class Ranks:
    def __init__(self, count: int, device: str) -> None:
        self.count, self.device = count, device
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "heed.distributed"])
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.pipes, self.processes = [], []
        for rank in range(self.count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.count, port, self.device, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, case: str, *arguments: Any, ranks: int = 4, fails: bool = False) -> list[Any]:
        """What the case returns on each of the first ranks. fails: the texts of the exceptions that it raises on
        all. Ranks that an earlier case has ended are started again, with all others."""
        if not all(process.is_alive() for process in self.processes[:ranks]):
            self.stop()
            self._start()
        for pipe in self.pipes[:ranks]:
            pipe.send((case, ranks, arguments))
        answers = []
        for rank, pipe in enumerate(self.pipes[:ranks]):
            try:
                assert pipe.poll(120), f"rank {rank} hangs in {case}"
                answers.append(pipe.recv())
            except EOFError:
                answers.append(("died", "", ""))
                self.processes[rank].join(20)  # a GPU's memory takes a while to go
        for rank, (kind, _, trace) in enumerate(answers):
            assert fails or kind == "done", f"rank {rank}, {case}: {kind}\n{trace}"
        return [answer[:2] if fails else answer[1] for answer in answers]

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()


def _serve(rank: int, count: int, port: int, device: str, pipe: Any) -> None:
    import distributed_cases
    import heed
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    heed.set_threads(1)
    distributed_cases.DEVICE = device
    timeout = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=count, timeout=timeout)
    groups = {n: dist.new_group(list(range(n)), timeout=timeout) for n in range(1, count + 1)}
    brief = {n: dist.new_group(list(range(n)), timeout=datetime.timedelta(seconds=BRIEF)) for n in (3, 4)}
    while True:
        try:
            case, ranks, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        group = (brief if case == "dies" else groups)[ranks]
        try:
            pipe.send(("done", getattr(distributed_cases, case)(group, *arguments), ""))
        except Exception as error:
            pipe.send((type(error).__name__, str(error), traceback.format_exc()))
