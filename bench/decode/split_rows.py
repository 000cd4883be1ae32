# SPDX-License-Identifier: Apache-2.0
"""Sorts the rows of bench_steps into the files that bench/write_tables.py reads: split_rows.py ROWS FOLDER."""
import json
import pathlib
import sys


def main(rows_path, folder):
    files = {}
    for line in pathlib.Path(rows_path).read_text().splitlines():
        row = json.loads(line)
        bench = row.pop("bench")
        files.setdefault(bench, []).append(row)
    for name, rows in files.items():
        path = pathlib.Path(folder) / f"{name}.json"
        if name == "offload" and path.exists():  # other suites of this file are bench_offload's
            suites = {row["suite"] for row in rows}
            rows = [row for row in json.loads(path.read_text()) if row["suite"] not in suites] + rows
        text = ",\n".join("  " + json.dumps(r, ensure_ascii=False) for r in rows)
        path.write_text(f"[\n{text}\n]\n")


main(*sys.argv[1:])
