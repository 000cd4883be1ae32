# SPDX-License-Identifier: Apache-2.0
"""The README's examples, word for word: the Python one with the official client, the curl one with curl.

Exit code 4 (skipped) where neither the client nor curl is installed.
"""
import os
import re
import shutil
import subprocess
import sys

import support

README = (support.ROOT / "README.md").read_text()


def client_python():
    """An interpreter that has the openai package, or None."""
    for python in filter(None, (os.environ.get("NIBBLE_TEST_PYTHON"), sys.executable)):
        if subprocess.run([python, "-c", "import openai"], capture_output=True).returncode == 0:
            return python
    return None


def check_python(server, python):
    code = re.search(r"```python\n(.*?)```", README, re.S).group(1).replace("127.0.0.1:8080", f"127.0.0.1:{server.port}")
    # What a line prints stands in a comment behind it or behind the line that ends the statement.
    expected = [e.strip() for e in re.findall(r"  # (.+)$", code, re.M)]
    assert len(expected) == 5, expected
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert printed == expected, (printed, expected)


def check_curl(server):
    command = re.search(r"\$ (curl .*?)\n```", README, re.S).group(1).replace(":8080", f":{server.port}")
    answer = re.search(r"answers `([^`]+)`", README).group(1)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert answer in done.stdout, (answer, done.stdout)
    assert "reasoning_content" in done.stdout


def main():
    python, curl = client_python(), shutil.which("curl")
    if python is None and curl is None:
        print("neither the openai package nor curl is installed")
        return 4
    server = support.Server("--served-model-name", "tiny")
    try:
        if curl:
            check_curl(server)
        if python:
            check_python(server, python)
    finally:
        assert server.stop() == 0
    missing = [name for name, found in (("the openai package", python), ("curl", curl)) if not found]
    if missing:
        print("not installed, not tried:", *missing)
        return 4
    return 0


sys.exit(main())
