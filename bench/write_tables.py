# SPDX-License-Identifier: Apache-2.0
"""Writes docs/benchmarks.md and the tables of docs/design/gemv.md from bench/results/<machine>/*.json."""
import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]


def stamp(row):
    return f"Commit {row['commit']}, {row['date']}."


def host_gemv(rows):
    yield f"### Matrix-vector products, {rows[0]['cpu']}, {rows[0]['target']}"
    yield ""
    yield ("Weights always come from memory. `read` is a loop that only reads, in the same run, over the same buffer; share is the "
           f"product's weight bytes per second over it. {stamp(rows[0])}")
    yield ""
    yield from table(["N×K", "format", "M", "threads", "µs", "GB/s", "read, GB/s", "share"],
                     [[f"{r['n']}×{r['k']}", r["format"], r["m"], r["threads"], f"{r['us']:.1f}", f"{r['gbps']:.2f}",
                       f"{r['read_gbps']:.2f}", f"{100 * r['share']:.0f} %"] for r in rows])
    yield ""


def host_model(rows):
    yield "### The tiny model (9.9 M parameters, mixed layout)"
    yield ""
    yield stamp(rows[0])
    yield ""
    starts = [r for r in rows if r["suite"] == "start_up"]
    runs = [r for r in rows if r["suite"] != "start_up"]
    yield from table(["", "threads", "seconds"], [["load from page cache, checks included", r["threads"], f"{r['seconds']:.3f}"] for r in starts])
    yield ""
    yield from table(["", "threads", "sequences", "tokens", "tokens/s"],
                     [[r["suite"], r["threads"], r["batch"], r["tokens"], f"{r['tokens_per_s']:.0f}"] for r in runs])
    yield ""


def gpu_gemv(rows):
    first = rows[0]
    yield f"### NVFP4, FP8 and bf16 matrix-vector kernels, {first['device']}"
    yield ""
    yield (f"Driver {first['driver']}, CUDA {first['cuda']}. `floor` is a kernel that only reads the same bytes, in the same run and kind "
           f"of chain; of experts, what it takes for one token's, times the bytes (more than such a kernel would take: a launch is in each). In cublasLt rows "
           f"the bytes are those of the bf16 matrix, and the floor is still the packed one's. {stamp(first)}")
    yield ""
    yield from table(["suite", "geometry", "M", "kernel", "chain", "µs", "floor, µs", "share", "GB/s"],
                     [[r["suite"], r["geometry"], r["m"], r["kernel"], r["chain"], f"{r['us']:.2f}", f"{r['floor_us']:.2f}",
                       f"{100 * r['floor_us'] / r['us']:.0f} %", f"{r['gbps']:.0f}"] for r in rows])
    yield ""


def share_of(rows, keys):
    """Rows of ops grouped by the keys, ops as columns."""
    ops = list(dict.fromkeys(r["op"] for r in rows))
    groups = {}
    for r in rows:
        groups.setdefault(tuple(r[k] for k in keys), {})[r["op"]] = r["us"]
    return table(keys + ops, [[*group] + [f"{us[op]:.0f}" if op in us else "" for op in ops] for group, us in groups.items()])


def module_errors(rows):
    """Modules as rows, steps as columns: root mean square and largest error, both relative to the module's result."""
    steps = list(dict.fromkeys((r["kind"], r["rows"]) for r in rows if r["module"] != "whole model"))
    modules = list(dict.fromkeys(r["module"] for r in rows if r["module"] != "whole model"))
    cells = {(r["module"], r["kind"], r["rows"]): f"{r['other']} of {r['routed']} rows" if "other" in r
             else f"{1e3 * r['rms_relative']:.2f} / {1e3 * r['max_relative']:.0f}" for r in rows}
    whole = next((r for r in rows if r["module"] == "whole model"), None)
    yield f"### Error of each module at full width, {rows[0].get('device', 'one device')}"
    yield ""
    yield ("Against the host backend in fp32 on the same input, in thousandths of the root mean square of the module's result: root mean "
           "square / largest. Of the choice of experts: rows whose set differs. " + (stamp(rows[0]) if "commit" in rows[0] else ""))
    yield ""
    yield from table(["module"] + [f"{kind}, {count} rows" for kind, count in steps],
                     [[m] + [cells.get((m, *step), "") for step in steps] for m in modules])
    yield ""
    if whole:
        yield (f"Logits of the whole model, each backend on its own: half of the rows are off by less than {1e3 * whole['rms_relative']:.1f} "
               f"thousandths; the host backend itself, with its activations rounded to bf16, by {1e3 * whole['rounded_host']:.1f}.")
        yield ""


