# SPDX-License-Identifier: Apache-2.0
"""Writes tests/data/nvfp4/golden.txt: NVFP4 quantisation of a few matrices, computed with numpy.

python tests/oracles/nvfp4_golden.py > tests/data/nvfp4/golden.txt

Independent of the C++ code: E4M3 and E2M1 are rounded by searching a list of all values. The order of the
fp32 operations is the format's definition: amax / 2688, amax_block / 6 / global, w / (scale * global).
Each case is four lines after its head; floats are the hexadecimal bits of binary32:
    case NAME N K GLOBAL
    weights, codes (bytes), block scales (bytes), dequantised values
"""
import numpy as np

f32 = np.float32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], f32)
E4M3 = np.array([m * 2.0 ** -9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127], f32)


def nearest_even(values, x):
    """Index of the value nearest to each |x|; between two, the even index. Saturates."""
    x = np.abs(x).astype(np.float64)
    v = values.astype(np.float64)
    hi = np.clip(np.searchsorted(v, x), 0, len(v) - 1)
    lo = np.maximum(hi - 1, 0)
    a, b = x - v[lo], v[hi] - x
    pick = np.where(a < b, lo, np.where(b < a, hi, np.where(lo % 2 == 0, lo, hi)))
    return np.where(x >= v[-1], len(v) - 1, pick)


def quantize(w):
    blocks = w.reshape(w.shape[0], -1, 16)
    glob = max(f32(np.abs(w).max() / f32(6.0 * 448.0)), f32(1e-12))
    raw = (np.abs(blocks).max(-1) / f32(6) / glob).astype(f32)
    scale = nearest_even(E4M3, np.clip(raw, f32(2.0 ** -9), f32(448)))
    divisor = (E4M3[scale] * glob).astype(f32)[..., None]
    x = (blocks / divisor).astype(f32)
    code = nearest_even(E2M1, x) | (np.signbit(x).astype(np.int64) << 3)
    value = (E2M1[code & 7] * np.where(code >> 3, f32(-1), f32(1))).astype(f32)
    back = ((value * E4M3[scale][..., None]).astype(f32) * glob).astype(f32)
    code = code.reshape(w.shape)
    return code[:, 0::2] | (code[:, 1::2] << 4), scale, glob, back.reshape(w.shape)


def bits(a):
    return " ".join(f"{v:08x}" for v in np.ascontiguousarray(a, f32).view(np.uint32).ravel())


def main():
    r = np.random.default_rng(20)
    cases = {
        "gaussian": r.standard_normal((6, 64)).astype(f32) * f32(0.02),
        "outliers": (r.standard_normal((4, 48)) * np.exp(3 * r.standard_normal((4, 48)))).astype(f32),
        "small_blocks": (r.standard_normal((4, 64)) * 10.0 ** -r.integers(0, 9, (4, 4)).repeat(16, 1)).astype(f32),
        "zeros": np.zeros((2, 16), f32),
        "zero_block": np.concatenate([np.zeros((1, 16)), r.standard_normal((1, 16))], 1).astype(f32),
        "negative_heavy": np.array([[-8.0] * 15 + [1.0]], f32),
        "negative_zero": np.array([[-0.0, 0.0] * 7 + [6.0, -6.0]], f32),
        "ties": np.array([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0]], f32),
        "tiny": (r.standard_normal((2, 32)) * 1e-30).astype(f32),
        "huge": (r.standard_normal((2, 32)) * 1e37).astype(f32),
    }
    for name, w in cases.items():
        codes, scale, glob, back = quantize(w)
        print("case", name, *w.shape, bits(glob))
        print(bits(w))
        print(" ".join(f"{v:02x}" for v in codes.ravel()))
        print(" ".join(f"{v:02x}" for v in scale.ravel()))
        print(bits(back))


if __name__ == "__main__":
    main()
