// SPDX-License-Identifier: Apache-2.0
#include "api_service.hpp"

#include <algorithm>
#include <boost/json/serialize.hpp>
#include <exception>
#include <utility>

#include "api_error.hpp"
#include "json.hpp"
#include "metrics_text.hpp"
#include "text/unicode.hpp"

namespace qwen3_moe {

// The table is the only place that says which paths exist, what they allow and whether they need a key.
struct api_service::route {
  std::string_view method;
  std::string_view path;  // a trailing '*' stands for the rest
  bool needs_key;
  void (api_service::*serve)(const std::shared_ptr<http_exchange>&);

  bool fits(std::string_view wanted) const {
    if (path.back() != '*') return wanted == path;
    const auto prefix = path.substr(0, path.size() - 1);
    return wanted.size() > prefix.size() && wanted.substr(0, prefix.size()) == prefix;
  }
};

const std::vector<api_service::route>& api_service::routes() {
  static const std::vector<route> table{
      {"GET", "/health", false, &api_service::health},
      {"GET", "/health/live", false, &api_service::live},
      {"GET", "/metrics", true, &api_service::metrics},
      {"GET", "/v1/models", true, &api_service::models},
      {"GET", "/v1/models/*", true, &api_service::one_model},
      {"POST", "/v1/chat/completions", true, &api_service::chat},
      {"POST", "/v1/completions", true, &api_service::completions},
      {"POST", "/tokenize", true, &api_service::tokenize},
      {"POST", "/detokenize", true, &api_service::detokenize},
  };
  return table;
}

namespace {

http_response json_response(const json::value& body, int status = 200) {
  http_response response;
  response.status = status;
  response.body = json::serialize(body);
  return response;
}

http_response error_response(const api_error& problem) {
  http_response response;
  response.status = problem.status;
  response.body = problem.body();
  if (problem.status == 429) response.fields.emplace_back("Retry-After", "1");
  if (problem.status == 503) response.fields.emplace_back("Retry-After", "5");
  if (problem.status == 401) response.fields.emplace_back("WWW-Authenticate", "Bearer");
  return response;
}

// %41 → A. A malformed escape stays as it is: it names no model.
std::string percent_decoded(std::string_view text) {
  const auto digit = [](char c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
  };
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size() && digit(text[i + 1]) >= 0 && digit(text[i + 2]) >= 0) {
      result += static_cast<char>(digit(text[i + 1]) * 16 + digit(text[i + 2]));
      i += 2;
    } else {
      result += text[i];
    }
  }
  return result;
}

json::object model_entry(const served_model& model, const std::string& name) {
  return {{"id", name},
          {"object", "model"},
          {"created", model.created},
          {"owned_by", "nibble"},
          {"max_model_len", model.engine->context_tokens()}};
}

}  // namespace

api_service::api_service(task_pool& pool, service_options options)
    : pool_(pool), options_(std::move(options)) {}

void api_service::set_ready(std::shared_ptr<const served_model> model) {
  const std::lock_guard lock(mutex_);
  model_ = std::move(model);
  if (state_ == state::loading) state_ = state::ready;
}

void api_service::set_stopping() {
  const std::lock_guard lock(mutex_);
  state_ = state::stopping;
}

void api_service::stop() {
  const std::lock_guard lock(mutex_);
  state_ = state::stopping;
  model_.reset();
}

std::string api_service::error_body(int status, std::string_view message) {
  return error_of_status(status, message).body();
}

void api_service::handle(std::shared_ptr<http_exchange> exchange) {
  pool_.post([this, exchange = std::move(exchange)] { answer(exchange); });
}

void api_service::answer(const std::shared_ptr<http_exchange>& exchange) {
  if (exchange->disconnected()) return;
  try {
    dispatch(exchange);
  } catch (const api_error& problem) {
    exchange->send(error_response(problem));
  } catch (const std::exception& problem) {
    options_.log(exchange->request().method + " " + exchange->request().path + ": " + problem.what());
    exchange->send(
        error_response(error_of_status(500, "the server failed on this request; its log says more")));
  }
}

