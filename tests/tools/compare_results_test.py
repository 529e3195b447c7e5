#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Invariant: two runs agree where every stable ratio is within 3 percent and every stable median of
a row that memory decides within 5, and both have the same rows; anything else is told by the exit
code.

    compare_results_test.py SCRIPT
"""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = sys.argv.pop(1)


def row(**changes):
    """Of a call that the products decide."""
    whole = {"shape": "A", "tokens": 64, "ranks": 1, "engine": "threads", "backend": "cuda",
             "precision": "bf16", "mode": "forward", "graph": False, "routing": "uniform",
             "combine": "per_route", "activation_policy": None, "recompute": None,
             "machine": "H200", "median_us": 1000.0, "unstable": False, "bound_ratio": 1.25, "flops": 1e12,
             "weight_bytes": 1e9, "dense_tflops": 700.0, "copy_tb_s": 4.2,
             "peers": [{"name": "torch loop", "ratio": 2.0, "unstable": False}]}
    return whole | changes


OF_MEMORY = {"flops": 1e9}


class CompareResults(unittest.TestCase):
    def compare(self, first, second):
        with tempfile.TemporaryDirectory() as folder:
            paths = [pathlib.Path(folder) / name for name in ("first", "second")]
            for path, rows in zip(paths, (first, second)):
                path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
            return subprocess.run([sys.executable, SCRIPT, *map(str, paths)], capture_output=True,
                                  text=True, check=False)

    def test_ratios_within_three_percent_agree_whatever_the_median(self):
        run = self.compare([row()], [row(bound_ratio=1.28, median_us=1500.0)])
        self.assertEqual(run.returncode, 0, run.stdout)
        self.assertIn("2 agree, 0 differ", run.stdout)

    def test_a_ratio_beyond_three_percent_differs(self):
        run = self.compare([row()], [row(bound_ratio=1.3)])
        self.assertEqual(run.returncode, 1)
        self.assertRegex(run.stdout, r"A, forward, T=64, P=1 +x bound .* 4\.0% .* DIFFER")
        peer = {"name": "torch loop", "ratio": 2.1, "unstable": False}
        self.assertEqual(self.compare([row()], [row(peers=[peer])]).returncode, 1)

    def test_medians_count_where_memory_decides(self):
        self.assertEqual(self.compare([row(**OF_MEMORY)], [row(median_us=1040.0, **OF_MEMORY)])
                         .returncode, 0)
        run = self.compare([row(**OF_MEMORY)], [row(median_us=1060.0, **OF_MEMORY)])
        self.assertEqual(run.returncode, 1)
        self.assertRegex(run.stdout, r"median us .* DIFFER")

    def test_unstable_rows_do_not_count(self):
        other = row(tokens=1)
        run = self.compare([row(), other], [row(bound_ratio=2.0, unstable=True), other])
        self.assertEqual(run.returncode, 0)
        self.assertIn("2 agree, 0 differ, 2 of unstable rows do not count", run.stdout)
        self.assertEqual(self.compare([row()], [row(unstable=True)]).returncode, 2)

    def test_a_row_of_one_run_alone_does_not_agree(self):
        for first, second in (([row(), row(tokens=1)], [row()]), ([row()], [row(), row(tokens=1)])):
            run = self.compare(first, second)
            self.assertEqual(run.returncode, 1)
            self.assertRegex(run.stdout, r"T=1, P=1 +in one of the runs alone")

    def test_what_cannot_be_compared_is_refused_in_words(self):
        for second, words in (([row(machine="B200")], "several machines: B200; H200"),
                              ([row(), row()], "T=64, P=1 twice"),
                              ([row(bound_ratio=0)], "x bound is 0"),
                              ([row(bound_ratio="1")], "no result"),
                              ([row(median_us=None, **OF_MEMORY)], "no result"),
                              ([row(bound_ratio=float("nan"))], "x bound is nan")):
            run = self.compare([row()], second)
            self.assertEqual(run.returncode, 2, words)
            self.assertIn(words, run.stderr)

    def test_rows_without_a_partner_and_files_that_are_no_results_are_refused(self):
        self.assertEqual(self.compare([row()], [row(tokens=65)]).returncode, 2)
        self.assertEqual(self.compare([row()], []).returncode, 2)
        run = self.compare([row()], [{"shape": "A"}])
        self.assertEqual(run.returncode, 2)
        self.assertIn("line 1 is no result", run.stderr)


if __name__ == "__main__":
    unittest.main()
