// SPDX-License-Identifier: Apache-2.0
// What the HTTP layer survives, over a real socket.
#include <csignal>
#include <string>
#include <thread>
#include <vector>

#include "support/catch.hpp"
#include "test_server.hpp"

using namespace qwen3_moe;
using namespace qwen3_moe::testing;
using namespace std::chrono_literals;
using namespace std::string_literals;

namespace {

// The server answers a fresh client, whatever happened before.
void check_alive(test_server& server) {
  const auto answer = server.get("/health");
  CHECK(answer.status == 200);
}

raw_response raw(test_server& server, const std::string& bytes) {
  auto client = server.connect();
  client.send(bytes);
  return client.response();
}

std::string json_error_type(const raw_response& response) { return response.error("type"); }

}  // namespace

TEST_CASE("http: limits are the documented ones") {
  const http_limits limits;
  CHECK(limits.header_bytes == 16 * 1024);
  CHECK(limits.header_fields == 100);
  CHECK(limits.body_bytes == 8 * 1024 * 1024);
  CHECK(limits.idle_timeout == 60s);
  CHECK(limits.header_timeout == 10s);
  CHECK(limits.body_timeout == 30s);
  CHECK(limits.write_stall == 30s);
  CHECK(limits.keep_alive_every == 15s);
}

