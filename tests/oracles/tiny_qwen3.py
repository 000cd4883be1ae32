# SPDX-License-Identifier: Apache-2.0
"""Makes tests/data/tiny-qwen3: a random Qwen3-MoE checkpoint in NVFP4 and what it answers, computed with numpy in fp32.

    python tests/oracles/tiny_qwen3.py [FOLDER]

Plain attention, no shared expert, the shapes of examples/qwen3_moe/configs/tiny-qwen3.json. The weights are random and
mean nothing; their sizes are chosen so that attention, router and logits are neither flat nor saturated. The model that
is computed is read back from the tensors as they are stored. Written beside the checkpoint:
    reference.safetensors  N.input_ids I32 [T], N.logits F32 [T, vocab], for N from 0
    reference.json         a list of {"prompt_ids", "completion_ids"}: greedy continuations
The seed is one for which no router choice and no greedy choice is a near tie, so an implementation that sums in another
order must give the same tokens; the script fails where that does not hold.
"""
import json
import os
import struct
import sys

import numpy as np

from nvfp4_golden import E2M1, E4M3, quantize

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CONFIG = os.path.join(ROOT, "examples", "qwen3_moe", "configs", "tiny-qwen3.json")
SEED, LEAST_ROUTER_GAP, LEAST_LOGIT_GAP = 12, 5e-6, 0.01
LOGIT_LENGTHS = (1, 17, 40, 64)
PROMPT_LENGTHS, COMPLETION = (1, 2, 5, 15, 16, 17, 31, 48), 24
f32 = np.float32


# --- stored tensors: name → (dtype, shape, bytes) ---------------------------------------------------------------------

def bf16_bits(a):
    """Round to nearest even."""
    bits = np.ascontiguousarray(a, f32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def put_bf16(tensors, name, a):
    tensors[name] = ("BF16", a.shape, bf16_bits(a).tobytes())


def put_nvfp4(tensors, module, w):
    codes, scale, global_scale, _ = quantize(w.astype(f32))
    tensors[module + ".weight"] = ("U8", codes.shape, codes.astype(np.uint8).tobytes())
    tensors[module + ".weight_scale"] = ("F8_E4M3", scale.shape, scale.astype(np.uint8).tobytes())
    tensors[module + ".weight_scale_2"] = ("F32", (), f32(global_scale).tobytes())
    tensors[module + ".input_scale"] = ("F32", (), f32(0.01).tobytes())  # of W4A4; not used


def get_bf16(tensors, name):
    kind, shape, data = tensors[name]
    assert kind == "BF16", name
    return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(f32).reshape(shape)


def get_nvfp4(tensors, module):
    _, (rows, half), data = tensors[module + ".weight"]
    codes = np.frombuffer(data, np.uint8).reshape(rows, half)
    codes = np.stack([codes & 15, codes >> 4], -1).reshape(rows, 2 * half)
    value = E2M1[codes & 7] * np.where(codes >> 3, f32(-1), f32(1))
    _, shape, data = tensors[module + ".weight_scale"]
    scale = E4M3[np.frombuffer(data, np.uint8)].reshape(shape).repeat(16, 1)
    return (value * scale * np.frombuffer(tensors[module + ".weight_scale_2"][2], f32)[0]).astype(f32)


def write_safetensors(path, tensors):
    header, offset = {}, 0
    for name, (kind, shape, data) in tensors.items():
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            out.write(data)


# --- the checkpoint ---------------------------------------------------------------------------------------------------

def random_checkpoint(c, seed):
    r = np.random.default_rng(seed)
    hidden, inner, dim = c["hidden_size"], c["moe_intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim

    def normal(rows, columns, gain):
        return r.standard_normal((rows, columns)) * (gain / np.sqrt(columns))

    def around(value, size):
        return value * (1 + 0.2 * r.standard_normal(size))

    t = {}
    put_bf16(t, "model.embed_tokens.weight", r.standard_normal((c["vocab_size"], hidden)))
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        put_bf16(t, layer + "input_layernorm.weight", around(1, hidden))
        put_bf16(t, layer + "post_attention_layernorm.weight", around(1, hidden))
        put_bf16(t, layer + "self_attn.q_norm.weight", around(1.6, dim))
        put_bf16(t, layer + "self_attn.k_norm.weight", around(1.6, dim))
        for part, rows, columns, gain in (("q", q, hidden, 1), ("k", kv, hidden, 1), ("v", kv, hidden, 1), ("o", hidden, q, 1.5)):
            put_bf16(t, layer + f"self_attn.{part}_proj.weight", normal(rows, columns, gain))
        put_bf16(t, layer + "mlp.gate.weight", normal(c["num_experts"], hidden, 3))
        for e in range(c["num_experts"]):
            expert = layer + f"mlp.experts.{e}."
            put_nvfp4(t, expert + "gate_proj", normal(inner, hidden, 1.5))
            put_nvfp4(t, expert + "up_proj", normal(inner, hidden, 1.5))
            put_nvfp4(t, expert + "down_proj", normal(hidden, inner, 1.5))
    put_bf16(t, "model.norm.weight", around(1, hidden))
    put_bf16(t, "lm_head.weight", normal(c["vocab_size"], hidden, 3))
    return t


# --- the model --------------------------------------------------------------------------------------------------------

def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True, dtype=f32) + f32(eps)) * weight


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True, dtype=f32)


