// SPDX-License-Identifier: Apache-2.0
// Many clients, and clients that leave.
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "streamed.hpp"
#include "support/catch.hpp"
#include "test_server.hpp"

using namespace qwen3_moe;
using namespace qwen3_moe::testing;
using namespace std::chrono_literals;

TEST_CASE("api: all clients of a full queue are answered with 200 or 429") {
  test_setup setup;
  setup.limits.slots = 1;
  setup.max_queued = 4;
  setup.answer = std::string(50, 'x');
  test_server server(setup);
  server.runner.step_pause_us = 200;
  std::atomic<int> good{0}, full{0}, other{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 40; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 5; ++i) {
        const auto response = server.chat((t + i) % 2 ? "\"stream\":true" : "");
        if (response.status == 200 && response.complete)
          ++good;
        else if (response.status == 429 && response.fields.count("retry-after") &&
                 response.error("code") == "queue_full")
          ++full;
        else
          ++other;
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(good + full == 200);
  CHECK(other == 0);
  CHECK(good > 0);
  CHECK(server.idle());
}

TEST_CASE("api: clients that leave free their slots, however they leave") {
  test_setup setup;
  setup.answer = std::string(64, 'x');
  setup.endless = true;
  setup.limits.context_tokens = 1 << 20;
  setup.limits.pages = 1 << 17;
  test_server server(setup);
  server.runner.step_pause_us = 200;
  const std::string endless = R"("max_tokens":100000)";
  const auto running = [&](int count) {
    return test_server::eventually([&] { return server.engine.counters().running == count; });
  };
  for (const bool stream : {true, false})
    for (const int way : {0, 1, 2}) {
      INFO("stream " << stream << " way " << way);
      const auto before = server.engine.counters().aborted.load();
      auto client = server.connect();
      client.post("/v1/chat/completions",
                  test_server::chat_body(endless + (stream ? ",\"stream\":true" : "")));
      if (stream) CHECK(client.wait_for("\"content\":\"x\""));
      CHECK(running(1));
      if (way == 0) client.close();
      if (way == 1) client.reset();
      if (way == 2) client.half_close();
      CHECK(running(0));
      CHECK(server.engine.counters().aborted == before + 1);
    }
  // Queued requests of clients that left are not run.
  std::vector<std::unique_ptr<raw_client>> clients;
  for (int i = 0; i < 8; ++i) {
    clients.push_back(std::make_unique<raw_client>(server.server.port()));
    clients.back()->post("/v1/chat/completions", test_server::chat_body(endless));
  }
  CHECK(test_server::eventually([&] { return server.engine.counters().queued == 4; }));
  clients.clear();
  CHECK(server.idle());
  CHECK(server.engine.counters().free_slots == 4);
  CHECK(server.engine.counters().free_pages == setup.limits.pages);
}

TEST_CASE("api: five hundred disconnects, then four normal answers") {
  test_setup setup;
  setup.answer = std::string(300, 'x');
  setup.max_queued = 1000;
  test_server server(setup);
  server.runner.step_pause_us = 50;
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 10; ++t)
    threads.emplace_back([&, t] {
      for (unsigned i = 0; i < 50; ++i) {
        auto client = server.connect();
        client.post("/v1/chat/completions", test_server::chat_body(i % 2 ? "\"stream\":true" : "",
                                                                   std::string((t * 50 + i) % 700, 'p')));
        if (i % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100 * ((t + i) % 20)));
        if (i % 5 == 0)
          client.reset();
        else
          client.close();
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(server.idle());
  for (int i = 0; i < 4; ++i)
    CHECK(text(choice(server.chat().json()).at("message").at("content")) == setup.answer);
  CHECK(server.engine.counters().free_slots == 4);
  CHECK(server.engine.counters().free_pages == setup.limits.pages);
  CHECK(test_server::eventually([&] { return server.server.connections() == 0; }));
}

TEST_CASE("api: one client's leaving does not touch another's answer") {
  test_setup setup;
  setup.answer = std::string(200, 'y');
  test_server server(setup);
  server.runner.step_pause_us = 300;
  std::string content;
  std::thread reader([&] { content = streamed(server.chat("\"stream\":true")).content; });
  for (int i = 0; i < 5; ++i) {
    auto client = server.connect();
    client.post("/v1/chat/completions", test_server::chat_body("\"stream\":true"));
    client.wait_for("data: ");
    client.reset();
  }
  reader.join();
  CHECK(content == setup.answer);
}

TEST_CASE("api: silent streams carry comments") {
  test_setup setup;
  setup.answer = "slow";
  setup.http.keep_alive_every = 30ms;
  test_server server(setup);
  server.runner.step_pause_us = 150'000;
  const auto response = server.chat("\"stream\":true");
  const event_stream events(response.body);
  CHECK(events.comments.size() >= 3);
  CHECK(events.data.back() == "[DONE]");
}

TEST_CASE("api: stopping the engine ends answers with an error, not with a made-up reason") {
  test_setup setup;
  setup.answer = std::string(64, 'x');
  setup.endless = true;
  test_server server(setup);
  server.runner.step_pause_us = 1000;
  raw_response whole, stream;
  std::thread a([&] { whole = server.chat(); });
  std::thread b([&] { stream = server.chat("\"stream\":true"); });
  CHECK(test_server::eventually([&] { return server.engine.counters().running == 2; }));
  server.engine.stop();
  a.join();
  b.join();
  CHECK(whole.status == 503);
  CHECK(whole.error("message").find("shutting down") != std::string::npos);
  const streamed parts(stream);
  CHECK(parts.error.find("shutting down") != std::string::npos);
  CHECK(parts.finish_reason.empty());
  CHECK_FALSE(parts.done);
}
