#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Invariant: the page of `distmoe report`, in a real Chromium and without any network, says nothing
on the console, is no wider than the window at 1280 px and on a phone, and has no text that is too
small or too faint to read, in light and dark.

    report_browser_test.py DISTMOE PROBE [FOLDER [RESULTS...]]

Results are of a few small calls unless files are named. FOLDER gets screenshots for people. Exits
with 77 where there is no Chromium.
"""
import html
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome", "chrome")
SMALLEST_TEXT = 11.0  # pixels
LEAST_CONTRAST = 4.5  # of WCAG AA
LARGEST_PAGE = 2_000_000  # bytes
MODES = {"light": 1, "dark": 0}  # of blink's preferredColorScheme


def measure(program, path):
    """Results that give the page every section."""
    lines = []
    for arguments in (["--ranks", "1"], ["--ranks", "2"], ["--mode", "train"]):
        run = subprocess.run(
            [program, "bench", "--shape", "64,32,8,2", "48,40,6,3", "--tokens", "1", "16", "64",
             "--rounds", "3", "--steps", "--json", *arguments],
            capture_output=True, text=True, check=True)
        lines.append(run.stdout)
    # Rows of another machine, unstable ones among them, and a wrong one.
    others = [dict(json.loads(line), machine="another machine", unstable=True)
              for line in lines[0].splitlines()]
    others[0]["rel_l2"] = 1.0
    lines += [json.dumps(row) + "\n" for row in others]
    # A call that was measured again.
    lines.append(json.dumps(dict(json.loads(lines[0].splitlines()[0]), date="2099")) + "\n")
    path.write_text("".join(lines), encoding="utf-8")
    return [str(path)]


def browse(browser, folder, mode, *arguments):
    return subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         "--host-resolver-rules=MAP * ~NOTFOUND", "--allow-file-access-from-files",
         "--enable-logging=stderr", f"--user-data-dir={folder}/profile-{mode}",
         f"--blink-settings=preferredColorScheme={MODES[mode]}", "--virtual-time-budget=5000",
         *arguments],
        capture_output=True, text=True, timeout=120, check=False)


def main():
    program, probe, *rest = sys.argv[1:]
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print("skipped: there is no Chromium (Debian: chromium-headless-shell)")
        return 77
    problems = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        page = folder / "report.html"
        results = rest[1:] or measure(program, folder / "results.jsonl")
        subprocess.run([program, "report", *results, "-o", str(page)], check=True)
        text = page.read_text(encoding="utf-8")
        if len(text.encode()) > LARGEST_PAGE:
            problems.append(f"the page has {len(text.encode())} bytes")
        if re.search(r"""(src|href)\s*=\s*["'](?!data:,)|url\(|@import|<script""", text):
            problems.append("the page names something outside of itself, or has a script")
        shutil.copy(probe, folder / "probe.html")
        backgrounds = set()
        for mode in MODES:
            run = browse(browser, folder, mode, "--dump-dom", (folder / "probe.html").as_uri())
            spoken = [line for line in run.stderr.splitlines() if "CONSOLE" in line]
            problems += [f"{mode}: the console says {line}" for line in spoken]
            found = re.search(r"RESULT (\{.*\})", html.unescape(run.stdout))
            if found is None:
                problems.append(f"{mode}: no result, but {run.stdout[-400:]} {run.stderr[-400:]}")
                continue
            for width, seen in json.loads(found[1]).items():
                place = f"{mode}, {width} px"
                print(place, seen)
                backgrounds.add((mode, seen["background"]))
                if seen["overflow"] > 0:
                    problems.append(f"{place}: {seen['overflow']} px wider than the window")
                if seen["smallest"] < SMALLEST_TEXT:
                    problems.append(f"{place}: text of {seen['smallest']} px: {seen['smallestText']}")
                if seen["contrast"] < LEAST_CONTRAST:
                    problems.append(f"{place}: contrast {seen['contrast']}: {seen['contrastText']}")
                if seen["texts"] < 50:
                    problems.append(f"{place}: only {seen['texts']} texts are to be seen")
        if len({colour for _, colour in backgrounds}) != len(MODES):
            problems.append(f"light and dark look alike: {backgrounds}")
        if rest:
            screenshots(browser, folder, page, pathlib.Path(rest[0]))
    for problem in problems:
        print("FAILED:", problem)
    return 1 if problems else 0


def screenshots(browser, folder, page, target):
    """For people: PNGs at both widths, light and dark."""
    target.mkdir(parents=True, exist_ok=True)
    for mode in MODES:
        for width, height in ((1280, 3600), (390, 7000)):
            browse(browser, folder, mode, f"--window-size={width},{height}",
                   f"--screenshot={target / f'{mode}-{width}.png'}", page.as_uri())


if __name__ == "__main__":
    sys.exit(main())
