# SPDX-License-Identifier: Apache-2.0
"""Starts the real program on the bundled model and talks to it. Python's standard library only."""
import http.client
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

PROGRAM = os.environ.get("QWEN3_MOE", "qwen3-moe")
ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples/qwen3_moe/models/tiny"


def run(*arguments, stdin="", timeout=300, env=None):
    """One command to its end: (exit code, stdout, stderr)."""
    done = subprocess.run([PROGRAM, *map(str, arguments)], input=stdin, capture_output=True, text=True,
                          timeout=timeout, env={**os.environ, **(env or {})})
    return done.returncode, done.stdout, done.stderr


class Server:
    """`qwen3-moe serve` on a free port."""

    def __init__(self, *arguments, model=MODEL, wait=True, env=None, preexec=None):
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([PROGRAM, "serve", "--model", str(model), "--port", "0", *map(str, arguments)],
                                        stdout=subprocess.PIPE, stderr=self.log, text=True,
                                        env={**os.environ, **(env or {})}, preexec_fn=preexec)
        line = self.process.stdout.readline()
        found = re.search(r"listening on http://\S+:(\d+)", line)
        if not found:
            self.process.wait(300)
            raise AssertionError(f"no address: {line!r} {self.errors()!r}")
        self.port = int(found.group(1))
        if wait:
            self.wait_ready()

    def wait_ready(self):
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            if self.request("GET", "/health")[0] == 200:
                return
            time.sleep(0.05)
        raise AssertionError("the server did not become ready")

    def errors(self):
        self.log.seek(0)
        return self.log.read()

    def connection(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)

    def request(self, method, path, body=None, headers=None):
        """(status, parsed body)."""
        connection = self.connection()
        data = body if isinstance(body, (bytes, str, type(None))) else json.dumps(body)
        if isinstance(data, str):
            data = data.encode()
        connection.request(method, path, data, headers or {})
        response = connection.getresponse()
        text = response.read()
        connection.close()
        if response.getheader("Content-Type", "").startswith("application/json") and text:
            return response.status, json.loads(text)
        return response.status, text.decode()

    def chat(self, content, **fields):
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
        return self.request("POST", "/v1/chat/completions", body)

    def stream(self, path, body):
        """All events of a stream, parsed, without [DONE]; fails when it is missing."""
        status, text = self.request("POST", path, {**body, "stream": True})
        assert status == 200, text
        events = [e[6:] for e in text.split("\n\n") if e.startswith("data: ")]
        assert events[-1] == "[DONE]", events[-1]
        return [json.loads(e) for e in events[:-1]]

    def metric(self, name):
        text = self.request("GET", "/metrics")[1]
        return int(re.search(rf"^{re.escape(name)} (\d+)$", text, re.M).group(1))

    def eventually(self, check, seconds=120):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if check():
                return True
            time.sleep(0.02)
        return False

    def stop(self, sign=signal.SIGTERM):
        """Exit code after a signal."""
        if self.process.poll() is None:
            self.process.send_signal(sign)
        try:
            code = self.process.wait(300)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self.process.stdout.close()
        return code


class ServerCase(unittest.TestCase):
    """One server for all tests of a class; it must be alive and idle at the end, and stop cleanly."""
    arguments = ()

    @classmethod
    def setUpClass(cls):
        cls.server = Server(*cls.arguments)

    @classmethod
    def tearDownClass(cls):
        idle = cls.server.eventually(lambda: cls.server.metric("nibble_requests_running") == 0)
        code = cls.server.stop()
        cls.server.log.close()
        assert idle, "something still runs"
        assert code == 0, f"exit code {code}"


def main():
    unittest.main(module=sys.modules["__main__"], verbosity=2)
