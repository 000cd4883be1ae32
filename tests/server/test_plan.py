# SPDX-License-Identifier: Apache-2.0
"""`qwen3-moe plan`: the split of a GPU's memory on paper, with neither a GPU nor weights."""
import json
import pathlib
import re
import shutil
import tempfile
import unittest

from support import MODEL, ROOT, main, run

LARGE = ROOT / "examples/qwen3_moe/configs/qwen3.6-35b-a3b.json"
GIB = 1 << 30


class Plan(unittest.TestCase):
    def test_the_ledger_adds_up(self):
        code, out, err = run("plan", LARGE, "--vram", "12GiB")
        self.assertEqual(code, 0, err)
        for line in ("context", "kernels", "weights", "workspace", "graphs", "recurrent states", "KV pages", "expert slots", "reserve",
                     "total"):
            self.assertIn("\n" + line, out)
        code, out, err = run("plan", LARGE, "--vram", "12GiB", "--json")
        self.assertEqual(code, 0, err)
        plan = json.loads(out)
        self.assertEqual(sum(row["planned_bytes"] for row in plan["lines"]), plan["planned_bytes"])
        self.assertLessEqual(plan["planned_bytes"], 12 * GIB)
        self.assertEqual(len(plan["lines"]), 9)
        self.assertLess(plan["expert_slots"], plan["experts"])

    def test_more_memory_never_means_less(self):
        before = None
        for size in ("4GiB", "6GiB", "8GiB", "12GiB", "16GiB", "24GiB", "48GiB"):
            plan = json.loads(run("plan", LARGE, "--vram", size, "--json")[1])
            # Steps are larger while experts have to be fetched, and only then.
            self.assertTrue(plan["step_tokens"] == 512 or plan["expert_slots"] < plan["experts"], size)
            now = [plan[key] for key in ("expert_slots", "kv_pages", "context_tokens", "max_running")]
            if before:
                self.assertTrue(all(a >= b for a, b in zip(now, before)), size)
            before = now

    def test_headers_alone_are_read(self):
        """A folder with a config.json and no tensors will do."""
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(LARGE, pathlib.Path(folder) / "config.json")
            code, out, err = run("plan", folder, "--vram", "12GiB")
            self.assertEqual(code, 0, err)
            self.assertIn("warning:", out)
        self.assertEqual(run("plan", MODEL, "--vram", "2GiB")[0], 0)
        self.assertEqual(run("plan", "tiny", "--vram", "2GiB")[0], 0)

    def test_wishes(self):
        wishes = ("--context", 8192, "--max-running", 2, "--expert-slots", 1000)
        plan = json.loads(run("plan", LARGE, "--vram", "12GiB", *wishes, "--json")[1])
        self.assertEqual((plan["context_tokens"], plan["max_running"], plan["expert_slots"]), (8192, 2, 1000))
        half = json.loads(run("plan", LARGE, "--vram", "12GiB", "--kv-fp8", "--json")[1])
        self.assertLessEqual(half["kv_page_bytes"], 16 * 20480 // 2 + 4096)

    def test_refusals_show_the_arithmetic(self):
        code, out, err = run("plan", LARGE, "--vram", "3GiB")
        self.assertEqual((code, out), (2, ""))
        for part in ("does not fit", "weights", "too few", "It would fit with any one of", "more memory"):
            self.assertIn(part, err)
        code, out, _ = run("plan", LARGE, "--vram", "3GiB", "--json")
        self.assertEqual(code, 2)
        self.assertGreater(json.loads(out)["missing_bytes"], 0)
        code, _, err = run("plan", LARGE, "--vram", "12GiB", "--expert-slots", "6000", "--kv-bytes", "4GiB")
        self.assertEqual(code, 2)
        self.assertIn("6000 of 10240 experts", err)
        slots = re.search(r"^  --expert-slots (\d+)$", err, re.M).group(1)
        self.assertEqual(run("plan", LARGE, "--vram", "12GiB", "--expert-slots", slots, "--kv-bytes", "4GiB")[0], 0)

    def test_a_refusal_names_numbers_that_fit(self):
        for size, wishes in (("100MiB", ()), ("4GiB", ("--context", 262144)), ("5GiB", ("--max-running", 100)),
                             ("6GiB", ("--context", 262144, "--max-running", 200))):
            code, _, err = run("plan", LARGE, "--vram", size, *wishes)
            self.assertEqual(code, 2)
            more = int(re.search(r"^  (\d+)MiB more memory$", err, re.M).group(1))
            enough = int(float(size[:-3]) * (1024 if size.endswith("GiB") else 1)) + more
            self.assertEqual(run("plan", LARGE, "--vram", f"{enough}MiB", *wishes)[0], 0)
            self.assertEqual(run("plan", LARGE, "--vram", f"{enough - 1}MiB", *wishes)[0], 2)
            changes = [line.split() for line in err.split("any one of:\n")[1].splitlines() if line.startswith("  --")]
            self.assertEqual(bool(changes), bool(wishes), err)
            for change in changes:
                kept = [(wishes[i], str(wishes[i + 1])) for i in range(0, len(wishes), 2) if wishes[i] not in change]
                arguments = [word for pair in kept for word in pair] + change
                self.assertEqual(run("plan", LARGE, "--vram", size, *arguments)[0], 0, (size, change))

    def test_refusals_are_json_too(self):
        """With --json every refusal is one object, and each of its proposals can be taken as it stands."""
        for size, wishes in (("3GiB", ()), ("12GiB", ("--expert-slots", "99999")), ("12GiB", ("--context", "300000")),
                             ("12GiB", ("--expert-slots", "20", "--max-running", "16")),
                             ("12GiB", ("--kv-bytes", "50MB", "--context", "65536")), ("12GiB", ("--expert-slots", "6000", "--kv-bytes", "4GiB")),
                             ("6GiB", ("--context", "262144", "--max-running", "200")), ("1GiB", ("--context", "300000"))):
            with self.subTest(size=size, wishes=wishes):
                code, out, err = run("plan", LARGE, "--vram", size, *wishes, "--json")
                self.assertEqual((code, err), (2, ""))
                self.assertEqual(out.count("\n"), 1)
                refusal = json.loads(out)
                told = run("plan", LARGE, "--vram", size, *wishes)
                self.assertEqual((told[0], told[1], told[2]), (2, "", "qwen3-moe: " + refusal["refused"] + "\n"))
                self.assertEqual(refusal["missing_bytes"] is None, refusal["lines"] is None)
                self.assertEqual(bool(refusal["proposals"]), (size, wishes) != ("1GiB", ("--context", "300000")), refusal)
                for proposal in refusal["proposals"]:
                    self.assertTrue(proposal["text"])
                    options = {"--vram": size} | dict(zip(wishes[::2], wishes[1::2])) | proposal["options"]
                    words = [word for name, value in options.items() if value is not None for word in (name, value)]
                    self.assertEqual(run("plan", LARGE, *words)[0], 0, (proposal, words))

    def test_what_a_wish_takes_is_told(self):
        code, out, err = run("plan", LARGE, "--vram", "12GiB", "--kv-bytes", "50MB")
        self.assertEqual(code, 0, err)
        self.assertIn("instead of 32768: --kv-bytes", out)
        code, out, err = run("plan", LARGE, "--vram", "12GiB", "--max-running", "1")
        self.assertEqual(code, 0, err)
        self.assertIn("1 sequence at once", out)
        self.assertIn(" 1 size\n", out)

    def test_a_compiled_model_is_planned_as_its_checkpoint(self):
        plans = [json.loads(run("plan", model, "--vram", "2GiB", "--json")[1]) for model in ("tiny", MODEL)]
        for plan in plans:
            del plan["model"], plan["warnings"]
        self.assertEqual(*plans)

    def test_bad_usage_is_two_and_one_sentence(self):
        for arguments in ((), (LARGE,), (LARGE, "--vram", "12XB"), (LARGE, "--vram", "0"), ("no-such-model", "--vram", "1GiB"),
                          (LARGE, "--vram", "12GiB", "--kv-bytes", "-1"), (LARGE, "--vram", "12GiB", "--context", "300000"),
                          (LARGE, "--vram", "12GiB", "--expert-slots", "99999")):
            with self.subTest(arguments=arguments):
                code, out, err = run("plan", *arguments)
                self.assertEqual((code, out), (2, ""), err)
                self.assertEqual(err.count("\n"), 1, err)
                self.assertTrue(err.startswith("qwen3-moe: "), err)


if __name__ == "__main__":
    main()
