# SPDX-License-Identifier: Apache-2.0
"""The program as a process: options, exit codes, signals, start and stop."""
import os
import pathlib
import shutil
import signal
import socket
import tempfile
import threading
import time
import unittest

from support import MODEL, Server, main, run


class Commands(unittest.TestCase):
    def test_help_of_every_command(self):
        code, out, _ = run("--help")
        self.assertEqual(code, 0)
        for command in ("serve", "chat", "complete", "info", "verify"):
            self.assertIn(command, out)
            code, text, _ = run(command, "--help")
            self.assertEqual(code, 0)
            self.assertIn("--model", text)
            self.assertIn("Exit codes", text)
        self.assertEqual(run("--version")[0], 0)

    def test_bad_usage_is_two_and_one_sentence(self):
        for arguments in ((), ("fly",), ("serve",), ("serve", "--model", MODEL, "--port", "99999"), ("serve", "--model", MODEL, "--nope"),
                          ("chat", "--model", MODEL, "--temperature", "9"), ("info", "--model", "/no/such/folder"),
                          ("chat", "--model", "/no/such/folder"), ("complete", "--model", MODEL),
                          ("verify", "--model", MODEL, "--reference", "/no/such/file"), ("chat", "--model", MODEL, "--device", "cuda"),
                          ("serve", "--model", MODEL, "--host", "no.such.host.invalid", "--port", "0"),
                          ("serve", "--model", MODEL, "--api-key-file", "/no/such/file"),
                          ("chat", "--model", MODEL, "--context", "100000000")):
            with self.subTest(arguments=arguments):
                code, _, err = run(*arguments)
                self.assertEqual(code, 2, err)
                self.assertEqual(err.count("\n"), 1, err)
                self.assertTrue(err.startswith("qwen3-moe: "), err)

    def test_damaged_checkpoints_are_two(self):
        def damaged(change):
            with tempfile.TemporaryDirectory() as folder:
                copy = pathlib.Path(folder) / "m"
                shutil.copytree(MODEL, copy)
                change(copy)
                for command in (("chat",), ("serve", "--port", "0")):
                    code, _, err = run(*command, "--model", copy)
                    self.assertEqual(code, 2, err)
                    self.assertEqual(err.count("\n"), 1, err)
        shard = "model-00001-of-00002.safetensors"
        damaged(lambda m: (m / "config.json").unlink())
        damaged(lambda m: (m / "config.json").write_text("{"))
        damaged(lambda m: (m / "tokenizer.json").write_text("{}"))
        damaged(lambda m: (m / shard).unlink())
        damaged(lambda m: os.truncate(m / shard, 100_000))
        damaged(lambda m: (m / "chat_template.jinja").write_text("{% if %}"))

    def test_info(self):
        code, out, _ = run("info", "--model", MODEL)
        self.assertEqual(code, 0)
        self.assertIn("runs as", out)
        self.assertIn("tiny", out)
        self.assertEqual(run("info")[0], 0)

    def test_chat_remembers(self):
        code, out, _ = run("chat", "--model", MODEL, "--temperature", "0",
                           stdin="What is the capital of France?\nMy name is Ada. Remember it.\nWhat is my name?\n")
        self.assertEqual(code, 0)
        lines = out.splitlines()
        self.assertEqual(len(lines), 3, out)
        self.assertIn("Paris", lines[0])
        self.assertIn("Ada", lines[2])
        code, out, _ = run("chat", "--model", MODEL, "--temperature", "0", "--no-thinking", stdin="What is 12 + 7?\r\n\n/reset\n/exit\nnever\n")
        self.assertEqual(code, 0)
        self.assertIn("19", out)
        self.assertEqual(len(out.splitlines()), 1)
        self.assertEqual(run("chat", "--model", MODEL, stdin="")[:2], (0, ""))

    def test_complete(self):
        arguments = ("complete", "--model", MODEL, "--temperature", "0", "--max-tokens", "8", "--prompt")
        code, out, _ = run(*arguments, "The capital of")
        self.assertEqual(code, 0)
        self.assertTrue(out.strip())
        self.assertEqual(run(*arguments, "-", stdin="The capital of")[1], out)
        self.assertEqual(run(*arguments, "")[0], 2)


