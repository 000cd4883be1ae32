# SPDX-License-Identifier: Apache-2.0
"""Requests that must end in a 4xx with `param`, or in nothing worse than a closed connection."""
import json
import random
import socket
import struct
import threading

from support import ServerCase, main


def raw(port, data, read=True, timeout=300):
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as s:
        try:
            s.sendall(data)
            s.shutdown(socket.SHUT_WR)
            reply = b""
            while read and (block := s.recv(65536)):
                reply += block
            return reply
        except (ConnectionError, TimeoutError):
            return b""


class Hostile(ServerCase):
    arguments = ("--max-running", "2")

    def tearDown(self):
        self.assertEqual(self.server.request("GET", "/health")[0], 200)

    def refused(self, param, body, path="/v1/chat/completions", status=400):
        got, answer = self.server.request("POST", path, body)
        self.assertEqual(got, status, answer)
        self.assertEqual(set(answer["error"]), {"message", "type", "param", "code"})
        self.assertEqual(answer["error"]["param"], param, answer)
        return answer["error"]

    def test_every_field_with_every_wrong_type(self):
        good = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        accepts = {
            "model": (str,), "messages": (), "tools": (list,), "tool_choice": (), "stream": (bool,), "stream_options": (dict,),
            "max_tokens": (), "max_completion_tokens": (), "n": (), "temperature": (), "top_p": (), "top_k": (), "min_p": (),
            "presence_penalty": (), "frequency_penalty": (), "repetition_penalty": (), "seed": (), "stop": (str, list),
            "logit_bias": (dict,), "logprobs": (bool,), "top_logprobs": (), "response_format": (),
            "chat_template_kwargs": (dict,), "enable_thinking": (bool,)}
        for field, kinds in accepts.items():
            for value in ("text", [], {}, True, [[[]]], {"a": {"b": []}}, -1e308, 1.5e300):
                if isinstance(value, kinds) and kinds:
                    continue
                with self.subTest(field=field, value=value):
                    got, answer = self.server.request("POST", "/v1/chat/completions", {**good, field: value})
                    self.assertEqual(got, 400, answer)
                    self.assertTrue(answer["error"]["param"].startswith(field), answer)

    def test_places_inside_messages(self):
        image = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
        self.refused("messages[0].content[0].type", {"messages": [{"role": "user", "content": [image]}]})
        self.refused("messages[1].role", {"messages": [{"role": "user", "content": "a"}, {"role": "x", "content": "b"}]})
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
        self.refused("messages[0].tool_calls[0].function.arguments", {"messages": [{"role": "assistant", "tool_calls": [call]}]})

    def test_context(self):
        for stream in (False, True):
            error = self.refused("messages", {"messages": [{"role": "user", "content": "word " * 9000}], "stream": stream})
            self.assertEqual(error["code"], "context_length_exceeded")
        self.refused("prompt", {"prompt": [5] * 4096}, "/v1/completions")
        self.assertEqual(self.server.request("POST", "/v1/completions", {"prompt": [5] * 4095, "max_tokens": 10})[0], 200)

    def test_large_and_odd_texts(self):
        for text in (" " * 2_000_000, "a" * 1_000_000, "\U0001F600" * 300_000, "\U0001F468\u200D" * 100_000, "e" + "\u0301" * 300_000,
                     "\x00" * 1000, "\uFFFF\uFFFE\u202E", "<think></think><tool_call>" * 1000):
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
            status, answer = self.server.request("POST", "/v1/chat/completions", json.dumps(body))
            self.assertIn(status, (200, 400), answer)

    def test_bodies(self):
        for body in (b"", b"null", b"[]", b"5", b'"x"', b"{", b"{}x", b"\xEF\xBB\xBF{}", b"[" * 100_000, b'{"a":' * 100_000,
                     b'{"messages":[{"role":"user","content":"\xFF\xFE"}]}', b'{"messages":[{"role":"user","content":"\\ud83d"}]}',
                     b'{"messages":[],"messages":[]}', b'{"messages":NaN}', b'{"temperature":1e400}', b"\x1f\x8b\x08\x00"):
            for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
                self.assertEqual(self.server.request("POST", path, body)[0], 400, (path, body[:40]))
        self.assertEqual(self.server.request("POST", "/tokenize", b" " * (8 * 1024 * 1024 + 1))[0], 413)

    def test_many_messages(self):
        message = {"role": "user", "content": "x"}
        self.refused("messages", {"messages": [message] * 100_000})

    def test_greedy_with_everything_banned(self):
        ids = {str(i): -100 for i in range(1024)}
        status, answer = self.server.chat("hi", logit_bias=ids, max_tokens=5)
        self.assertEqual(status, 200, answer)

    def test_edges_of_sampling(self):
        for fields in ({"temperature": 1e-38}, {"temperature": 2}, {"top_p": 0}, {"top_p": 1e-10}, {"top_k": 1}, {"top_k": 10**9}, {"top_k": -1},
                       {"min_p": 1}, {"seed": 2**63 - 1}, {"seed": -2**63}, {"seed": 2**64 - 1}, {"repetition_penalty": 10},
                       {"temperature": 2, "top_p": 1, "top_k": 0, "min_p": 0}, {"presence_penalty": -2, "frequency_penalty": 2},
                       {"logprobs": True, "top_logprobs": 20, "top_k": 1}, {"stop": ["a"] * 16}, {"n": 8}, {"max_tokens": 2**31 - 1, "stop": "."}):
            status, answer = self.server.request("POST", "/v1/chat/completions",
                                                 {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields})
            self.assertEqual(status, 200, (fields, answer))
            json.dumps(answer, allow_nan=False)

    def test_random_bytes(self):
        generator = random.Random(7)
        for _ in range(200):
            raw(self.server.port, bytes(generator.randrange(256) for _ in range(generator.randrange(1, 400))))

    def test_mutated_requests(self):
        generator = random.Random(11)
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "stop": ["x"], "seed": 5}).encode()
        head = (b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
        for _ in range(300):
            data = bytearray(head + body)
            for _ in range(generator.randrange(1, 4)):
                data[generator.randrange(len(data))] = generator.randrange(256)
            raw(self.server.port, bytes(data))

    def test_clients_that_leave(self):
        before = self.server.metric("nibble_requests_aborted_total")
        body = json.dumps({"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 4000, "stream": True,
                           "logit_bias": {"1918": -100, "1916": -100}}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)

        def leave(i):
            s = socket.create_connection(("127.0.0.1", self.server.port), timeout=300)
            s.sendall(head + body)
            if i % 2:
                s.recv(100)
            if i % 3 == 0:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            s.close()
        for _ in range(5):
            threads = [threading.Thread(target=leave, args=(i,)) for i in range(20)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
        idle = lambda: (self.server.metric("nibble_requests_running"), self.server.metric("nibble_requests_queued")) == (0, 0)
        self.assertTrue(self.server.eventually(idle, 60))
        self.assertGreater(self.server.metric("nibble_requests_aborted_total"), before)
        self.assertEqual(self.server.metric("nibble_slots_free"), 2)
        for _ in range(4):
            self.assertEqual(self.server.chat("What is 1 + 2?")[0], 200)


if __name__ == "__main__":
    main()
