# SPDX-License-Identifier: Apache-2.0
"""The program as a process: options, exit codes, signals, start and stop."""
import json
import os
import pathlib
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import unittest

from support import MODEL, PROGRAM, Server, main, run


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
                          ("chat", "--model", MODEL, "--context", "100000000"),
                          ("chat", "--model", MODEL, "--expert-cache", "/tmp"), ("chat", "--model", MODEL, "--expert-cpu", "always"),
                          ("chat", "--model", MODEL, "--lock-limit", "-1"), ("chat", "--model", MODEL, "--lock-limit", "1e99")):
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

    def refused(self, change, commands, said):
        """Each command ends with 2 and one line that says why, nothing hangs."""
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder) / "m"
            shutil.copytree(MODEL, copy)
            change(copy)
            for command in commands:
                code, out, err = run(*command, "--model", copy, timeout=300)
                self.assertEqual(code, 2, (command, err))
                self.assertEqual(err.count("\n"), 1, err)
                self.assertTrue(err.startswith("qwen3-moe: "), err)
                self.assertIn(said, err)
                self.assertNotIn("ready", out)

    def test_files_that_are_no_files(self):
        texts = (("chat",), ("complete", "--prompt", "a"), ("serve", "--port", "0"))
        everything = (*texts, ("info",), ("verify", "--reference", "/no/such/file"))
        loading = tuple(c for c in everything if c != ("info",))

        def instead(name, make):
            def change(model):
                (model / name).unlink()
                make(model / name)
            return change
        for name, commands in (("config.json", everything), ("hf_quant_config.json", everything), ("model.safetensors.index.json", everything),
                               ("generation_config.json", loading), ("tokenizer.json", texts), ("chat_template.jinja", texts),
                               ("tokenizer_config.json", texts)):
            with self.subTest(name=name):
                self.refused(instead(name, os.mkfifo), commands, f"{name}: not a regular file")
                self.refused(instead(name, os.mkdir), commands, f"{name}: not a regular file")
                self.refused(instead(name, lambda p: p.symlink_to("nowhere")), commands, f"{name}: cannot be opened")
                self.refused(instead(name, lambda p: p.symlink_to(p.name)), commands, f"{name}: cannot be opened")

    def test_templates_that_fail_when_run(self):
        for source in ("", "{{ 1 // 0 }}", "{{ nothing() }}", "{{ messages[0].nothing.more }}", "{% for i in range(10 ** 9) %}{% endfor %}",
                       "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ raise_exception('no\\n\x1b[31mmore') }}"):
            with self.subTest(source=source):
                self.refused(lambda m: (m / "chat_template.jinja").write_text(source), (("chat",), ("serve", "--port", "0")), "chat template")

    def test_a_tokenizer_past_the_vocabulary(self):
        def change(model):
            tokenizer = json.loads((model / "tokenizer.json").read_text())
            tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 2048, "content": "<|more|>"})
            (model / "tokenizer.json").write_text(json.dumps(tokenizer))
        self.refused(change, (("chat",), ("complete", "--prompt", "a"), ("serve", "--port", "0")), "token id 2048")

    def test_messages_stay_one_line(self):
        def change(model):
            index = json.loads((model / "model.safetensors.index.json").read_text())
            index["weight_map"][next(iter(index["weight_map"]))] = "a\nqwen3-moe: all is well\x1b[2J" + "b" * 100_000
            (model / "model.safetensors.index.json").write_text(json.dumps(index))
        self.refused(change, (("info",), ("chat",), ("serve", "--port", "0")), "is said to be in")
        code, _, err = run("info", "--model", "/no/such\nfolder\x9b")
        self.assertEqual((code, err.count("\n")), (2, 1), err)

    def test_not_a_number_is_no_number(self):
        for arguments in (("chat", "--temperature", "nan"), ("complete", "--prompt", "a", "--top-p", "-nan"), ("chat", "--min-p", "NaN"),
                          ("verify", "--reference", "/no/such/file", "--tolerance", "nan")):
            code, _, err = run(*arguments, "--model", MODEL)
            self.assertEqual((code, err.count("\n")), (2, 1), err)
            self.assertIn("not a number", err)

    def test_no_host_is_not_every_host(self):
        code, out, err = run("serve", "--model", MODEL, "--port", "0", "--host", "")
        self.assertEqual((code, out, err.count("\n")), (2, "", 1), err)

    def test_endless_input_has_an_end(self):
        for command in (("complete", "--prompt", "-"), ("chat",)):
            with open("/dev/zero", "rb") as zeros:
                done = subprocess.run([PROGRAM, *command, "--model", str(MODEL)], stdin=zeros, capture_output=True, text=True, timeout=300)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)
            self.assertIn("more than 16777216 bytes", done.stderr)

    def test_output_that_nobody_takes(self):
        for command in (("complete", "--prompt", "a", "--max-tokens", "2", "--model", str(MODEL)), ("info",)):
            for preexec, stdout in ((None, open("/dev/full", "wb")), (lambda: os.close(1), subprocess.DEVNULL)):
                done = subprocess.run([PROGRAM, *command], stdout=stdout, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
                                      preexec_fn=preexec, timeout=300)
                if stdout is not subprocess.DEVNULL:
                    stdout.close()
                self.assertEqual((done.returncode, done.stderr.count("\n")), (3, 1), done.stderr)
                self.assertIn("standard output", done.stderr)

    def test_too_little_memory_is_told(self):
        for megabytes in range(12, 100, 2):
            def limit():
                resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
            try:
                if subprocess.run([PROGRAM, "info"], capture_output=True, preexec_fn=limit, timeout=300).returncode != 0:
                    continue  # not even the program itself fits
                for command in (("complete", "--prompt", "a", "--max-tokens", "1", "--model", str(MODEL)),
                                ("serve", "--model", "/no/such/folder", "--port", "0")):
                    done = subprocess.run([PROGRAM, *command], capture_output=True, text=True, preexec_fn=limit, timeout=300)
                    with self.subTest(megabytes=megabytes, command=command):
                        self.assertIn(done.returncode, (0, 2, 3), done.stderr)
                        self.assertEqual(done.stderr.count("\n"), int(done.returncode != 0), done.stderr)
                        self.assertNotIn("temporarily", done.stderr)
            except subprocess.SubprocessError as problem:
                self.fail(f"{megabytes} MB: {problem}")

    def test_the_smallest_context(self):
        code, _, err = run("chat", "--model", MODEL, "--context", "1")
        self.assertEqual((code, err.count("\n")), (2, 1), err)
        code, out, err = run("complete", "--model", MODEL, "--context", "2", "--prompt", "a")
        self.assertEqual((code, err), (0, ""), out)

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
        for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            server = Server()
            self.assertEqual(server.stop(sign), 0)
            self.assertIn("stopped", server.errors())

    def test_a_terminal_that_goes_away_under_nohup(self):
        server = Server(preexec=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
        server.process.send_signal(signal.SIGHUP)
        self.assertEqual(server.chat("What is 1 + 1?", max_tokens=4)[0], 200)
        time.sleep(1.2)  # longer than it waits for a signal at a time
        self.assertEqual(server.request("GET", "/health")[0], 200)
        self.assertEqual(server.stop(), 0)

    def test_a_signal_while_loading(self):
        server = Server(wait=False)
        self.assertEqual(server.stop(signal.SIGTERM), 0)

    def test_readers_of_the_output_may_leave(self):
        server = Server(wait=False)
        server.process.stdout.close()  # before the lines about the model are written
        server.wait_ready()
        self.assertEqual(server.chat("What is 1 + 1?")[0], 200)
        self.assertEqual(server.stop(), 0)

    def test_running_answers_may_end(self):
        for sign in (signal.SIGINT, signal.SIGHUP):
            with self.subTest(sign=sign):
                self.answer_ends_after(sign)

    def answer_ends_after(self, sign):
        server = Server()
        result = {}

        def ask():
            result["answer"] = server.chat("Tell me a story.", max_tokens=300, logit_bias={"1918": -100, "1916": -100})
        thread = threading.Thread(target=ask)
        thread.start()
        self.assertTrue(server.eventually(lambda: server.metric("nibble_requests_running") == 1))
        self.assertEqual(server.stop(sign), 0)
        thread.join()
        status, answer = result["answer"]
        self.assertEqual(status, 200, answer)
        self.assertEqual(answer["choices"][0]["finish_reason"], "length")

    def running_completion(self, server, tokens):
        """The connection of an answer of so many tokens, which has begun."""
        connection = server.connection()
        body = {"prompt": "a", "max_tokens": tokens, "logit_bias": {"1918": -100, "1916": -100}}
        connection.request("POST", "/v1/completions", json.dumps(body))
        self.assertTrue(server.eventually(lambda: server.metric("nibble_requests_running") == 1))
        return connection

    def test_a_second_signal_ends_it_at_once(self):
        server = Server()
        connection = self.running_completion(server, 4000)
        server.process.send_signal(signal.SIGINT)
        self.assertTrue(server.eventually(lambda: "stopping" in server.errors()))
        server.process.send_signal(signal.SIGINT)
        self.assertIn(server.process.wait(20), (0, 130))  # 0 if the answer ended in between
        connection.close()
        server.process.stdout.close()

    def test_a_terminal_that_goes_away_twice_is_one_signal(self):
        server = Server()
        connection = self.running_completion(server, 600)
        server.process.send_signal(signal.SIGHUP)
        self.assertTrue(server.eventually(lambda: "stopping" in server.errors()))
        self.assertEqual(server.stop(signal.SIGHUP), 0)
        self.assertEqual(connection.getresponse().status, 200)
        connection.close()
        self.assertNotIn("left at once", server.errors())

    def test_drain_has_an_end(self):
        server = Server("--drain-seconds", "0")
        connection = self.running_completion(server, 4000)
        self.assertEqual(server.stop(), 0)
        response = connection.getresponse()
        self.assertEqual(response.status, 503)
        connection.close()
        self.assertIn("1 of the answers did not end in 0 s and are cut off", server.errors())

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

    def test_wishes_about_a_gpu_on_the_cpu(self):
        for wishes, said in ((("--expert-slots", "40"), True), (("--expert-ahead", "4"), True), (("--expert-fetch", "engine"), True), (("--expert-fetch", "auto"), False), (("--lock-limit", "1GiB"), True), ((), False)):
            server = Server("--device", "host", *wishes)
            text = ""
            for line in server.process.stdout:
                text += line
                if "ready, serving" in line:
                    break
            self.assertEqual("have no effect on the CPU" in text, said, text)
            self.assertEqual(server.stop(), 0)

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
