"""./run bench: heed and PyTorch on the same machine, threads and inputs, in a process each, in turns.

Conventions. One call costs 4 B H S S D flops forward and 2.5 times that backward, half of it when causal. PyTorch's
time is that of its fastest way (torch_side.py lists them). Each case is measured several times, heed and PyTorch in
turns, and the best median counts on both sides, so that the noise of a machine with other work strikes both. "of peak"
is the share of the multiply-adds, or for bf16 of the pair dot products where the CPU has them, that this machine does
when it does nothing else; for one query it is the share of the read bandwidth.
"""
import argparse
import csv
import json
import math
import os
import subprocess
import sys
from collections import namedtuple

HERE = os.path.dirname(os.path.abspath(__file__))

# Each class of shapes (B, H, S, D) with the fp32 ratios to reach: forward, forward causal, backward, backward causal.
CLASSES = [
    ([(1, 1, 128, 32), (2, 8, 64, 64), (2, 8, 77, 64)], (1.4, 1.8, 1.2, 1.5)),
    ([(4, 12, 128, 64), (2, 16, 256, 64)], (1.3, 2.0, 1.25, 1.8)),
    ([(1, 8, 1024, 64), (1, 8, 1024, 128)], (1.25, 1.9, 1.3, 1.9)),
    ([(1, 4, 4096, 64), (1, 4, 4096, 128), (1, 2, 2048, 256)], (1.25, 1.4, 1.25, 1.45)),
]
HALF_GOALS = {"bf16": (2.0, 2.5, 1.1, 1.7), "fp16": (1.8, 1.8, 1.3, 1.3)}
STRIDED = [((4, 8, 512, 64), 2, 8), ((1, 8, 4096, 64), 4, 25)]  # shape, key stride, goal against the naive mask
STRIDED_GOAL = 1.25  # against PyTorch on sliced keys
TERMS = [(2, 16, 256, 64), (1, 8, 1024, 64)]
WITH = ("mask", "padding", "bias", "dropout")
QUERY_KEYS, QUERY_GOAL = (4096, 32768), 0.80
QUICK = [(1, 1, 128, 32), (2, 16, 256, 64), (1, 8, 1024, 64)]
WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}  # of some of PyTorch's products; see look_at_torch()
TOLERANCE = {"fp32": 2e-6, "fp16": 4e-3, "bf16": 3e-2}  # of the largest result; both sides round

Row = namedtuple("Row", "section dtype direction causal threads shape us rate peak torch_us way ratio goal goal_peak")


class Died(Exception):
    pass


