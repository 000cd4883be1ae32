# SPDX-License-Identifier: Apache-2.0
"""The bundled model served from a GPU: the same questions, with all experts resident and with a few slots for them."""
import json
import random
import sys
import threading
import unittest

import test_answers
from support import MODEL, ServerCase, main, run

def setUpModule():
    code, _, errors = run("complete", "--device", "cuda", "--model", MODEL, "--prompt", "a", "--max-tokens", "1")
    if code == 2 and "--device cuda:" in errors:
        print(f"nibble: test skipped: {errors.strip()}")
        sys.exit(4)
    assert code == 0, errors

class OnGpu(test_answers.Answers):
    arguments = ("--device", "cuda")

class FewExpertSlots(test_answers.Answers):
    """Experts are fetched while the server answers: graphs for batches of 1, 2, 4, … and automatic sizes otherwise."""
    arguments = ("--device", "cuda", "--expert-slots", "40")

class Fp8Cache(test_answers.Answers):
    arguments = ("--device", "cuda", "--kv-fp8")

class Crowd(ServerCase):
    """Random requests with cancels leave nothing behind."""
    arguments = ("--device", "cuda", "--expert-slots", "64", "--max-running", "6")

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

def load_tests(loader, _tests, _pattern):
    cases = (OnGpu, FewExpertSlots, Fp8Cache, Crowd)
    return unittest.TestSuite(loader.loadTestsFromTestCase(case) for case in cases)

if __name__ == "__main__":
    main()