void api_service::dispatch(const std::shared_ptr<http_exchange>& exchange) {
  const auto& request = exchange->request();
  std::string allowed;
  const bool head = request.method == "HEAD";
  for (const auto& item : routes()) {
    if (!item.fits(request.path)) continue;
    if (item.method == (head ? "GET" : request.method)) {
      if (item.needs_key) check_key(request);
      return (this->*item.serve)(exchange);
    }
    allowed +=
        (allowed.empty() ? "" : ", ") + std::string(item.method) + (item.method == "GET" ? ", HEAD" : "");
  }
  if (allowed.empty()) {
    check_key(request);
    throw api_error(404, "there is no " + to_valid_utf8(request.path.substr(0, 200)) + " here",
                    "invalid_request_error", std::nullopt, "not_found");
  }
  auto response = error_response(api_error(405, "this path only takes " + allowed, "invalid_request_error",
                                           std::nullopt, "method_not_allowed"));
  response.fields.emplace_back("Allow", allowed);
  exchange->send(std::move(response));
}

void api_service::check_key(const http_request& request) const {
  if (options_.api_keys.empty()) return;
  auto given = request.field("authorization");
  constexpr std::string_view scheme = "bearer ";
  const bool bearer =
      given.size() > scheme.size() &&
      std::equal(scheme.begin(), scheme.end(), given.begin(), [](char a, char b) { return a == (b | 0x20); });
  given = bearer ? given.substr(scheme.size()) : request.field("x-api-key");
  if (!key_matches(given, options_.api_keys))
    throw error_of_status(401, "this server wants an API key: send it as Authorization: Bearer KEY");
}

std::shared_ptr<const served_model> api_service::model() const {
  const std::lock_guard lock(mutex_);
  if (state_ == state::loading) throw error_of_status(503, "the model is still loading");
  if (state_ == state::stopping) throw error_of_status(503, "the server is shutting down");
  return model_;
}

void api_service::health(const std::shared_ptr<http_exchange>& exchange) {
  std::shared_ptr<const served_model> ready;
  state now;
  {
    const std::lock_guard lock(mutex_);
    now = state_;
    ready = model_;
  }
  if (now != state::ready) {
    auto response =
        json_response(json::object{{"status", now == state::loading ? "loading" : "stopping"}}, 503);
    response.fields.emplace_back("Retry-After", "1");
    return exchange->send(std::move(response));
  }
  if (const auto why = ready->engine->failure(); !why.empty())
    return exchange->send(
        json_response(json::object{{"status", "failed"}, {"model", ready->name()}, {"message", why}}, 503));
  const bool stalled = ready->engine->step_age() > options_.stalled_after;
  const auto& counters = ready->engine->counters();
  exchange->send(json_response(json::object{{"status", stalled ? "stalled" : "ok"},
                                            {"model", ready->name()},
                                            {"running", counters.running.load()},
                                            {"queued", counters.queued.load()}},
                               stalled ? 503 : 200));
}

void api_service::live(const std::shared_ptr<http_exchange>& exchange) {
  exchange->send(json_response(json::object{{"status", "ok"}}));
}

void api_service::models(const std::shared_ptr<http_exchange>& exchange) {
  const auto ready = model();
  json::array list;
  for (const auto& name : ready->names) list.push_back(model_entry(*ready, name));
  exchange->send(json_response(json::object{{"object", "list"}, {"data", std::move(list)}}));
}

void api_service::one_model(const std::shared_ptr<http_exchange>& exchange) {
  const auto ready = model();
  constexpr std::string_view prefix = "/v1/models/";
  const auto wanted = percent_decoded(std::string_view(exchange->request().path).substr(prefix.size()));
  if (!ready->answers_to(wanted))
    throw api_error(404, "this server has no model of that name; it serves " + ready->name(),
                    "invalid_request_error", "model", "model_not_found");
  exchange->send(json_response(model_entry(*ready, wanted)));
}

void api_service::metrics(const std::shared_ptr<http_exchange>& exchange) {
  http_response response;
  response.content_type = "text/plain; version=0.0.4; charset=utf-8";
  response.body = metrics_text(model()->engine->counters());
  exchange->send(std::move(response));
}

bool key_matches(std::string_view given, const std::vector<std::string>& keys) {
  bool found = false;
  for (const auto& key : keys) {
    unsigned difference = given.size() == key.size() ? 0 : 1;
    for (std::size_t i = 0; i < key.size(); ++i) {
      const char theirs = given.empty() ? '\0' : given[i % given.size()];
      difference |=
          static_cast<unsigned>(static_cast<unsigned char>(theirs) ^ static_cast<unsigned char>(key[i]));
    }
    found |= difference == 0 && !key.empty();
  }
  return found;
}

}  // namespace qwen3_moe