class Lifecycle(unittest.TestCase):
    def test_signals_stop_it_cleanly(self):
        for sign in (signal.SIGINT, signal.SIGTERM):
            server = Server()
            self.assertEqual(server.stop(sign), 0)
            self.assertIn("stopped", server.errors())

    def test_a_signal_while_loading(self):
        server = Server(wait=False)
        self.assertEqual(server.stop(signal.SIGTERM), 0)

    def test_running_answers_may_end(self):
        server = Server()
        result = {}

        def ask():
            result["answer"] = server.chat("Tell me a story.", max_tokens=300, logit_bias={"1918": -100, "1916": -100})
        thread = threading.Thread(target=ask)
        thread.start()
        self.assertTrue(server.eventually(lambda: server.metric("nibble_requests_running") == 1))
        self.assertEqual(server.stop(signal.SIGINT), 0)
        thread.join()
        status, answer = result["answer"]
        self.assertEqual(status, 200, answer)
        self.assertEqual(answer["choices"][0]["finish_reason"], "length")

    def test_a_second_signal_ends_it_at_once(self):
        server = Server()
        connection = server.connection()
        connection.request("POST", "/v1/completions", '{"prompt":"a","max_tokens":4000,"logit_bias":{"1918":-100,"1916":-100}}')
        self.assertTrue(server.eventually(lambda: server.metric("nibble_requests_running") == 1))
        server.process.send_signal(signal.SIGINT)
        self.assertTrue(server.eventually(lambda: "stopping" in server.errors()))
        server.process.send_signal(signal.SIGINT)
        self.assertIn(server.process.wait(20), (0, 130))  # 0 if the answer ended in between
        connection.close()
        server.process.stdout.close()

    def test_drain_has_an_end(self):
        server = Server("--drain-seconds", "0")
        connection = server.connection()
        connection.request("POST", "/v1/completions", '{"prompt":"a","max_tokens":4000,"logit_bias":{"1918":-100,"1916":-100}}')
        self.assertTrue(server.eventually(lambda: server.metric("nibble_requests_running") == 1))
        self.assertEqual(server.stop(), 0)
        response = connection.getresponse()
        self.assertEqual(response.status, 503)
        connection.close()

    def test_health_while_loading_then_ready(self):
        server = Server(wait=False)
        first = server.request("GET", "/health")
        self.assertIn(first[0], (200, 503))
        self.assertEqual(server.request("GET", "/health/live")[0], 200)
        server.wait_ready()
        self.assertEqual(server.request("GET", "/v1/models")[1]["data"][0]["id"], "tiny")
        self.assertEqual(server.stop(), 0)

    def test_port_in_use(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            code, _, err = run("serve", "--model", MODEL, "--port", taken.getsockname()[1])
        self.assertEqual(code, 2)
        self.assertIn("--port", err)
        self.assertEqual(err.count("\n"), 1)

    def test_keys_and_warning(self):
        with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:
            keys.write("from-file\n\n")
            keys.flush()
            server = Server("--api-key-file", keys.name, env={"NIBBLE_API_KEY": "from-env"})
        self.assertEqual(server.request("GET", "/v1/models")[0], 401)
        for key in ("from-file", "from-env"):
            self.assertEqual(server.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})[0], 200)
        self.assertEqual(server.stop(), 0)
        self.assertNotIn("warning", server.errors())
        server = Server("--host", "0.0.0.0")
        self.assertEqual(server.stop(), 0)
        self.assertIn("API key", server.errors())

    def test_names_and_ipv6(self):
        try:
            with socket.socket(socket.AF_INET6) as probe:
                probe.bind(("::1", 0))
        except OSError:
            arguments = ()
        else:
            arguments = ("--host", "::1")
        server = Server("--served-model-name", "one", "two", *arguments, wait=False)
        import http.client
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            connection = http.client.HTTPConnection("::1" if arguments else "127.0.0.1", server.port, timeout=30)
            connection.request("GET", "/v1/models")
            response = connection.getresponse()
            text = response.read()
            connection.close()
            if response.status == 200:
                break
        self.assertIn(b'"one"', text)
        self.assertIn(b'"two"', text)
        self.assertEqual(server.stop(), 0)


if __name__ == "__main__":
    main()
