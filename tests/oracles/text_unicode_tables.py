# SPDX-License-Identifier: Apache-2.0
"""Writes examples/qwen3_moe/text/unicode_tables.hpp by asking the reference tokenizers package.

    python tests/oracles/text_unicode_tables.py > examples/qwen3_moe/text/unicode_tables.hpp

The reference mixes two Unicode versions: its regular expressions know version 16, its NFC knows version 9.
Which characters belong to which class is therefore measured, code point by code point, not looked up.
"""
import unicodedata

import tokenizers
from tokenizers import Regex
from tokenizers.normalizers import NFC, NFD
from tokenizers.pre_tokenizers import Split

POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
LETTER, MARK, NUMBER, SPACE, DECOMPOSES, SECOND = 1, 2, 4, 8, 16, 32


def members(pattern):
    split, found = Split(Regex(pattern), "removed"), set(POINTS)
    for i in range(0, len(POINTS), 1024):
        text = "".join(map(chr, POINTS[i:i + 1024]))
        found -= {ord(c) for piece, _ in split.pre_tokenize_str(text) for c in piece}
    return found


def main():
    flags = dict.fromkeys(POINTS, 0)
    for pattern, bit in ((r"\p{L}", LETTER), (r"\p{M}", MARK), (r"\p{N}", NUMBER), (r"\s", SPACE)):
        for c in members(pattern):
            flags[c] |= bit
    nfd, nfc = NFD(), NFC()
    for c in POINTS:
        if 0xAC00 <= c < 0xD7A4:  # Hangul syllables are arithmetic
            continue
        if nfd.normalize_str(chr(c)) != chr(c):
            flags[c] |= DECOMPOSES
            d = unicodedata.decomposition(chr(c)).split()
            if len(d) == 2:
                pair = "".join(chr(int(x, 16)) for x in d)
                if len(nfc.normalize_str(pair)) == 1:
                    flags[int(d[1], 16)] |= SECOND
    # The class is the one Python's newer tables give, where the reference reorders the character at all. 0334 has
    # class 1 and moves before every other class; 0345 has class 240 and moves behind every other class.
    classes = {}
    for c in POINTS:
        k = unicodedata.combining(chr(c))
        if not k or flags[c] & DECOMPOSES:
            continue
        moves = nfd.normalize_str("\u0345" + chr(c)) != "\u0345" + chr(c) or nfd.normalize_str(chr(c) + "\u0334") != chr(c) + "\u0334"
        if moves or c in (0x0334, 0x0345):
            classes[c] = k
    # U+0340, U+0341, U+0343, U+0344 and the like decompose first, so their own class is never looked at.

    def ranges(of):
        out = []
        for c in range(0x110000):
            v = of.get(c, 0)
            if v and out and out[-1][1] == c - 1 and out[-1][2] == v:
                out[-1][1] = c
            elif v:
                out.append([c, c, v])
        return out

    def table(name, rows):
        print(f"inline constexpr unicode_range {name}[] = {{")
        line = "   "
        for a, b, v in rows:
            item = f" {{0x{a:X}, 0x{b:X}, {v}}},"
            if len(line) + len(item) > 108:
                print(line)
                line = "   "
            line += item
        print(line + "\n};\n")

    print("// SPDX-License-Identifier: Apache-2.0")
    print("/// \\file")
    print(f"/// Character classes as the tokenizers package {tokenizers.__version__} sees them. Written by")
    print("/// tests/oracles/text_unicode_tables.py; do not edit.")
    print("// clang-format off\n#pragma once\n\n#include <cstdint>\n\nnamespace qwen3_moe::detail {\n")
    print("struct unicode_range {\n  std::uint32_t first, last;\n  std::uint8_t value;\n};\n")
    print("/// Bits: 1 letter, 2 mark, 4 number, 8 white space, 16 has a canonical decomposition that NFC applies,")
    print("/// 32 is the second character of a canonical composition. Hangul has bit 1 only.")
    table("unicode_flags", ranges(flags))
    print("/// Canonical combining classes other than 0.")
    table("unicode_classes", ranges(classes))
    print("}  // namespace qwen3_moe::detail")


main()
