#!/usr/bin/env python3
"""Where a GPU's time goes in training steps, from files that kernel_trace.cpp wrote.

    CUDA_INJECTION64_PATH=build/cuda/tests/libkernel_trace.so BIFOCAL_TRACE=/tmp/trace \
        build/cuda/bifocal bench step --run.device cuda --stage distill
    tests/cuda/kernel_trace.py /tmp/trace.*

A step begins where AdamW's kernels of the step before have ended. Printed for each file, as the
median over steps (the first is left out): its length; the share in which nothing ran (launch gaps
and waits of the host); the time of NCCL's kernels and the share of it under which another kernel
ran; the kernels that took most. --whole: the same of the whole file at once, for other programs.
--timeline NAME N: instead, when each of N kernels began and ended, in microseconds from the start
of one whose name holds NAME, as the median over the occurrences of NAME in the second half of the
file that the same kernels follow.
"""
import argparse
import collections
import re
import statistics
import subprocess
import sys


def read(path):
    rows = []
    with open(path) as lines:
        for line in lines:
            begin, end, stream, name = line.rstrip("\n").split(" ", 3)
            rows.append((int(begin), int(end), int(stream), name))
    return sorted(rows)


def union(spans):
    """Disjoint sorted spans that cover the same time."""
    joined = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    return joined


def length(spans):
    return sum(end - begin for begin, end in spans)


def common(left, right):
    """Time that both of two lists of disjoint sorted spans cover."""
    total = i = j = 0
    while i < len(left) and j < len(right):
        total += max(0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


def steps_of(rows):
    """Spans from the last AdamW kernel of one step to that of the next."""
    ends = []
    others = 0
    for begin, end, _, name in rows:
        if "adamw" in name.lower():
            if others > 100 or not ends:
                ends.append(end)
            ends[-1] = max(ends[-1], end)
            others = 0
        else:
            others += 1
    return list(zip(ends, ends[1:]))


def is_nccl(name):
    return "nccl" in name.lower()


def readable(name):
    name = subprocess.run(["c++filt", name], capture_output=True, text=True).stdout.strip() or name
    name = re.sub(r"\(.*|^void |bifocal::|\(anonymous namespace\)::", "", name.replace("(anonymous namespace)::", ""))
    return name[:70]


def report(path, most, whole):
    rows = read(path)
    steps = [(rows[0][0], rows[-1][1])] if whole and rows else steps_of(rows)[1:]
    if not steps:
        sys.exit(f"{path}: wanted at least three steps that end with AdamW, found none to count")
    figures = collections.defaultdict(list)
    kernels = collections.Counter()
    counts = collections.Counter()
    for first, last in steps:
        inside = [row for row in rows if row[0] >= first and row[1] <= last]
        nccl = union((b, e) for b, e, _, name in inside if is_nccl(name))
        other = union((b, e) for b, e, _, name in inside if not is_nccl(name))
        figures["step"].append(last - first)
        figures["idle"].append(1 - length(union(nccl + other)) / (last - first))
        figures["uncovered"].append(1 - length(other) / (last - first))
        figures["nccl"].append(length(nccl))
        figures["hidden"].append(common(nccl, other) / length(nccl) if nccl else 1.0)
        for begin, end, _, name in inside:
            kernels[name] += end - begin
            counts[name] += 1
    median = {key: statistics.median(values) for key, values in figures.items()}
    print(f"{path}: {len(steps)} steps of {median['step'] / 1e6:.1f} ms")
    print(f"  nothing ran      {100 * median['idle']:.2f} % of a step")
    if median["nccl"]:
        print(f"  NCCL             {median['nccl'] / 1e6:.1f} ms, {100 * median['hidden']:.1f} % under other kernels")
        print(f"  no other kernel  {100 * median['uncovered']:.2f} % of a step")
    for name, time in kernels.most_common(most):
        print(f"  {time / len(steps) / 1e6:9.2f} ms {counts[name] / len(steps):7.0f} x  {readable(name)}")


def print_timeline(path, name, count):
    rows = read(path)
    starts = [i for i, row in enumerate(rows) if name in row[3] and i + count <= len(rows)]
    starts = starts[len(starts) // 2 :]
    chains = collections.defaultdict(list)
    for i in starts:
        chains[tuple(row[3] for row in rows[i : i + count])].append(rows[i : i + count])
    if not chains:
        sys.exit(f"{path}: wanted a kernel with {name} in its name and {count} from it on, found none")
    names, alike = max(chains.items(), key=lambda chain: len(chain[1]))
    print(f"{path}: {len(alike)} times of {len(starts)}")
    for i, kernel in enumerate(names):
        begin, end = (statistics.median(chain[i][k] - chain[0][0] for chain in alike) for k in (0, 1))
        print(f"  {begin / 1e3:9.2f} to {end / 1e3:9.2f} us  {readable(kernel)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--most", type=int, default=12, help="kernels that are listed")
    parser.add_argument("--whole", action="store_true", help="the whole file counts as one step")
    parser.add_argument("--timeline", nargs=2, metavar=("NAME", "N"), help="when the N kernels from NAME on ran")
    options = parser.parse_args()
    for path in options.traces:
        if options.timeline:
            print_timeline(path, options.timeline[0], int(options.timeline[1]))
            continue
        report(path, options.most, options.whole)


if __name__ == "__main__":
    main()