def offloaded(rows):
    """Whole steps of a model of which only a part of the experts fits."""
    steps = [r for r in rows if r["suite"] == "steps"]
    if not steps:
        return
    yield f"### Experts that do not fit, whole steps, random weights, {steps[0]['device']}"
    yield ""
    yield ("Batch 1, the router's choice replaced by a trace. `bound`: the larger of all bytes over memory bandwidth and the missed bytes over the "
           f"link's and, where it takes a share, the CPU's bandwidth. `ahead`: experts of the next layer guessed while a layer computes, each right with "
           f"probability `right` by construction, the likeliest more often, and wrong ones drawn from what the layer chooses in other steps. `fetch`: what brings experts. {steps[0]['date']}.")
    yield ""
    yield from table(["model", "VRAM, GiB", "slots", "trace", "fetch", "ahead", "right", "CPU, GB/s", "hit rate", "µs a step", "bound, µs", "ratio", "tokens/s", "commit"],
                     [[r["model"], r["vram_gib"], r["slots"], r["trace"], r.get("fetch", "kernel"), r.get("ahead", 0), r.get("guess_right", 0.8) if r.get("ahead", 0) else "–", f"{r['cpu_gbps']:.0f}", f"{r['hit_rate']:.3f}",
                       f"{r['us_per_step']:.0f}", f"{r['bound_us']:.0f}", f"{r['over_bound']:.2f}", f"{r['tokens_per_s']:.0f}", r["commit"]] for r in steps])
    yield ""
    yield from table(["model", "VRAM, GiB", "fetch", "ahead", "tokens a step", "prompt tokens", "time to first token, ms", "bound, ms", "ratio", "experts fetched"],
                     [[r["model"], r["vram_gib"], r.get("fetch", "kernel"), r.get("ahead", 0), r["step_tokens"], r["prompt_tokens"], f"{r['ms']:.1f}", f"{r['bound_ms']:.1f}",
                       f"{r['over_bound']:.2f}", r["fetched_experts"]] for r in rows if r["suite"] == "first token"])
    yield ""