class Side:
    """A process that answers lines with JSON."""

    def __init__(self, command, threads, settings):
        environment = dict(os.environ, **settings, OMP_NUM_THREADS=str(threads))
        self.process = subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE)

    def ask(self, command, **words):
        print(command, *(f"{key}={value}" for key, value in words.items()), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise Died(f"{self.process.args[0]} died with {self.process.wait()} at: {command} {words}")
        answer = json.loads(line)
        if "error" in answer:
            sys.exit(f"bench: {command} {words}: {answer['error']}")
        return answer


class Bench:
    def __init__(self, options):
        self.options, self.rows, self.sides, self.peaks, self.torch_settings = options, [], {}, {}, {}

    def side(self, name, threads):
        commands = {"heed": [self.options.heed], "torch": [sys.executable, os.path.join(HERE, "torch_side.py")]}
        if (name, threads) not in self.sides:
            self.sides[name, threads] = Side(commands[name], threads, self.torch_settings if name == "torch" else {})
        return self.sides[name, threads]

    def look_at_torch(self):
        """Facts about PyTorch. A virtual machine may have AMX without the CPUID leaf that tells the size of its tiles, which
        oneDNN asks for: PyTorch's products of bf16 die there, and oneDNN gets the best instructions without AMX."""
        facts = self.side("torch", 1).ask("info")
        try:
            self.side("torch", 1).ask("verify", dtype="bf16", B=1, Hq=1, Sq=64, D=64)
        except Died:
            self.torch_settings = WITHOUT_AMX
            del self.sides["torch", 1]
            facts["torch"] += " (oneDNN without AMX, with which it dies here)"
        return facts

    def peak(self, kind, threads):
        """flop/s, or byte/s for kind "read"."""
        if (kind, threads) not in self.peaks:
            self.look(kind, threads)
        return self.peaks[kind, threads]

    def look(self, kind, threads):
        heed = self.side("heed", threads)
        if kind == "read":
            rate = heed.ask("read", bytes=1 << 29, threads=threads, clock=self.options.clock)["rate"]
        else:
            rate = heed.ask("peak", kind=kind, threads=threads, clock=self.options.clock)["flops"]
        self.peaks[kind, threads] = max(rate, self.peaks.get((kind, threads), 0))

    def measure(self, threads, kernel=None, **words):
        """Best seconds of heed, and of each of PyTorch's ways."""
        words = dict(words, threads=threads, min_time=self.options.min_time, clock=self.options.clock)
        ours, theirs = math.inf, {}
        for _ in range(self.options.rounds):
            forced = {"kernel": kernel} if kernel else {}
            ours = min(ours, self.side("heed", threads).ask("time", **words, **forced)["seconds"])
            if kernel:
                continue
            answer = self.side("torch", threads).ask("time", **words)
            for way, seconds in answer.items():
                if way != "refused":
                    theirs[way] = min(seconds, theirs.get(way, math.inf))
        return ours, theirs

    def add(self, section, dtype, direction, causal, threads, shape, seconds, rate, peak, theirs=None, goal=None,
            goal_peak=None):
        way, other = min(theirs.items(), key=lambda item: item[1]) if theirs else (None, None)
        row = Row(section, dtype, direction, causal, threads, "x".join(map(str, shape)), seconds * 1e6, rate,
                  rate / peak if peak else None, other and other * 1e6, way, other and other / seconds, goal, goal_peak)
        self.rows.append(row)
        self.show(row)

    # ---- What is measured ------------------------------------------------------------------------------------------

    def verify(self):
        """Both sides compute the same function, or there is nothing to compare."""
        for dtype in self.options.dtype:
            for direction in ("forward", "backward"):
                for more in ({"causal": 0}, {"causal": 1}, *({"with": term} for term in WITH if term != "dropout")):
                    words = {"pass": direction, "dtype": dtype, "B": 2, "Hq": 2, "Sq": 77, "D": 32, **more}
                    ours = self.side("heed", 1).ask("verify", **words)
                    theirs = self.side("torch", 1).ask("verify", **words)
                    for name in theirs:
                        error = max(abs(a - b) for a, b in zip(ours[name], theirs[name], strict=True))
                        error /= max(map(abs, theirs[name]))
                        if not error <= TOLERANCE[dtype]:
                            sys.exit(f"bench: {dtype} {direction} {more}: {name} differs by {error:.2g} of its "
                                     f"largest element, more than {TOLERANCE[dtype]:.2g}: nothing timed")

    def dense(self, dtype, direction, threads):
        for shapes, goals in CLASSES:
            for shape in shapes:
                if self.options.skips(shape):
                    continue
                for causal in (0, 1):
                    B, H, S, D = shape
                    ours, theirs = self.measure(threads, dtype=dtype, B=B, Hq=H, Sq=S, D=D, causal=causal,
                                                **{"pass": direction})
                    flops = 4 * B * H * S * S * D * (2.5 if direction == "backward" else 1) / (1 + causal)
                    peak = dtype == "bf16" and self.peak("bf16", threads) or self.peak("fma", threads)
                    goal = HALF_GOALS.get(dtype, goals)[2 * (direction == "backward") + causal]
                    goal_peak = None if causal or dtype != "fp32" else 0.88 if S >= 1024 else 0.70 if S <= 256 else None
                    self.add("dense", dtype, direction, causal, threads, shape, ours, flops / ours, peak, theirs, goal,
                             goal_peak)

    def strided(self, direction, threads):
        for (B, H, S, D), stride, mask_goal in STRIDED:
            ours, theirs = self.measure(threads, dtype="fp32", B=B, Hq=H, Sq=S, D=D, stride=stride,
                                        **{"pass": direction})
            flops = 4 * B * H * S * math.ceil(S / stride) * D * (2.5 if direction == "backward" else 1)
            masked = {"masked": theirs.pop("masked")}
            for rival, goal in ((theirs, STRIDED_GOAL), (masked, mask_goal if direction == "forward" else None)):
                self.add("strided", "fp32", direction, 0, threads, (B, H, S, D, stride), ours, flops / ours,
                         self.peak("fma", threads), rival, goal)

    def one_query(self, dtype, threads):
        for Hq, Hk in ((8, 8), (32, 8)):
            for keys in QUERY_KEYS:
                ours, theirs = self.measure(threads, dtype=dtype, B=1, Hq=Hq, Hk=Hk, Sq=1, Sk=keys, D=128)
                size = 2 * Hk * keys * 128 * (4 if dtype == "fp32" else 2)
                self.add("one query", dtype, "forward", 0, threads, (1, f"{Hq}:{Hk}", keys, 128), ours, size / ours,
                         self.peak("read", threads), theirs, None, QUERY_GOAL)

    def terms(self, dtype, direction, threads):
        """What hides scores, is added to them or drops them, beside PyTorch with the same."""
        for B, H, S, D in TERMS:
            for term in WITH:
                ours, theirs = self.measure(threads, dtype=dtype, B=B, Hq=H, Sq=S, D=D,
                                            **{"pass": direction, "with": term})
                flops = 4 * B * H * S * S * D * (2.5 if direction == "backward" else 1)
                peak = dtype == "bf16" and self.peak("bf16", threads) or self.peak("fma", threads)
                self.add(f"with {term}", dtype, direction, 0, threads, (f"{term} {B}", H, S, D), ours, flops / ours, peak,
                         theirs)

    def avx2(self, direction, threads):
        """The kernels of a CPU without AVX-512, on this one."""
        for shape in [shape for shapes, _ in CLASSES for shape in shapes if shape[2] >= 1024]:
            if self.options.skips(shape):
                continue
            B, H, S, D = shape
            ours, _ = self.measure(threads, kernel=f"{direction}_cpu_avx2_f32", dtype="fp32", B=B, Hq=H, Sq=S, D=D,
                                   **{"pass": direction})
            flops = 4 * B * H * S * S * D * (2.5 if direction == "backward" else 1)
            self.add("avx2", "fp32", direction, 0, threads, shape, ours, flops / ours, self.peak("avx2", threads),
                     goal_peak=0.80)

    def run(self):
        options, facts = self.options, self.side("heed", 1).ask("info")
        facts.update(self.look_at_torch())
        self.verify()
        self.header(facts)
        for threads in options.threads:
            for direction in options.directions:
                for dtype in options.dtype:
                    if "dense" in options.sections:
                        self.title(f"{dtype} {direction}", threads)
                        self.dense(dtype, direction, threads)
                    if "terms" in options.sections:
                        self.title(f"{dtype} {direction}, with a mask, a bias or dropout", threads)
                        self.terms(dtype, direction, threads)
                if "fp32" in options.dtype and "strided" in options.sections:
                    self.title(f"fp32 {direction}, strided: BxHxSxDxstride; sliced keys, then the naive mask", threads)
                    self.strided(direction, threads)
                if "fp32" in options.dtype and "avx2" in options.sections and self.peak("avx2", threads):
                    self.title(f"fp32 {direction}, AVX2 kernels", threads)
                    self.avx2(direction, threads)
            if "forward" in options.directions and "query" in options.sections:
                for dtype in options.dtype:
                    self.title(f"{dtype}, one query: Bx(query:key heads)xkeysxD, GB/s of K and V", threads)
                    self.one_query(dtype, threads)
        self.summary()

    # ---- What is printed -------------------------------------------------------------------------------------------

    def header(self, facts):
        if self.options.csv:
            self.csv = csv.writer(sys.stdout)
            self.csv.writerow(Row._fields)
            return
        print(f"heed {facts['heed']} and PyTorch {facts['torch']} on {facts['cpu']} ({facts['features']})")
        for threads in self.options.threads:
            print(f"{threads} thread{'s' * (threads > 1)}: {self.peak('fma', threads) / 1e9:.0f} GFLOP/s fp32, "
                  f"{self.peak('bf16', threads) / 1e9:.0f} bf16, {self.peak('read', threads) / 1e9:.1f} GB/s read")

    def title(self, text, threads):
        for kind, number in list(self.peaks):  # again for each table: other work can only have lowered them
            if number == threads:
                self.look(kind, threads)
        if not self.options.csv:
            print(f"\n{text}, {threads} thread{'s' * (threads > 1)}")
            print(f"{'shape':>20} {'causal':>6} {'heed us':>10} {'G/s':>7} {'of peak':>7} {'torch us':>10} {'way':>6} "
                  f"{'ratio':>6} {'goal':>5}")

    def show(self, row):
        if self.options.csv:
            self.csv.writerow(row)
            return
        percent = f"{100 * row.peak:.0f}%" if row.peak else ""
        rival = f"{row.torch_us:10.1f} {row.way:>6} {row.ratio:6.2f}" if row.ratio else " " * 24
        goal = f"{row.goal:5.2f}" if row.goal else f"{100 * row.goal_peak:4.0f}%" if row.goal_peak else ""
        print(f"{row.shape:>20} {'yes' if row.causal else 'no':>6} {row.us:10.1f} {row.rate / 1e9:7.1f} {percent:>7} "
              f"{rival} {goal:>5}{'' if reached(row) else '  below'}", flush=True)

    def summary(self):
        if self.options.csv or not self.rows:
            return
        print()
        compared = [row for row in self.rows if row.goal]
        if compared:
            mean = math.exp(sum(math.log(row.ratio) for row in compared) / len(compared))
            print(f"ratio to PyTorch: {sum(row.ratio >= row.goal for row in compared)} of {len(compared)} cells reach "
                  f"their goal; geometric mean {mean:.2f}, least {min(row.ratio for row in compared):.2f}")
        for label, rows in (("fp32 share of peak (88% from S = 1024, 70% to S = 256)", "dense"),
                            ("AVX2 share of peak (80%)", "avx2"), ("one query, share of bandwidth (80%)", "one query")):
            rows = [row for row in self.rows if row.section == rows and row.goal_peak and row.peak]
            if rows:
                print(f"{label}: {sum(row.peak >= row.goal_peak for row in rows)} of {len(rows)} reach it, "
                      f"least {100 * min(row.peak for row in rows):.0f}%")
        serial = {row[:4] + (row.shape,): row.us for row in self.rows if row.section == "dense" and row.threads == 1}
        gains = [(serial[row[:4] + (row.shape,)] / row.us, row) for row in self.rows
                 if row.section == "dense" and row.threads == 2 and row[:4] + (row.shape,) in serial
                 and int(row.shape.split("x")[2]) >= 256]
        if gains:
            gain, worst = min(gains, key=lambda item: item[0])
            print(f"two threads from S = 256 on (1.9): {sum(gain >= 1.9 for gain, _ in gains)} of {len(gains)} reach it, "
                  f"least {gain:.2f} at {worst.dtype} {worst.direction} {worst.shape}")


def reached(row):
    if row.goal:
        return row.ratio >= row.goal
    return not row.goal_peak or not row.peak or row.peak >= row.goal_peak


def parse(arguments):
    listed = lambda text: text.split(",")
    parser = argparse.ArgumentParser(prog="./run bench", description="Times heed side by side with PyTorch.")
    parser.add_argument("--heed", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="few shapes, fp32, one round: about a minute")
    parser.add_argument("--csv", action="store_true", help="the same rows as CSV")
    parser.add_argument("--dtype", type=listed, metavar="LIST", help="of fp32,bf16,fp16")
    parser.add_argument("--threads", type=listed, metavar="LIST", help="numbers of threads: 1,2")
    parser.add_argument("--pass", dest="directions", type=listed, default=["forward", "backward"], metavar="LIST",
                        help="of forward,backward")
    parser.add_argument("--section", dest="sections", type=listed, metavar="LIST", help="of dense,strided,avx2,query,terms")
    parser.add_argument("--shape", action="append", metavar="B,H,S,D", help="only this shape of the tables; repeatable")
    parser.add_argument("--rounds", type=int, help="how often each case is measured on both sides (3)")
    parser.add_argument("--min-time", type=float, default=0.2, metavar="S", help="seconds of each measurement (0.2)")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall",
                        help="cpu: processor time, for one thread on a machine with other work")
    options = parser.parse_args(arguments)
    shapes = [tuple(map(int, shape.split(","))) for shape in options.shape or []] or (QUICK if options.quick else None)
    options.skips = lambda shape: shapes is not None and shape not in shapes
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.dtype = options.dtype or (["fp32"] if options.quick else ["fp32", "bf16", "fp16"])
    options.threads = [int(text) for text in options.threads or (1, 2) if int(text) <= os.cpu_count()]
    options.sections = options.sections or (["dense"] if options.quick or options.shape else
                                            ["dense", "strided", "avx2", "query", "terms"])
    for given, known in ((options.dtype, TOLERANCE), (options.directions, ("forward", "backward")),
                         (options.sections, ("dense", "strided", "avx2", "query", "terms"))):
        for word in given:
            if word not in known:
                parser.error(f"'{word}' is none of {', '.join(known)}")
    return options


if __name__ == "__main__":
    try:
        Bench(parse(sys.argv[1:])).run()
    except Died as error:
        sys.exit(f"bench: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
