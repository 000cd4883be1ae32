# SPDX-License-Identifier: Apache-2.0
"""Writes tests/data/text/tokenizer_vectors.json with the reference tokenizers package.

    NIBBLE_SHARED=../shared python tests/oracles/text_tokenizer.py > tests/data/text/tokenizer_vectors.json

Two kinds of vectors, for the bundled tokenizer ("tiny") and Qwen3's own ("qwen3"): ids of the strings written down in
tokenizer_strings.json, and, for 100,000 generated strings, one FNV-1a hash for each hundred over all their ids and decoded
texts. generate() and SplitMix64 exist a second time in test_tokenizer_vectors.cpp and must stay in step.
"""
import gzip
import json
import os
import sys

import tokenizers

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SHARED = os.environ.get("NIBBLE_SHARED", os.path.join(ROOT, "..", "shared"))
STRINGS, BLOCK = 100_000, 100
MASK = (1 << 64) - 1


class Random:
    def __init__(self, seed):
        self.state = seed

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
        return z ^ z >> 31

    def below(self, n):
        return self.next() % n

    def pick(self, items):
        return items[self.below(len(items))]


def generate(index, parts):
    """Bytes, mostly UTF-8."""
    r, out = Random(index), b""
    for _ in range(1 + r.below(8)):
        kind = r.below(12)
        if kind == 0:
            out += r.pick(parts["words"]).encode()
        elif kind == 1:
            for _ in range(1 + r.below(4)):
                out += r.pick(parts["space"]).encode()
        elif kind == 2:
            for _ in range(1 + r.below(6)):
                out += b"%d" % r.below(10)
        elif kind == 3:
            out += r.pick(parts["contractions"]).encode()
        elif kind == 4:
            for _ in range(1 + r.below(5)):
                out += bytes([parts["punctuation"].encode()[r.below(len(parts["punctuation"]))]])
        elif kind == 5:
            first, last = r.pick(parts["blocks"])
            for _ in range(1 + r.below(8)):
                out += chr(first + r.below(last - first + 1)).encode()
        elif kind == 6:
            out += r.pick(parts["bases"]).encode()
            for _ in range(1 + r.below(6)):
                first, last = r.pick(parts["marks"])
                out += chr(first + r.below(last - first + 1)).encode()
        elif kind == 7:
            out += r.pick(parts["emoji"]).encode()
        elif kind == 8:
            token = r.pick(parts["markers"]).encode()
            out += token[:len(token) - r.below(3) % len(token)]
        elif kind == 9:
            c = r.below(0x110000)
            out += chr(c if not 0xD800 <= c < 0xE000 else c - 0xD800).encode()
        elif kind == 10:
            out += r.pick(parts["code"]).encode()
        else:
            out += bytes([r.below(256) for _ in range(1 + r.below(4))])
    return out


def fnv(h, data):
    for x in data:
        h = ((h ^ x) * 0x100000001B3) & MASK
    return h


def main():
    parts = json.load(open(os.path.join(ROOT, "tests/data/text/tokenizer_strings.json")))
    files = {
        "tiny": open(os.path.join(ROOT, "examples/qwen3_moe/models/tiny/tokenizer.json"), "rb").read(),
        "qwen3": gzip.open(os.path.join(SHARED, "data/qwen3_tokenizer/tokenizer.json.gz")).read(),
    }
    generated = [generate(i, parts).decode("utf-8", "replace") for i in range(STRINGS)]
    out = {"package": tokenizers.__version__, "block": BLOCK}
    for name, text in files.items():
        t = tokenizers.Tokenizer.from_buffer(text)
        explicit = [t.encode(s, add_special_tokens=False).ids for s in parts["explicit"]]
        ids = [e.ids for e in t.encode_batch(generated, add_special_tokens=False)]
        texts = t.decode_batch(ids, skip_special_tokens=False)
        hashes = []
        for i in range(0, STRINGS, BLOCK):
            h = 0xCBF29CE484222325
            for x, s in zip(ids[i:i + BLOCK], texts[i:i + BLOCK]):
                h = fnv(h, b"".join(n.to_bytes(4, "little") for n in x) + b"\xff" + s.encode() + b"\xff")
            hashes.append(f"{h:016x}")
        out[name] = {"explicit": explicit, "hashes": hashes}
        print(name, sum(map(len, ids)), "ids", file=sys.stderr)
    print(json.dumps(out, separators=(",", ":")))


main()
