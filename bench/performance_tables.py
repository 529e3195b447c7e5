#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/performance*.md anew from the results that are kept in bench/results.

    performance_tables.py DISTMOE [--check]

A line `<!-- results: FILE... -->` opens such a part and `<!-- end of results -->` closes it;
between them goes what `distmoe report FILE... --markdown` prints. With --check nothing is written,
and the exit code is 1 where something would be.
"""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("performance*.md"))
PART = re.compile(r"(<!-- results: ([^\n]*) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def main():
    arguments = sys.argv[1:]
    if len(arguments) not in (1, 2) or arguments[1:] not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    program = arguments[0]

    def tables(part):
        files = [str(ROOT / name) for name in part[2].split()]
        made = subprocess.run([program, "report", *files, "--markdown"], capture_output=True,
                              text=True, check=True).stdout
        return part[1] + "\n" + made + "\n" + part[3]

    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        if any("<!-- results:" in part[0][len(part[1]):] for part in PART.finditer(old)):
            print(f"{page} has results whose end is not marked", file=sys.stderr)
            return 1
        new, num_parts = PART.subn(tables, old)
        if num_parts == 0:
            print(f"{page} has no results", file=sys.stderr)
            return 1
        if "--check" not in arguments:
            page.write_text(new, encoding="utf-8")
        elif new != old:
            print(f"{page} is not what its results say: run {__file__} {program}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