def rotate(x, theta):
    """x [T, heads, dim]; the pair (i, i + dim/2) turns by t · theta^(-2i/dim)."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[0])[:, None] * theta ** (-np.arange(half) / half)
    cosine, sine = np.cos(angle).astype(f32)[:, None], np.sin(angle).astype(f32)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1)


class Model:
    def __init__(self, c, tensors):
        self.c, self.t, self.cache, self.router_gap = c, tensors, {}, np.inf

    def bf16(self, name):
        if name not in self.cache:
            self.cache[name] = get_bf16(self.t, name)
        return self.cache[name]

    def nvfp4(self, module):
        if module not in self.cache:
            self.cache[module] = get_nvfp4(self.t, module)
        return self.cache[module]

    def attention(self, layer, x):
        c, tokens, dim = self.c, len(x), self.c["head_dim"]
        q, k, v = ((x @ self.bf16(f"{layer}{part}_proj.weight").T).reshape(tokens, -1, dim) for part in "qkv")
        q = rotate(rms_norm(q, self.bf16(layer + "q_norm.weight"), c["rms_norm_eps"]), c["rope_theta"])
        k = rotate(rms_norm(k, self.bf16(layer + "k_norm.weight"), c["rms_norm_eps"]), c["rope_theta"])
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat(group, 1), v.repeat(group, 1)
        scores = np.einsum("thd,shd->hts", q, k) / f32(np.sqrt(dim))
        scores = np.where(np.tril(np.ones((tokens, tokens), bool)), scores, f32(-np.inf))
        mixed = np.einsum("hts,shd->thd", softmax(scores), v).reshape(tokens, -1)
        return mixed @ self.bf16(layer + "o_proj.weight").T

    def experts(self, layer, x):
        top = self.c["num_experts_per_tok"]
        share = softmax(x @ self.bf16(layer + "gate.weight").T)
        order = np.argsort(-share, -1, kind="stable")  # ties to the lower id
        ranked = np.take_along_axis(share, order, -1)
        self.router_gap = min(self.router_gap, float((ranked[:, top - 1] - ranked[:, top]).min()))
        weight = ranked[:, :top] / ranked[:, :top].sum(-1, keepdims=True, dtype=f32)
        out = np.zeros_like(x)
        for token in range(len(x)):
            for expert, w in zip(order[token, :top], weight[token]):
                name = f"{layer}experts.{expert}."
                gate, up = self.nvfp4(name + "gate_proj") @ x[token], self.nvfp4(name + "up_proj") @ x[token]
                out[token] += w * (self.nvfp4(name + "down_proj") @ (gate / (1 + np.exp(-gate)) * up))
        return out

    def logits(self, ids):
        c = self.c
        x = self.bf16("model.embed_tokens.weight")[ids]
        for i in range(c["num_hidden_layers"]):
            layer = f"model.layers.{i}."
            x = x + self.attention(layer + "self_attn.", rms_norm(x, self.bf16(layer + "input_layernorm.weight"), c["rms_norm_eps"]))
            x = x + self.experts(layer + "mlp.", rms_norm(x, self.bf16(layer + "post_attention_layernorm.weight"), c["rms_norm_eps"]))
        result = rms_norm(x, self.bf16("model.norm.weight"), c["rms_norm_eps"]) @ self.bf16("lm_head.weight").T
        assert result.dtype == f32
        return result


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, "tests", "data", "tiny-qwen3")
    os.makedirs(folder, exist_ok=True)
    with open(CONFIG) as file:
        config_text = file.read()
    c = json.loads(config_text)
    tensors = random_checkpoint(c, SEED)
    model = Model(c, tensors)
    r = np.random.default_rng(SEED + 1)
    reference = {}
    for n, length in enumerate(LOGIT_LENGTHS):
        ids = r.integers(0, c["vocab_size"], length)
        logits = model.logits(ids)
        reference[f"{n}.input_ids"] = ("I32", ids.shape, ids.astype(np.int32).tobytes())
        reference[f"{n}.logits"] = ("F32", logits.shape, logits.tobytes())
    cases, logit_gap = [], np.inf
    for length in PROMPT_LENGTHS:
        prompt = [int(id) for id in r.integers(0, c["vocab_size"], length)]
        ids = list(prompt)
        for _ in range(COMPLETION):
            last = model.logits(np.array(ids))[-1]
            second, best = np.sort(last)[-2:]
            logit_gap = min(logit_gap, float(best - second))
            ids.append(int(np.argmax(last)))
        cases.append({"prompt_ids": prompt, "completion_ids": ids[length:]})
    print(f"least router gap {model.router_gap:.2e}, least gap of a greedy choice {logit_gap:.3f}, "
          f"logits' deviation {logits.std():.2f}, different ids in the answers {len({i for k in cases for i in k['completion_ids']})}")
    if model.router_gap < LEAST_ROUTER_GAP or logit_gap < LEAST_LOGIT_GAP:
        sys.exit("a near tie: take another seed")
    write_safetensors(os.path.join(folder, "model.safetensors"), tensors)
    write_safetensors(os.path.join(folder, "reference.safetensors"), reference)
    for name, text in (("config.json", config_text), ("generation_config.json", '{"eos_token_id": 383}\n'),
                       ("reference.json", json.dumps(cases, separators=(",", ":")) + "\n")):
        with open(os.path.join(folder, name), "w") as out:
            out.write(text)


if __name__ == "__main__":
    main()
