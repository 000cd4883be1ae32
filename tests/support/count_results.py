# SPDX-License-Identifier: Apache-2.0
"""Counts a CTest log: prints the skipped tests by name, then "N passed, N failed, N skipped"."""
import re
import sys

RESULT = re.compile(r"^\s*\d+/\d+ Test\s+#\d+: (.*?) \.*\s*(Passed|\*\*\*\S.*?)\s+[\d.]+ sec")


def main():
    passed, failed, skipped = 0, 0, []
    for line in open(sys.argv[1], errors="replace"):
        found = RESULT.match(line)
        if not found:
            continue
        name, result = found.groups()
        if result == "Passed":
            passed += 1
        elif result.startswith("***Skipped"):
            skipped.append(name)
        else:
            failed += 1
    for name in skipped:
        print("skipped:", name)
    if passed + failed + len(skipped) == 0:
        print("no test ran")
        failed = 1
    print(f"{passed} passed, {failed} failed, {len(skipped)} skipped")


main()
