"""How long a call takes, how much memory it adds at its peak, and what it costs before it returns.

Used by heed.bench and the examples. Each function takes a call without arguments and a torch device.
"""
import ctypes
import statistics
import time

import torch


def milliseconds(call, device, budget_ms=100.0, queued=True):
    """The median time of one call. On the GPU, queued: the GPU's time alone, as calls queue up behind a waiting kernel and
    what the CPU needs to issue them is not counted. Not queued: the time of one of many calls in a row, whoever is slower; of
    several such rows the quickest, as what else the CPU does only adds to it."""
    return milliseconds_in_turns([call], device, budget_ms, queued)[0]


def milliseconds_in_turns(calls, device, budget_ms=100.0, queued=True):
    """The same for several calls, each with that budget. They take turns: what else the machine does meets all."""
    if device.type != "cuda":
        return _cpu_ms(calls, budget_ms)
    with torch.cuda.device(device):
        return _cuda_ms(calls, budget_ms, queued)


def peak_bytes(call, device):
    """The most memory that the call held at a time beyond what was there before, its results included; None where the
    system does not say. On the CPU it is counted in pages, for the whole process."""
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    try:
        before = _resident("VmRSS", reset=True)
        call()
        return max(0, _resident("VmHWM") - before)
    except (OSError, AttributeError):  # no /proc, or a C library without malloc_trim
        return None


def call_us(call, device, bursts=30, burst=20):
    """Microseconds until the call returns, at best; meant for inputs so small that the work itself does not matter."""
    return calls_us({"": call}, device, bursts, burst)[""][0]


def calls_us(calls, device, bursts=30, burst=20):
    """The same for several calls by name, (least, median) for each. They take turns: what else the machine does meets all."""
    samples = {name: [] for name in calls}
    for _ in range(bursts):
        for name, call in calls.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # an idle device: a full queue would make the calls wait
            start = time.perf_counter()
            for _ in range(burst):
                call()
            samples[name].append((time.perf_counter() - start) / burst * 1e6)
    return {name: (min(us), statistics.median(us)) for name, us in samples.items()}


def _cpu_ms(calls, budget_ms):
    clock = time.perf_counter

    def seconds(call, count):
        start = clock()
        for _ in range(count):
            call()
        return max((clock() - start) / count, 1e-7)

    for call in calls:
        call()
    counts = [max(1, round(5e-4 / seconds(call, 1))) for call in calls]
    samples, end = [], clock() + len(calls) * budget_ms / 1e3
    while len(samples) < 3 or clock() < end:
        samples.append([seconds(*one) for one in zip(calls, counts)])
    return [statistics.median(of_one) * 1e3 for of_one in zip(*samples)]


def _cuda_ms(calls, budget_ms, queued):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    rounds, of_all = (5, statistics.median) if queued else (15, min)

    def run(call, count, wait_s):
        if queued:
            torch.cuda._sleep(int(wait_s * 2e9))  # clock cycles
        issued = time.perf_counter()
        start.record()
        for _ in range(count):
            call()
        end.record()
        issued = time.perf_counter() - issued
        torch.cuda.synchronize()
        return start.elapsed_time(end) / count, issued

    plans = []
    for call in calls:
        call()
        torch.cuda.synchronize()
        once, issued = run(call, 1, 0.0)
        count = max(1, min(20, int(budget_ms / rounds / max(once, 1e-3))))
        plans.append((call, count, min(0.05, 1.5 * issued * count)))
    samples = [[run(*plan)[0] for plan in plans] for _ in range(rounds)]
    return [of_all(of_one) for of_one in zip(*samples)]


def _resident(field, reset=False):
    """A line of /proc/self/status in bytes. With reset, what malloc keeps is handed back and the high mark set anew."""
    if reset:
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))