def gpu_steps(folder):
    read = lambda name: json.loads((folder / name).read_text()) if (folder / name).exists() else []
    decode, prefill = read("decode.json"), read("prefill.json")
    if decode:
        first = decode[0]
        yield f"### Decode steps of whole models, random weights, {first['device']}"
        yield ""
        yield (f"One captured graph a step, everything resident. `floor` is the step's bytes over the read bandwidth of the same run. "
               f"{stamp(first)}")
        yield ""
        yield from table(["model", "batch", "context", "µs a step", "tokens/s", "MB", "floor, µs", "share"],
                         [[r["model"], r["batch"], r["context"], f"{r['us_per_step']:.0f}", f"{r['tokens_per_s']:.0f}",
                           f"{r['bytes'] / 1e6:.0f}", f"{r['floor_us']:.0f}", f"{100 * r['floor_us'] / r['us_per_step']:.0f} %"] for r in decode])
        yield ""
    if shares := read("decode_share.json"):
        yield f"What the step gains when an op is left out, µs. {stamp(shares[0])}"
        yield ""
        yield from share_of(shares, ["model", "batch"])
        yield ""
    if prefill:
        yield f"### Prefill, random weights, {prefill[0]['device']}"
        yield ""
        yield stamp(prefill[0])
        yield ""
        yield from table(["model", "tokens", "ms", "tokens/s"],
                         [[r["model"], r["tokens"], f"{r['ms']:.1f}", f"{r['tokens_per_s']:.0f}"] for r in prefill])
        yield ""
    if shares := read("prefill_share.json"):
        yield f"What it gains when an op is left out, µs. {stamp(shares[0])}"
        yield ""
        yield from share_of(shares, ["model", "tokens"])
        yield ""
    if errors := read("module_error.json"):
        yield from module_errors(errors)
    if start := read("startup.json"):
        yield f"### Start-up, random weights, {start[0]['device']}"
        yield ""
        yield f"{stamp(start[0])} Weights are packed from host memory, not read from a file."
        yield ""
        yield from table(["model", "memory", "line", "planned, MiB", "measured, MiB"],
                         [[r["model"], r["memory"], r["line"], f"{r['planned_bytes'] / 2**20:.1f}",
                           "–" if r["measured_bytes"] is None else f"{r['measured_bytes'] / 2**20:.1f}"] for r in start if "line" in r])
        yield ""
        phases = list(dict.fromkeys(r["phase"] for r in start if "phase" in r))
        models = list(dict.fromkeys((r["model"], r["memory"]) for r in start))
        ms = {(r["model"], r["memory"], r["phase"]): f"{r['ms']:.1f}" for r in start if "phase" in r}
        yield from table(["model", "memory"] + [f"{p}, ms" for p in phases], [[*m] + [ms.get((*m, p), "") for p in phases] for m in models])
        yield ""
        for r in start:
            if "steps" in r:
                yield (f"- {r['model']}, {r['memory']}: {r['steps']} mixed steps after the start, {r['loads']} loads, {r['allocations']} "
                       f"allocations, {r['instantiations']} graph instantiations (counted by {r['counted_by']}), {r['lost_bytes']} bytes of free memory lost, the counter's own among them; commit {r['commit']}")
        yield ""
    if offload := read("offload.json"):
        yield from offloaded(offload)


# What the project aims at, µs chained on an H200, and what its prototype took: M = 1 and M = 8.
AIMS = {"nvfp4 248320x2048": (67.5, 68.5, 66.7, 67.4), "nvfp4 12288x2048": (4.2, 4.5, 4.20, 4.56),
        "nvfp4 9216x2048": (3.7, 4.0, 3.87, 4.17), "nvfp4 2048x4096": (2.4, 3.0, 2.52, 3.52),
        "nvfp4 1024x2048": (1.45, 1.8, 1.46, 2.02), "nvfp4 2048x512": (1.2, 1.4, 1.18, 1.45),
        "fp8 12288x2048": (6.2, 6.7, 6.19, 6.97), "fp8 2048x4096": (3.0, 3.7, 3.01, 4.40)}
EXPERT_AIMS = {"experts_gate_up": {1: 4.6, 8: 27}, "experts_down": {1: 2.7, 8: 14}, "experts_pair": {1: 7.2, 4: 16, 8: 38}}


