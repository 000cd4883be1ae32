// SPDX-License-Identifier: Apache-2.0
#include "nibble/plan/ledger.hpp"

#include "support/catch.hpp"

using namespace nibble;

TEST_CASE("ledger: totals, text and rows") {
  ledger l;
  l.budget_bytes = std::uint64_t{12} << 30;
  l.plan(ledger_line::weights, 3 << 20, "all of them");
  l.plan(ledger_line::kv_pages, 5 << 20);
  CHECK(l.planned_total() == 8 << 20);
  CHECK(l.text().find("measured") == std::string::npos);
  l.measure(ledger_line::weights, 2 << 20);
  l.add_measured(ledger_line::weights, 1 << 20);
  l.add_measured(ledger_line::graphs, 512);
  CHECK(l.measured_total() == (3 << 20) + 512);
  CHECK(l.text() ==
        "                       planned    measured\n"
        "context                    0 B           -\n"
        "kernels                    0 B           -\n"
        "weights                3.0 MiB     3.0 MiB  all of them\n"
        "workspace                  0 B           -\n"
        "graphs                     0 B       512 B\n"
        "recurrent states           0 B           -\n"
        "KV pages               5.0 MiB           -\n"
        "expert slots               0 B           -\n"
        "reserve                    0 B           -\n"
        "total                  8.0 MiB     3.0 MiB  of 12.00 GiB\n");
  CHECK(l.json_rows().find("{\"line\":\"weights\",\"planned_bytes\":3145728,\"measured_bytes\":3145728}") !=
        std::string::npos);
  CHECK(l.json_rows().find("{\"line\":\"kv_pages\",\"planned_bytes\":5242880,\"measured_bytes\":null}") !=
        std::string::npos);
  CHECK(l.json_rows().front() == '[');
  CHECK(l.json_rows().back() == ']');
}

TEST_CASE("ledger: sums that do not fit are the largest number, not a small one") {
  ledger l;
  l.plan(ledger_line::weights, UINT64_MAX - 1);
  l.plan(ledger_line::kv_pages, 2);
  CHECK(l.planned_total() == UINT64_MAX);
  CHECK(saturating_multiply(std::uint64_t{1} << 63, 2) == UINT64_MAX);
}

TEST_CASE("sizes as people write them") {
  CHECK(parse_bytes("12GiB") == std::uint64_t{12} << 30);
  CHECK(parse_bytes("12 gib") == std::uint64_t{12} << 30);
  CHECK(parse_bytes("12G") == std::uint64_t{12} << 30);
  CHECK(parse_bytes("12GB") == 12'000'000'000u);
  CHECK(parse_bytes("1.5k") == 1536u);
  CHECK(parse_bytes("900MiB") == std::uint64_t{900} << 20);
  CHECK(parse_bytes("18446744073709551615") == UINT64_MAX);
  CHECK(parse_bytes("0") == 0u);
  for (const char* bad : {"", "GiB", "-1", "12XiB", "12Gib2", "1.2.3G", "18446744073709551616", "20000000T",
                          ".", "1e9", "12 G iB", "nan"}) {
    INFO(bad);
    CHECK(!parse_bytes(bad).has_value());
  }
  CHECK(bytes_text(1023) == "1023 B");
  CHECK(bytes_text(1536) == "1.5 KiB");
  CHECK(bytes_text(2 << 20) == "2.0 MiB");
  CHECK(bytes_text(UINT64_MAX) == "17179869184.00 GiB");
  CHECK(mebibytes_at_least(0) == "0MiB");
  CHECK(mebibytes_at_least((5 << 20) + 1) == "6MiB");
  CHECK(parse_bytes(mebibytes_at_least(6 << 20)) == std::uint64_t{6} << 20);
  CHECK(counted(0, "page") == "0 pages");
  CHECK(counted(1, "page") == "1 page");
  CHECK(counted(2, "page") == "2 pages");
}
