#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks of compiled device code, without a GPU.

    check_compiled.py spills NVCC SOURCE INCLUDE...       no instance spills or uses local memory (sm_90a)
    check_compiled.py order NVCC SOURCE INCLUDE...        weights are asked for before the wait, the trigger is after it
    check_compiled.py arch ARCH NVCC SOURCE INCLUDE...    the source assembles for an architecture
    check_compiled.py readme NVCC SOURCE INCLUDE...       so does the product in README.md, for sm_90a
    check_compiled.py model ARCH MODEL NVCC SOURCE INCLUDE...
        every kernel of a compiled model's table assembles for an architecture, with as little local memory as a start
        sets aside for every thread

`order` reads the PTX, and the machine code too where cuobjdump is on the PATH: ptxas has been seen moving loads below
the wait.
"""
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

CLASSES = {"80": "ampere", "86": "ampere_consumer", "89": "ada", "90": "h200", "90a": "h200", "100a": "blackwell", "120a": "blackwell_consumer"}
CHAINED = ("gemv_kernel", "gemm_kernel", "experts_down")  # kernels whose weights are known before the wait


def compile_to(arguments, output):
    run = subprocess.run(arguments + ["-o", output], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        sys.exit(f"compilation failed:\n{run.stderr[-4000:]}")
    return run.stdout + run.stderr


def flags(nvcc, source, includes, arch, kind):
    return [nvcc, "-std=c++20", "-O3", "-DNIBBLE_WGMMA=" + ("1" if arch == "90a" else "0"), f"-gencode=arch=compute_{arch},code=" + (f"compute_{arch}" if kind == "-ptx" else f"sm_{arch}"),
            kind, source] + [f"-I{i}" for i in includes]


def check_log(log, most_local_bytes):
    """What ptxas -v said: at least 40 kernels, none with more local memory than allowed."""
    kernels, bad, spilling, name = 0, [], 0, ""
    for line in log.splitlines():
        match = re.search(r"Compiling entry function '(\w+)'", line)
        if match:
            name = match[1]
        elif "bytes stack frame" in line:
            kernels += 1
            # The spilled bytes are part of the frame.
            frame = int(re.match(r"\s*(\d+) bytes stack frame", line)[1])
            if frame > 0:
                spilling += 1
                print(f"{frame} bytes of local memory: {name}")
            if frame > most_local_bytes:
                bad.append(f"{name}: {line.strip()}")
        elif "serialized" in line:
            bad.append(line.strip())  # warpgroup instructions one after the other
    print(f"{kernels} kernels, {spilling} with local memory, {len(bad)} with too much of it or serialized")
    if kernels < 40 or bad:
        sys.exit("\n".join(["FAILED"] + bad))


def spills(nvcc, source, includes):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        check_log(compile_to(flags(nvcc, source, includes, "90a", "-cubin") + ["-Xptxas", "-v"], cubin.name), 0)


def model(arch, name, nvcc, source, includes):
    table = open(f"{includes[0]}/nibble/startup/kernel_table.cuh", encoding="utf-8").read()
    most = int(re.search(r"most_local_bytes = (\d+);", table)[1])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        log = compile_to(flags(nvcc, source, includes, arch, "-cubin") + ["-Xptxas", "-v", f"-DMODEL={name}",
                         f"-DMODEL_HEADER=\"compiled/{name}.hpp\"", "-DNIBBLE_ARCHITECTURE=" + arch.rstrip("a")], cubin.name)
    check_log(log, most)


def in_order(name, text, ask, wait, trigger):
    """The request for weights, the wait and the trigger of the thread that triggers, by their place in the listing. The
    ring's consumers have a wait of their own, before or behind the producer's part."""
    first, trigger_at = re.search(ask, text), re.search(trigger, text)
    if not first or not trigger_at:
        return f"{name}: no weight load or no trigger was found"
    waits = [m.start() for m in re.finditer(wait, text) if m.start() < trigger_at.start()]
    if not waits:
        return f"{name}: the trigger comes before the wait"
    if first.start() > waits[-1]:
        return f"{name}: the wait comes before the first request for weights"
    return None


def report(kind, kernels, problems):
    print(f"{kind}: {kernels} chained kernels, {len(problems)} out of order")
    if kernels == 0 or problems:
        sys.exit("\n".join(["FAILED"] + problems))


def order(nvcc, source, includes):
    with tempfile.NamedTemporaryFile(suffix=".ptx") as ptx:
        compile_to(flags(nvcc, source, includes, "90", "-ptx"), ptx.name)
        text = open(ptx.name, encoding="utf-8").read()
    entries = re.split(r"\.entry ", text)[1:]
    chained = [e for e in entries if any(c in e.split("(")[0] for c in CHAINED)]
    problems = [in_order(e.split("(")[0][:120], e, r"ld\.global\.L1::no_allocate|cp\.async\.bulk\.shared|cp\.async\.cg\.shared", r"griddepcontrol\.wait",
                         r"griddepcontrol\.launch_dependents") for e in chained]
    report("PTX", len(chained), [p for p in problems if p])
    if any("ld.global.nc.L1::no_allocate" in e for e in chained):
        sys.exit("FAILED: weights are loaded with ld.global.nc, which ptxas moves below the wait")
    cuobjdump = shutil.which("cuobjdump")
    if not cuobjdump:
        print("machine code: not read, no cuobjdump on the PATH")
        return
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        compile_to(flags(nvcc, source, includes, "90", "-cubin"), cubin.name)
        sass = subprocess.run([cuobjdump, "-sass", cubin.name], capture_output=True, text=True, check=True).stdout
    functions = [f for f in re.split(r"Function : ", sass)[1:] if any(c in f.split("\n")[0] for c in CHAINED)]
    problems = [in_order(f.split("\n")[0][:120], f, r"LDG\.E\.(128|64)|LDG\.E\.LTC\S*|LDG\.E\.NA\S*|LDGSTS|UBLKCP", r"ACQBULK", r"PREEXIT") for f in functions]
    report("machine code", len(functions), [p for p in problems if p])


def arch(name, nvcc, source, includes):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        compile_to(flags(nvcc, source, includes, name, "-cubin") + ["-DSMALL", f"-DNIBBLE_TEST_DEVICE={CLASSES[name]}", "-DNIBBLE_ARCHITECTURE=" + name.rstrip("a")], cubin.name)
        if int(name.rstrip("a")) < 90:  # without its policies it would be wrong in silence
            run = subprocess.run(flags(nvcc, source, includes, name, "-cubin") + ["-DSMALL", "-o", cubin.name], capture_output=True, text=True, check=False)
            if run.returncode == 0 or "define NIBBLE_ARCHITECTURE" not in run.stderr:
                sys.exit(f"code of sm_{name} with the policies of sm_90 was not refused:\n{run.stderr[-2000:]}")
    print(f"sm_{name}: assembles")


def readme(nvcc, _, includes):
    text = pathlib.Path(includes[0]).parent.joinpath("README.md").read_text(encoding="utf-8")
    programs = re.findall(r"```cpp\n(.*?)```", text, re.S)
    if len(programs) != 1:
        sys.exit(f"README.md has {len(programs)} programs, not one")
    with tempfile.NamedTemporaryFile(suffix=".cu", mode="w", encoding="utf-8") as source, tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        source.write(programs[0])
        source.flush()
        compile_to(flags(nvcc, source.name, includes, "90a", "-cubin") + ["-DNIBBLE_ARCHITECTURE=90"], cubin.name)
    print("the product in README.md assembles")


if sys.argv[1] == "model":
    model(sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5], sys.argv[6:])
elif sys.argv[1] == "arch":
    arch(sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5:])
else:
    {"spills": spills, "order": order, "readme": readme}[sys.argv[1]](sys.argv[2], sys.argv[3], sys.argv[4:])
