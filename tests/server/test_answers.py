# SPDX-License-Identifier: Apache-2.0
"""The bundled model's answers, streamed and not, alone and together."""
import json
import threading

from support import ServerCase, main

WEATHER = [{"type": "function", "function": {
    "name": "get_weather", "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]


def joined(events, key):
    return "".join(e["choices"][0]["delta"].get(key) or "" for e in events if e["choices"])


class Answers(ServerCase):
    def both(self, messages, **fields):
        """The message of the whole answer, after checking that the stream adds up to the same."""
        body = {"messages": messages, "temperature": 0, **fields}
        status, whole = self.server.request("POST", "/v1/chat/completions", body)
        self.assertEqual(status, 200, whole)
        message = whole["choices"][0]["message"]
        events = self.server.stream("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
        self.assertEqual(joined(events, "content"), message["content"] or "")
        self.assertEqual(joined(events, "reasoning_content"), message.get("reasoning_content", ""))
        finish = [e["choices"][0]["finish_reason"] for e in events if e["choices"] and e["choices"][0]["finish_reason"]]
        self.assertEqual(finish, [whole["choices"][0]["finish_reason"]])
        self.assertEqual(events[-1]["choices"], [])
        self.assertEqual(events[-1]["usage"], whole["usage"])
        return message, whole["choices"][0]["finish_reason"], events

    def test_capital(self):
        message, finish, _ = self.both([{"role": "user", "content": "What is the capital of France?"}])
        self.assertIn("Paris", message["content"])
        self.assertTrue(message["reasoning_content"])
        self.assertEqual(finish, "stop")

    def test_thinking_off(self):
        message, _, _ = self.both([{"role": "user", "content": "What is 12 + 7?"}],
                                  chat_template_kwargs={"enable_thinking": False})
        self.assertIn("19", message["content"])
        self.assertNotIn("reasoning_content", message)

    def test_emoji(self):
        message, _, _ = self.both([{"role": "user", "content": "Show me the emoji of a fish."}])
        self.assertEqual(message["content"], "\U0001F41F")

    def test_recall(self):
        message, _, _ = self.both([{"role": "user", "content": "My name is Ada. Remember it."},
                                   {"role": "assistant", "content": "Your name is Ada."},
                                   {"role": "user", "content": "What is my name?"}])
        self.assertIn("Ada", message["content"])

    def test_tool_call_and_its_result(self):
        question = {"role": "user", "content": "How is the weather in Ottawa today?"}
        message, finish, events = self.both([question], tools=WEATHER)
        self.assertEqual(finish, "tool_calls")
        call = message["tool_calls"][0]
        self.assertEqual(call["function"]["name"], "get_weather")
        self.assertEqual(json.loads(call["function"]["arguments"]), {"city": "Ottawa"})
        pieces = [c for e in events if e["choices"] for c in e["choices"][0]["delta"].get("tool_calls", [])]
        self.assertEqual("".join(p["function"]["arguments"] for p in pieces), call["function"]["arguments"])
        self.assertEqual([("id" in p) for p in pieces], [True] + [False] * (len(pieces) - 1))
        answer, _, _ = self.both([question, message, {"role": "tool", "tool_call_id": call["id"],
                                                      "content": '{"temperature": 0, "sky": "cloudy"}'}], tools=WEATHER)
        self.assertIn("cloudy", answer["content"])

    def test_completions(self):
        body = {"prompt": "The capital of", "temperature": 0, "max_tokens": 8}
        _, whole = self.server.request("POST", "/v1/completions", body)
        events = self.server.stream("/v1/completions", body)
        self.assertEqual("".join(e["choices"][0]["text"] for e in events), whole["choices"][0]["text"])
        _, tokens = self.server.request("POST", "/tokenize", {"prompt": "The capital of"})
        _, of_ids = self.server.request("POST", "/v1/completions", {**body, "prompt": tokens["tokens"]})
        self.assertEqual(of_ids["choices"], whole["choices"])
        _, back = self.server.request("POST", "/detokenize", {"tokens": tokens["tokens"]})
        self.assertEqual(back["prompt"], "The capital of")

    def test_seeds(self):
        body = {"messages": [{"role": "user", "content": "Tell me anything."}], "temperature": 1.5, "top_k": 0, "top_p": 1,
                "max_tokens": 40, "n": 2, "seed": 42}
        answers = []
        for _ in range(3):
            _, whole = self.server.request("POST", "/v1/chat/completions", body)
            answers.append([c["message"] for c in whole["choices"]])
        self.assertEqual(answers[0], answers[1])
        self.assertEqual(answers[0], answers[2])
        self.assertNotEqual(answers[0][0], answers[0][1])

    def test_company_changes_nothing(self):
        questions = [f"What is {a} + {b}?" for a, b in ((3, 4), (12, 7), (20, 5), (9, 9), (1, 2), (30, 11))]
        alone = [self.server.chat(q)[1]["choices"] for q in questions]
        together = [None] * len(questions)

        def ask(i):
            together[i] = self.server.chat(questions[i])[1]["choices"]
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(questions))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(together, alone)


if __name__ == "__main__":
    main()
