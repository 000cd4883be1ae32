// SPDX-License-Identifier: Apache-2.0
// Capture, replay, fallback. Field cases by their number; those that need a device are in
// tests/device/graph.cu.
#include "nibble/graph/graph_set.hpp"

#include "support/catch.hpp"
#include "support/fake_graphs.hpp"

using namespace nibble;
using namespace nibble::test;

namespace {

using strings = std::vector<std::string>;
using set = graph_set<fake_graph_api>;

struct fixture {
  std::shared_ptr<fake_stream> stream = std::make_shared<fake_stream>();
  strings notes;
  set make(set::recorder record) {
    return set(fake_graph_api(stream), std::move(record),
               [this](std::string_view note) { notes.emplace_back(note); });
  }
  set two_ops() {
    return make([s = stream](int rows) {
      const std::string n = std::to_string(rows);
      if (const status a = s->launch("norm" + n); !a.ok()) return a;
      return s->launch("gemv" + n);
    });
  }
};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("graphs: sizes are captured largest first, uploaded, replayed") {
  fixture f;
  set graphs = f.two_ops();
  REQUIRE(graphs.capture({1, 4, 2, 4}, 7).ok());
  CHECK(f.stream->ran == strings{"norm4", "gemv4", "norm2", "gemv2", "norm1", "gemv1"});  // warm-up
  CHECK(graphs.report().captured == std::vector<int>{1, 2, 4});
  CHECK(graphs.report().eager.empty());
  CHECK(graphs.report().bytes == 3 << 20);
  CHECK(f.stream->uploaded == 3);
  f.stream->ran.clear();
  CHECK(graphs.padded(3) == 4);
  REQUIRE(graphs.run(graphs.padded(3), 7).ok());
  CHECK(f.stream->ran == strings{"norm4", "gemv4"});
  CHECK(f.notes.empty());
  graphs.destroy();
  CHECK(f.stream->live_graphs == 0);
  CHECK(f.stream->live_execs == 0);
  f.stream->ran.clear();
  REQUIRE(graphs.run(4, 7).ok());  // eagerly, the same
  CHECK(f.stream->ran == strings{"norm4", "gemv4"});
  REQUIRE(graphs.recapture(8).ok());
  CHECK(graphs.graphs() == 3);
}

TEST_CASE("graphs: a size beyond the captured ones runs eagerly as it is") {
  fixture f;
  set graphs = f.two_ops();
  REQUIRE(graphs.capture({1, 2}, 0, false).ok());
  CHECK(f.stream->ran.empty());
  CHECK(graphs.padded(5) == 5);
  CHECK(!graphs.has_graph(5));
  REQUIRE(graphs.run(5).ok());
  CHECK(f.stream->ran == strings{"norm5", "gemv5"});
}

TEST_CASE("C066: 500 requests of any length never make more graphs than sizes") {
  fixture f;
  set graphs = f.two_ops();
  REQUIRE(graphs.capture(default_captured_sizes(8)).ok());
  const auto graphs_before = f.stream->live_graphs;
  std::uint64_t free_after_50 = 0;
  for (int request = 1; request <= 500; ++request) {
    for (int step = 0; step < 8; ++step) REQUIRE(graphs.run(graphs.padded(1 + request % 8)).ok());
    if (request == 50) free_after_50 = f.stream->free_bytes;
  }
  CHECK(f.stream->live_graphs == graphs_before);
  CHECK(graphs_before == 4);
  CHECK(f.stream->free_bytes == free_after_50);
}

TEST_CASE("C068: a step that cannot be captured runs eagerly, with one line that names the op") {
  fixture f;
  set graphs = f.make([s = f.stream](int rows) {
    {
      const op_scope scope("norm");
      if (const status a = s->launch("norm"); !a.ok()) return a;
    }
    {
      const op_scope scope("attention");
      if (rows > 1) static_cast<void>(s->forbidden().ok());  // the op wants more scratch than there is
    }
    const op_scope scope("gemv");
    return s->launch("gemv");
  });
  REQUIRE(graphs.capture({1, 2}, 0, false).ok());
  CHECK(graphs.report().captured == std::vector<int>{1});
  CHECK(graphs.report().eager == std::vector<int>{2});
  REQUIRE(f.notes.size() == 1);
  CHECK(contains(f.notes[0], "graph of 2 rows, op attention"));
  CHECK(contains(f.notes[0], "run eagerly"));
  CHECK(f.stream->state == capture_state::none);
  CHECK(f.stream->live_graphs == 1);
  REQUIRE(graphs.run(2).ok());
  CHECK(f.stream->ran == strings{"norm", "gemv"});
  CHECK(f.notes.size() == 1);
}

TEST_CASE("C069: the set owns what the recorder owned, and refuses graphs that own memory") {
  fixture f;
  auto buffer = std::make_shared<std::string>("buffer");
  const std::weak_ptr<std::string> watch = buffer;
  set graphs = f.make([s = f.stream, buffer](int) { return s->launch(*buffer); });
  buffer.reset();
  REQUIRE(graphs.capture({1}).ok());
  CHECK(!watch.expired());
  graphs = set();
  CHECK(watch.expired());
  CHECK(f.stream->live_execs == 0);

  f.stream->check_result = status::invalid("fake", "the step allocates memory");
  set refused = f.two_ops();
  REQUIRE(refused.capture({1}).ok());
  CHECK(refused.graphs() == 0);
  CHECK(f.stream->live_graphs == 0);
  CHECK(contains(f.notes.at(0), "the step allocates memory"));
}

TEST_CASE("C070: a kernel that loads inside a capture spoils it; the step runs eagerly on a usable stream") {
  fixture f;
  bool loaded = false;
  set graphs = f.make([&, s = f.stream](int) {
    if (!loaded && !s->forbidden().ok()) return status::cuda(900, "first_kernel", "its module is not loaded");
    loaded = true;
    return s->launch("kernel");
  });
  REQUIRE(graphs.capture({1}, 0, false).ok());
  CHECK(graphs.graphs() == 0);
  CHECK(contains(f.notes.at(0), "first_kernel"));
  REQUIRE(graphs.run(1).ok());
  CHECK(f.stream->ran == strings{"kernel"});
  // Warmed up, as start-up does, the same step is captured.
  loaded = false;
  REQUIRE(graphs.capture({1}).ok());
  CHECK(graphs.graphs() == 1);
}

TEST_CASE("C074, C076: a graph that read what has moved is updated, or captured anew, never replayed") {
  fixture f;
  std::string buffer = "at 100";
  bool longer = false;
  set graphs = f.make([&, s = f.stream](int) {
    if (longer)
      if (const status a = s->launch("copy"); !a.ok()) return a;
    return s->launch("read " + buffer);
  });
  REQUIRE(graphs.capture({1}, 100).ok());
  f.stream->ran.clear();
  buffer = "at 200";
  REQUIRE(graphs.run(1, 200).ok());
  CHECK(f.stream->ran == strings{"read at 200"});
  CHECK(f.stream->updated == 1);
  REQUIRE(graphs.run(1, 200).ok());
  CHECK(f.stream->updated == 1);  // once is enough
  longer = true;                  // another topology cannot be updated in place
  f.stream->ran.clear();
  REQUIRE(graphs.run(1, 300).ok());
  CHECK(f.stream->ran == strings{"copy", "read at 200"});
  CHECK(f.stream->instantiated == 2);
  CHECK(f.stream->live_graphs == 1);
  CHECK(f.stream->live_execs == 1);
  CHECK(f.notes.size() == 2);
  // Memory for another instance is gone: eager, and right.
  f.stream->fail_instantiate_from = 0;
  longer = false;
  f.stream->ran.clear();
  REQUIRE(graphs.run(1, 400).ok());
  CHECK(f.stream->ran == strings{"read at 200"});
  CHECK(!graphs.has_graph(1));
}

TEST_CASE("C078: a replay that fails is reported as it is and not repeated") {
  fixture f;
  set graphs = f.two_ops();
  REQUIRE(graphs.capture({1}).ok());
  f.stream->ran.clear();
  f.stream->launch_result = status::cuda(700, "fake", "an illegal address was read");
  const status s = graphs.run(1);
  CHECK(s.cuda_error == 700);
  CHECK(is_sticky(s));
  CHECK(f.stream->ran.empty());
  CHECK_THROWS_AS(require(s), context_lost_error);
}

TEST_CASE("C083: state that swaps buffers every step is in the signature, so both ways are right") {
  fixture f;
  int current = 0;
  set graphs =
      f.make([&, s = f.stream](int) { return s->launch(current == 0 ? "state 0 to 1" : "state 1 to 0"); });
  REQUIRE(graphs.capture({1}, 0).ok());
  f.stream->ran.clear();
  strings expected;
  for (int token = 0; token < 33; ++token) {
    expected.push_back(current == 0 ? "state 0 to 1" : "state 1 to 0");
    REQUIRE(graphs.run(1, static_cast<std::uint64_t>(current)).ok());
    current = 1 - current;
  }
  CHECK(f.stream->ran == expected);
  CHECK(f.stream->live_execs == 1);
}

TEST_CASE("C085: capturing and destroying a hundred times leaves nothing behind") {
  fixture f;
  set graphs = f.two_ops();
  const auto free_before = f.stream->free_bytes;
  for (int i = 0; i < 100; ++i) {
    REQUIRE(graphs.capture({1, 2, 4}).ok());
    graphs.destroy();
    REQUIRE(graphs.run(2).ok());
  }
  CHECK(f.stream->free_bytes == free_before);
  CHECK(f.stream->live_graphs == 0);
}

TEST_CASE("graphs: too little memory for some sizes leaves those eager and the others captured") {
  fixture f;
  f.stream->fail_instantiate_from = 3;
  set graphs = f.two_ops();
  REQUIRE(graphs.capture({1, 2, 4}).ok());
  CHECK(graphs.report().captured == std::vector<int>{2, 4});
  CHECK(graphs.report().eager == std::vector<int>{1});
  REQUIRE(f.notes.size() == 1);
  CHECK(contains(f.notes[0], "out of memory (CUDA error 2); batches of this size run eagerly"));
  f.stream->ran.clear();
  CHECK(graphs.padded(1) == 1);
  REQUIRE(graphs.run(1).ok());
  CHECK(f.stream->ran == strings{"norm1", "gemv1"});
}

TEST_CASE("graphs: an error of the device ends the capture of all sizes") {
  fixture f;
  f.stream->end_result = status::cuda(719, "fake", "a kernel failed");
  set graphs = f.two_ops();
  CHECK(graphs.capture({1, 2}).cuda_error == 719);
  CHECK(f.stream->live_graphs == 0);
}

TEST_CASE("graphs: a stream that somebody else captures is left alone") {
  fixture f;
  set graphs = f.two_ops();
  f.stream->state = capture_state::active;
  REQUIRE(graphs.capture({1}, 0, false).ok());
  CHECK(graphs.graphs() == 0);
  CHECK(f.stream->state == capture_state::active);
  CHECK(contains(f.notes.at(0), "captured by somebody else"));
}

TEST_CASE("op_scope: the innermost name, and the outer one again") {
  CHECK(std::string(current_op()).empty());
  {
    const op_scope outer("layer");
    CHECK(std::string(current_op()) == "layer");
    {
      const op_scope inner("norm");
      CHECK(std::string(current_op()) == "norm");
    }
    CHECK(std::string(current_op()) == "layer");
  }
  CHECK(std::string(current_op()).empty());
}
