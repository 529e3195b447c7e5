#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Do two runs of `distmoe bench --json` on one machine agree?

    compare_results.py FIRST SECOND

Compares, row by row, the ratios to the products and to the peers of the same round (within 3
percent) and, of rows that memory decides, the medians (within 5). A row that either run calls
unstable is shown but does not count. Exit code 0 where all that counts agrees, 1 where something
does not or a row is of one run alone, 2 where a file is no result, names a call twice or is of
another machine, or where nothing counts.
"""
import json
import pathlib
import sys

RATIO_LIMIT = 0.03
MEDIAN_LIMIT = 0.05
CALL = ("shape", "tokens", "ranks", "engine", "backend", "precision", "mode", "graph", "routing",
        "combine", "activation_policy", "recompute")


def read(path):
    """Title and figures of every row, by the call that it is of."""
    rows = {}
    machines = set()
    for number, line in enumerate(pathlib.Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            key = tuple(row[name] for name in CALL)
            title = f"{row['shape']}, {row['mode']}, T={row['tokens']}, P={row['ranks']}"
            if key in rows:
                raise ValueError(f"the file has {title} twice")
            rows[key] = title, [checked(figure) for figure in figures(row)]
            machines.add(row["machine"])
        except (ValueError, TypeError, KeyError, RecursionError) as problem:
            raise SystemExit(f"{path} line {number} is no result: {problem}") from problem
    return rows, machines


def checked(figure):
    name, value, *_ = figure
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} is {value}")
    return figure


def is_of_memory(row):
    """Reading the weights takes longer than the products, at the rates of the run."""
    if not row["dense_tflops"] or not row["copy_tb_s"]:
        return False
    return row["weight_bytes"] / row["copy_tb_s"] > row["flops"] / row["dense_tflops"]


def figures(row):
    """What has to agree: name, value, limit, and whether this run calls it unstable."""
    if row["bound_ratio"] is not None:
        yield "x bound", row["bound_ratio"], RATIO_LIMIT, row["unstable"]
    for peer in row["peers"]:
        yield "x " + peer["name"], peer["ratio"], RATIO_LIMIT, row["unstable"] or peer["unstable"]
    if is_of_memory(row):
        yield "median us", row["median_us"], MEDIAN_LIMIT, row["unstable"]


def compare(first, second):
    """Lines for people and the number of figures that count and do not agree."""
    lines, num_far = [], 0
    for key in (key for key in first if key in second):
        title, own = first[key]
        others = {name: (value, unstable) for name, value, _, unstable in second[key][1]}
        for name, value, limit, unstable in own:
            if name not in others:
                continue
            other, other_unstable = others[name]
            difference = abs(other - value) / value
            verdict = "agree" if difference <= limit else "DIFFER"
            if unstable or other_unstable:
                verdict = "unstable"
            num_far += verdict == "DIFFER"
            lines.append(f"{title:44} {name:16} {value:12.4g} {other:12.4g} {difference:7.1%}"
                         f"  (limit {limit:.0%})  {verdict}")
    return lines, num_far


def main():
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        (first, machines), (second, other_machines) = (read(path) for path in sys.argv[1:])
    except (OSError, UnicodeDecodeError, SystemExit) as problem:
        print(problem, file=sys.stderr)
        return 2
    if len(machines | other_machines) > 1:
        print("the rows are of several machines: " + "; ".join(sorted(machines | other_machines)),
              file=sys.stderr)
        return 2
    lines, num_far = compare(first, second)
    if not lines:
        print("the files have no row in common that could be compared", file=sys.stderr)
        return 2
    print("\n".join(lines))
    alone = sorted(rows[key][0] for rows, others in ((first, second), (second, first))
                   for key in rows if key not in others)
    for title in alone:
        print(f"{title:44} in one of the runs alone")
    verdicts = [line.rsplit(None, 1)[-1] for line in lines]
    num_agreeing = verdicts.count("agree")
    print(f"{num_agreeing} agree, {num_far} differ, {verdicts.count('unstable')} of "
          "unstable rows do not count")
    if num_agreeing + num_far == 0:
        return 2
    return 1 if num_far or alone else 0


if __name__ == "__main__":
    sys.exit(main())