TEST_CASE("http: headers too long or too many are 431") {
  test_server server;
  const auto long_one =
      raw(server, "GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + std::string(1 << 20, 'a') + "\r\n\r\n");
  CHECK(long_one.status == 431);
  CHECK(json_error_type(long_one) == "invalid_request_error");
  std::string many = "GET /health HTTP/1.1\r\nHost: localhost\r\n";
  for (int i = 0; i < 99; ++i) many += "a: b\r\n";
  CHECK(raw(server, many + "\r\n").status == 200);
  CHECK(raw(server, many + "a: b\r\n\r\n").status == 431);
  CHECK(raw(server, "GET /" + std::string(20000, 'x') + " HTTP/1.1\r\nHost: localhost\r\n\r\n").status ==
        431);
  check_alive(server);
}

TEST_CASE("http: bodies past the limit are 413, declared and chunked") {
  test_setup setup;
  setup.http.body_bytes = 10000;
  test_server server(setup);
  CHECK(server.post("/tokenize", std::string(20000, ' ')).status == 413);
  auto client = server.connect();
  client.send("POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n");
  for (int i = 0; i < 30; ++i)
    if (!client.send("400\r\n" + std::string(0x400, ' ') + "\r\n")) break;
  CHECK(client.response().status == 413);
  CHECK(server.post("/tokenize", "{\"prompt\":\"" + std::string(9000, 'a') + "\"}").status == 200);
  check_alive(server);
}

TEST_CASE("http: chunked bodies are read, malformed chunk sizes are 400") {
  test_server server;
  const std::string head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n";
  const auto good = raw(server, head + "4\r\n{\"pr\r\nb\r\nompt\":\"hi\"}\r\n0\r\n\r\n");
  CHECK(good.status == 200);
  CHECK(good.json().at("count") == 2);
  for (const std::string size : {"-2", "FFFFFFFFFFFFFFFF", "10000000000000000", "zz", "", " "}) {
    INFO(size);
    const auto status = raw(server, head + size + "\r\n{}\r\n0\r\n\r\n").status;
    CHECK((status == 400 || status == 413));
  }
  check_alive(server);
}

TEST_CASE("http: size lines and trailers of chunked bodies are bounded") {
  test_server server;
  const std::string head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n";
  for (const auto& [begin, piece] : {std::pair{"1;", "a"}, std::pair{"0\r\n", "X: y\r\n"}}) {
    INFO(begin);
    std::string block;
    while (block.size() < 50'000) block += piece;
    auto client = server.connect();
    client.send(head + begin);
    // Neither the line's end nor the trailer's ever comes; the server must not keep asking for it.
    for (int i = 0; i < 10 && client.send(block); ++i) {
    }
    CHECK(client.response().status == 400);
  }
  check_alive(server);
}

TEST_CASE("http: lengths that lie or contradict each other") {
  test_server server;
  const std::string head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\n";
  const std::string body = R"({"prompt":"hi"})";
  for (const std::string field :
       {"Content-Length: -1", "Content-Length: 1e3", "Content-Length: 99999999999999999999",
        "Content-Length: 15\r\nContent-Length: 16", "Content-Length: 15\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 15", "Transfer-Encoding: gzip",
        "Transfer-Encoding: chunked, gzip"}) {
    INFO(field);
    const auto status = raw(server, head + field + "\r\n\r\n" + body).status;
    CHECK(status >= 400);
    CHECK(status < 600);
    CHECK(status != 500);
  }
  // Too short: the rest is the next request, and malformed.
  auto client = server.connect();
  client.send(head + "Content-Length: 5\r\n\r\n" + body);
  CHECK(client.response().status == 400);
  CHECK(client.response().status == 400);
  check_alive(server);
}

TEST_CASE("http: malformed requests are 400") {
  test_server server;
  for (const auto& bytes :
       {std::string("GET /health\r\n\r\n"), std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        std::string("GET /health HTTP/3.0\r\nHost: localhost\r\n\r\n"),
        std::string("GET /health HTTP/1.1\nHost: localhost\n\n"),
        "GET /health HTTP/1.1\r\nHost: local\0host\r\n\r\n"s,
        std::string("GET /health HTTP/1.1\r\nBad Name: x\r\n\r\n"),
        "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"s,
        std::string("GET health HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        std::string("GET http://localhost/health HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        std::string("OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        std::string("CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        std::string("GET /health HTTP/1.1\r\n\r\n"),
        std::string("GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n")}) {
    INFO(bytes);
    const auto response = raw(server, bytes);
    CHECK((response.status == 400 || response.status == 505));
  }
  check_alive(server);
}

TEST_CASE("http: slow headers and bodies end in 408, silent connections are closed") {
  test_setup setup;
  setup.http.header_timeout = 200ms;
  setup.http.body_timeout = 200ms;
  setup.http.idle_timeout = 200ms;
  test_server server(setup);
  CHECK(raw(server, "GET /health HTTP/1.1\r\nHost: loc").status == 408);
  CHECK(raw(server, "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{").status ==
        408);
  CHECK(raw(server, "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n{}")
            .status == 408);
  auto silent = server.connect();
  CHECK(silent.closed());
  auto idle = server.connect();
  idle.get("/health");
  CHECK(idle.response().status == 200);
  CHECK(idle.closed());
  check_alive(server);
}

TEST_CASE("http: a client that reads nothing is cut off and its answer ends") {
  test_setup setup;
  setup.answer = std::string(64, 'x');
  setup.endless = true;
  setup.http.write_stall = 300ms;
  setup.limits.context_tokens = 1 << 20;
  setup.limits.pages = 1 << 16;
  setup.limits.page_tokens = 64;
  test_server server(setup);
  auto client = server.connect();
  client.post("/v1/chat/completions", test_server::chat_body("\"stream\":true"));
  CHECK(server.eventually([&] { return server.engine.counters().aborted > 0; }));
  CHECK(server.idle());
  check_alive(server);
}

TEST_CASE("http: a slow reader gets all of a long stream") {
  test_setup setup;
  setup.answer = std::string(1500, 'x');
  setup.http.unsent_bytes = 4096;
  test_server server(setup);
  auto client = server.connect();
  client.post("/v1/chat/completions", test_server::chat_body("\"stream\":true"));
  for (int i = 0; i < 20; ++i) std::this_thread::sleep_for(5ms);
  const auto response = client.response();
  REQUIRE(response.complete);
  std::string content;
  for (const auto& data : event_stream(response.body).data)
    if (data != "[DONE]") {
      const auto delta = boost::json::parse(data).at("choices").at(0).at("delta").as_object();
      if (const auto* text = delta.if_contains("content")) content += text->as_string().c_str();
    }
  CHECK(content == std::string(1500, 'x'));
}

TEST_CASE("http: keep-alive, pipelining, and HTTP/1.0") {
  test_server server;
  auto client = server.connect();
  for (int i = 0; i < 20; ++i) {
    client.get("/health");
    CHECK(client.response().status == 200);
  }
  std::thread sender([&] {
    std::string all;
    for (int i = 0; i < 1000; ++i) all += "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n";
    client.send(all);
  });
  int answered = 0;
  for (int i = 0; i < 1000; ++i) answered += client.response().status == 200 ? 1 : 0;
  sender.join();
  CHECK(answered == 1000);
  auto old = server.connect();
  old.send("GET /health HTTP/1.0\r\n\r\n");
  CHECK(old.response().status == 200);
  CHECK(old.closed());
  auto closing = server.connect();
  closing.get("/health", "Connection: close\r\n");
  CHECK(closing.response().status == 200);
  CHECK(closing.closed());
}

TEST_CASE("http: a stream for HTTP/1.0 ends with the connection") {
  test_server server;
  auto client = server.connect();
  const auto body = test_server::chat_body("\"stream\":true");
  client.send("POST /v1/chat/completions HTTP/1.0\r\nContent-Length: " + std::to_string(body.size()) +
              "\r\n\r\n" + body);
  const auto response = client.response();
  CHECK(response.status == 200);
  CHECK(response.fields.count("transfer-encoding") == 0);
  CHECK(event_stream(response.body).data.back() == "[DONE]");
}

TEST_CASE("http: methods, paths and HEAD") {
  test_server server;
  auto client = server.connect();
  client.send("HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\n");
  const auto head = client.response(true);
  CHECK(head.status == 200);
  CHECK(std::stoi(head.fields.at("content-length")) > 0);
  client.get("/health");
  CHECK(client.response().status == 200);
  const auto wrong = server.get("/v1/chat/completions");
  CHECK(wrong.status == 405);
  CHECK(wrong.fields.at("allow") == "POST");
  CHECK(json_error_type(wrong) == "invalid_request_error");
  CHECK(server.post("/health", "{}").status == 405);
  CHECK(server.post("/health", "{}").fields.at("allow") == "GET, HEAD");
  for (const std::string method : {"OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "BREW"}) {
    const auto response = raw(server, method + " /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n");
    INFO(method);
    CHECK(response.status == 405);
    CHECK(response.fields.count("access-control-allow-origin") == 0);
  }
  for (const std::string path : {"/", "/v1", "/v2/models", "/v1/chat/completions/", "/%2e%2e/etc/passwd",
                                 "/../etc/passwd", "//", "/v1/models/../../x", "/\xFF"}) {
    INFO(path);
    const auto response = server.get(path);
    CHECK(response.status == 404);
    CHECK_FALSE(response.error("message").empty());
  }
  CHECK(server.get("/health?x=1&y").status == 200);
}

TEST_CASE("http: Host and Origin are checked") {
  test_server server;
  const auto with = [&](const std::string& host) {
    return raw(server, "GET /health HTTP/1.1\r\nHost: " + host + "\r\n\r\n").status;
  };
  for (const std::string host : {"localhost", "LOCALHOST:8080", "127.0.0.1", "127.0.0.1:1", "[::1]",
                                 "[::1]:8080", "192.168.1.5:99", "allowed.example"}) {
    INFO(host);
    CHECK(with(host) == 200);
  }
  for (const std::string host :
       {"evil.example", "localhost.evil.example", "evil.example:8080", "127.0.0.1.evil.example",
        "a@localhost", "localhost:x", "[::1", "[::1]x", ""}) {
    INFO(host);
    CHECK(with(host) == 403);
  }
  CHECK(server.get("/health", "Origin: http://localhost:3000\r\n").status == 200);
  CHECK(server.get("/health", "Origin: https://evil.example\r\n").status == 403);
  CHECK(server.get("/health", "Origin: null\r\n").status == 403);
  for (const std::string origin : {"http://203.0.113.5", "http://192.168.1.5:99", "http://[2001:db8::1]"})
    CHECK(server.get("/health", "Origin: " + origin + "\r\n").status == 403);
  for (const std::string origin : {"http://127.0.0.1:3000", "http://[::1]", "https://allowed.example"})
    CHECK(server.get("/health", "Origin: " + origin + "\r\n").status == 200);
  CHECK(raw(server, "GET /health HTTP/1.1\r\nHost: 192.168.1.5:99\r\nOrigin: http://192.168.1.5:99\r\n\r\n")
            .status == 200);
  CHECK(server.get("/v1/models", "Origin: http://localhost:3000\r\n")
            .fields.count("access-control-allow-origin") == 0);
}

TEST_CASE("http: expectations and encodings") {
  test_server server;
  auto client = server.connect();
  client.send(
      "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 15\r\nExpect: 100-continue\r\n\r\n");
  CHECK(client.wait_for("100 Continue"));
  client.send(R"({"prompt":"hi"})");
  CHECK(client.response().status == 200);
  CHECK(server.post("/tokenize", "{}", "Expect: magic\r\n").status == 417);
  CHECK(server.post("/tokenize", "\x1f\x8b\x08", "Content-Encoding: gzip\r\n").status == 415);
  auto big = server.connect();
  big.send(
      "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\nExpect: "
      "100-continue\r\n\r\n");
  CHECK(big.response().status == 413);
}

TEST_CASE("http: one connection too many is told so") {
  test_setup setup;
  setup.http.connections = 5;
  test_server server(setup);
  std::vector<std::unique_ptr<raw_client>> clients;
  for (int i = 0; i < 5; ++i) {
    clients.push_back(std::make_unique<raw_client>(server.server.port()));
    clients.back()->get("/health");
    CHECK(clients.back()->response().status == 200);
  }
  auto refused = server.connect();
  CHECK(refused.response().status == 503);
  clients.clear();
  CHECK(server.eventually([&] { return server.server.connections() == 0; }));
  check_alive(server);
}

TEST_CASE("http: a half-closed client still gets an answer that needs no generation") {
  test_server server;
  auto client = server.connect();
  client.get("/v1/models");
  client.half_close();
  const auto response = client.response();
  CHECK((response.status == 200 || response.status == 0));
  check_alive(server);
}

TEST_CASE("http: a port in use is one sentence") {
  test_server server;
  try {
    http_server second(
        {.host = "127.0.0.1", .port = server.server.port(), .allowed_hosts = {}, .limits = {}}, [](auto) {},
        api_service::error_body);
    FAIL("the port was given out twice");
  } catch (const nibble::error& problem) {
    CHECK(std::string(problem.what()).find("another program uses it") != std::string::npos);
  }
  CHECK_THROWS_AS(http_server(
                      {.host = "no.such.host.invalid", .port = 0, .allowed_hosts = {}, .limits = {}},
                      [](auto) {}, api_service::error_body),
                  nibble::error);
}

TEST_CASE("http: clients that reset in mid-stream do not end a process with the default SIGPIPE") {
  std::signal(SIGPIPE, SIG_DFL);
  test_setup setup;
  setup.answer = std::string(64, 'x');
  setup.endless = true;
  test_server server(setup);
  std::vector<std::thread> threads;
  for (int t = 0; t < 10; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 10; ++i) {
        auto client = server.connect();
        client.post("/v1/chat/completions", test_server::chat_body("\"stream\":true"));
        client.wait_for("data: ");
        client.reset();
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(server.idle());
  check_alive(server);
}

TEST_CASE("host names are taken out of Host and Origin values") {
  CHECK(host_of("localhost") == "localhost");
  CHECK(host_of("Name:80") == "name");
  CHECK(host_of("http://a.b:1") == "a.b");
  CHECK(host_of("[::1]:5") == "[::1]");
  for (const auto* bad : {"", "a b", "a@b", "a:b", "http://", "a/b", "[::1", "[x]y"})
    CHECK(host_of(bad).empty());
}