def gemv_aims(rows):
    """The matrices of the design note against their aims: chained, M = 9 to 16 also as multiples of M = 8. What was not measured is a dash."""
    times = {(r["suite"], r["geometry"], r["m"], r["chain"], r["kernel"] == "cublasLt"): r for r in rows}
    dense = list(dict.fromkeys(r["geometry"] for r in rows if r["suite"] == "dense"))

    def us(suite, geometry, m, chain="pdl", library=False, digits=2):
        row = times.get((suite, geometry, m, chain, library))
        return f"{row['us']:.{digits}f}" if row else "–"

    def against(suite, geometry, m, aim):
        """Bold where it is within the aim, marked where it is not."""
        row = times.get((suite, geometry, m, "pdl", False))
        if row is None or aim is None:
            return us(suite, geometry, m)
        return f"**{row['us']:.2f}**" if row["us"] <= aim else f"{row['us']:.2f} ✗"

    def more(geometry, m):
        row, eight = (times.get(("dense", geometry, n, "pdl", False)) for n in (m, 8))
        return us("dense", geometry, m) + (f" (×{row['us'] / eight['us']:.2f})" if row and eight else "")

    def floor(suite, geometry, chain):
        row = times.get((suite, geometry, 1, chain, False))
        return f"{row['floor_us']:.2f}" if row else "–"

    def line(g):
        aim = AIMS.get(g, (None,) * 4)
        return [g.replace("x", "×"), " / ".join(floor("dense", g, chain) for chain in ("plain", "pdl")), against("dense", g, 1, aim[0]),
                us("dense", g, 2), us("dense", g, 4), against("dense", g, 8, aim[1]), *(more(g, m) for m in (9, 12, 16)),
                f"{aim[0]} / {aim[1]}" if aim[0] else "–", f"{aim[2]:.2f} / {aim[3]:.2f}" if aim[0] else "–",
                " / ".join(us("dense", g, m, "plain") for m in (1, 8)), " / ".join(us("dense", g, m, "plain", True, 1) for m in (1, 8))]

    made = list(dict.fromkeys((r["device"], r["driver"], stamp(r)) for r in rows))
    yield " ".join(f"{device}, driver {driver}. {when}" for device, driver, when in made)
    yield ""
    yield from table(["matrix", "read, plain / chained", "M=1", "2", "4", "8", "9", "12", "16", "aim M=1 / M=8", "prototype",
                      "plain M=1 / M=8", "cuBLASLt bf16 M=1 / M=8"], [line(g) for g in dense])
    yield ""
    experts = next((r["geometry"] for r in rows if r["suite"] == "experts_pair"), "")
    counts = [1, 2, 4, 8, 9, 12, 16]
    yield from table(["experts, 8 of 256 and the shared one", "read chained, M=1", *(f"M={m}" for m in counts), "aim"],
                     [[suite.removeprefix("experts_"), floor(suite, experts, "pdl"), *(against(suite, experts, m, aims.get(m)) for m in counts),
                       ", ".join(f"M={m}: {aim}" for m, aim in aims.items())] for suite, aims in EXPERT_AIMS.items()])


def gemm_rows(rows):
    """Many tokens: µs, from 128 tokens on TFLOP/s, and cuBLASLt over the matrix in bf16."""
    times = {(r["geometry"], r["m"], r["kernel"] == "cublasLt"): r for r in rows if r["suite"] == "dense" and r["m"] > 16}
    counts = sorted({m for _, m, _ in times})

    def cell(geometry, m):
        own, library = (times.get((geometry, m, of_library)) for of_library in (False, True))
        if own is None:
            return "–"
        rate = f" ({2e-6 * own['n'] * own['k'] * m / own['us']:.0f})" if m >= 128 else ""
        return f"{own['us']:.1f}{rate}" + (f" / {library['us']:.1f}" if library else "")

    yield from table(["matrix, µs (TFLOP/s) / cuBLASLt bf16, µs", *(str(m) for m in counts)],
                     [[g.replace("x", "×"), *(cell(g, m) for m in counts)] for g in dict.fromkeys(g for g, _, _ in times)])


def between(text, name, lines):
    """A document with what stands between the marks of a name replaced."""
    begin, end = f"<!-- {name}, written by bench/write_tables.py -->", f"<!-- end of {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise SystemExit(f"write_tables.py: the document needs the marks {begin} and {end} once each, in this order")
    return text[:text.index(begin) + len(begin)] + "\n" + "\n".join(lines) + "\n" + text[text.index(end):]


SECTIONS = [("host/gemv.json", host_gemv), ("host/model.json", host_model)]


def main():
    lines = ["# Benchmarks", "", "Written by `bench/write_tables.py` from `bench/results`; do not edit.", "",
             "## CPU", "", "`bench/host/run.sh` measures this again.", ""]
    for name, section in SECTIONS:
        path = RESULTS / name
        if path.exists():
            lines += section(json.loads(path.read_text()))
    for path in sorted(RESULTS.glob("*/gemv.json")):
        if path.parent.name != "host":
            lines += [f"## {path.parent.name.upper()}", ""] + list(gpu_steps(path.parent)) + list(gpu_gemv(json.loads(path.read_text())))
    documents = {ROOT / "docs" / "benchmarks.md": "\n".join(lines)}
    note, results = ROOT / "docs" / "design" / "gemv.md", RESULTS / "h200" / "gemv.json"
    if results.exists():
        rows = json.loads(results.read_text())
        documents[note] = between(between(note.read_text(), "gemv", gemv_aims(rows)), "gemm", gemm_rows(rows))
    for path, text in documents.items():  # all are made before one is written
        path.write_text(text)


main()
