# SPDX-License-Identifier: Apache-2.0
"""The bundled model served from a GPU: the same questions, with all experts resident and with a few slots for them."""
import json
import os
import pathlib
import random
import re
import sys
import tempfile
import threading
import unittest

import test_answers
from support import MODEL, Server, ServerCase, main, run

STATE = tempfile.TemporaryDirectory()  # what servers remember between starts

def setUpModule():
    os.environ["XDG_STATE_HOME"] = STATE.name
    code, _, errors = run("complete", "--device", "cuda", "--model", MODEL, "--prompt", "a", "--max-tokens", "1")
    if code == 2 and "--device cuda:" in errors:
        print(f"nibble: test skipped: {errors.strip()}")
        sys.exit(4)
    assert code == 0, errors

class OnGpu(test_answers.Answers):
    arguments = ("--device", "cuda")

class FewExpertSlots(test_answers.Answers):
    """Experts are fetched while the server answers: graphs for batches of 1, 2, 4, … and automatic sizes otherwise."""
    arguments = ("--device", "cuda", "--expert-slots", "40", "--expert-cpu", "off")

class FetchedByEngine(test_answers.Answers):
    """The same, brought by the copy engine, with the next layer's experts ahead and the CPU where it pays."""
    arguments = ("--device", "cuda", "--expert-slots", "40", "--expert-fetch", "engine", "--expert-ahead", "1")

class FetchedByKernel(test_answers.Answers):
    arguments = ("--device", "cuda", "--expert-slots", "40", "--expert-fetch", "kernel", "--expert-ahead", "1")

class NothingLocked(test_answers.Answers):
    """Memory that the system does not lock: experts go through host threads, and the answers are the same."""
    arguments = ("--device", "cuda", "--expert-slots", "40", "--lock-limit", "1")

class Fp8Cache(test_answers.Answers):
    arguments = ("--device", "cuda", "--kv-fp8")

class Crowd(ServerCase):
    """Random requests with cancels leave nothing behind."""
    arguments = ("--device", "cuda", "--expert-slots", "64", "--max-running", "6", "--expert-fetch", "engine")

    def test_crowd(self):
        pages = self.server.metric("nibble_kv_pages_free")

        def client(seed):
            rng = random.Random(seed)
            for _ in range(12):
                body = {"messages": [{"role": "user", "content": "word " * rng.randrange(1, 200)}], "stream": True,
                        "max_tokens": rng.randrange(1, 80), "temperature": rng.choice([0, 1]), "seed": seed}
                connection = self.server.connection()
                connection.request("POST", "/v1/chat/completions", json.dumps(body))
                response = connection.getresponse()
                if rng.random() < 0.4:
                    response.read(rng.randrange(1, 400))  # and away
                else:
                    self.assertEqual(response.status, 200)
                    self.assertIn(b"[DONE]", response.read())
                connection.close()

        threads = [threading.Thread(target=client, args=(i,)) for i in range(10)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertTrue(self.server.eventually(lambda: self.server.metric("nibble_requests_running") == 0))
        self.assertTrue(self.server.eventually(lambda: self.server.metric("nibble_kv_pages_free") == pages))
        self.assertEqual(self.server.request("GET", "/health")[0], 200)

def notes_of(server):
    """What a server that is ready printed about its start."""
    text = ""
    for line in server.process.stdout:
        if "ready, serving" in line:
            return text
        text += line
    raise AssertionError(text)

class SmallCard(unittest.TestCase):
    """A cap on the card's memory on which not all experts fit; everything else is left to the start: 200, and the next start knows more."""
    wishes = ("--device", "cuda", "--context", "2048", "--max-running", "4", "--kv-bytes", "4MiB")

    @classmethod
    def everything_else(cls):
        """MiB of all but expert slots, as an unlimited start counts them, and the least reserve."""
        server = Server(*cls.wishes)
        try:
            text = notes_of(server)
        finally:
            server.stop()
            server.log.close()
        size = {"B": 1 / (1 << 20), "KiB": 1 / 1024, "MiB": 1, "GiB": 1024}
        lines = {}
        for name in ("context", "kernels", "weights", "workspace", "graphs", "recurrent states", "KV pages"):
            found = re.search(rf"^{name} +([\d.]+) (\w+) +(?:([\d.]+) (\w+)|-)", text, re.M)
            assert found, text
            lines[name] = [float(n) * size[unit] if n else 0 for n, unit in (found.groups()[:2], found.groups()[2:])]
        held = [lines["kernels"][i] + lines["weights"][i] for i in (0, 1)]
        return max(held) + 64 + sum(lines[n][0] for n in ("context", "workspace", "graphs", "recurrent states", "KV pages"))

    def start(self, *arguments):
        """A server under a cap that leaves room for some of the experts, and what it printed."""
        base = self.everything_else()
        for more in (3, 2, 4, 1, 5, 6, 8, 10, 12):  # in MiB: a few of them hold all the slots
            server = Server("--vram-limit", f"{base + more:.2f}MiB", *self.wishes, *arguments, wait=False)
            try:
                server.wait_ready()
                text = notes_of(server)
            except (AssertionError, OSError):  # too small a card: it has ended
                server.stop()
                server.log.close()
                continue
            found = re.search(r"(\d+) of (\d+) experts", text)
            if found and int(found[1]) < int(found[2]):
                return server, text
            server.stop()
            server.log.close()
        self.fail("no cap left room for a part of the experts")

    def ask(self, server):
        status, body = server.chat("Count from one to ten.", max_tokens=24)
        self.assertEqual(status, 200, body)

    def finish(self, server):
        self.assertEqual(server.stop(), 0, server.errors())
        errors = server.errors()
        server.log.close()
        return errors

    def test_a_chat_request_is_answered(self):
        server, text = self.start()
        self.assertRegex(text, r"packed from the checkpoint")
        self.ask(server)
        self.assertGreater(server.metric("nibble_expert_hits_total"), 0)
        self.assertGreater(server.metric("nibble_expert_misses_total"), 0)
        self.finish(server)
        kept = list(pathlib.Path(STATE.name).glob("nibble/*.worth"))
        self.assertEqual(len(kept), 1, kept)
        server, text = self.start()
        self.assertIn("are loaded first", text)
        self.ask(server)
        self.finish(server)

    def test_the_next_start_packs_nothing(self):
        with tempfile.TemporaryDirectory() as folder:
            cache = ("--expert-cache", f"{folder}/experts.bin")
            server, text = self.start(*cache)
            self.ask(server)
            self.finish(server)
            self.assertTrue(pathlib.Path(folder, "experts.bin.worth").exists())
            server, text = self.start(*cache)
            self.assertNotIn("packed from", text)
            self.assertIn("are loaded first", text)
            self.ask(server)
            os.remove(f"{folder}/experts.bin")  # all of it is in memory: nobody misses it
            self.ask(server)
            self.finish(server)

    def test_a_folder_that_cannot_be_written_is_a_note(self):
        server, text = self.start("--expert-cache", "/proc/no such place/experts.bin")
        self.assertIn("expert cache not written", text)
        self.ask(server)
        self.assertIn("was not saved", self.finish(server))

def load_tests(loader, _tests, _pattern):
    cases = (OnGpu, FewExpertSlots, NothingLocked, Fp8Cache, Crowd, SmallCard)
    return unittest.TestSuite(loader.loadTestsFromTestCase(case) for case in cases)

if __name__ == "__main__":
    main()
