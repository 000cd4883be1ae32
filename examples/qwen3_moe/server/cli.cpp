// SPDX-License-Identifier: Apache-2.0
// The command line. The only file that sees CLI11 and the registry of compiled models.
#include <CLI/CLI.hpp>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <istream>
#include <new>
#include <system_error>
#include <utility>

#include "app.hpp"
#include "model/memory_plan.hpp"
#include "model/registry.hpp"
#include "nibble/core/error.hpp"
#include "nibble/plan/byte_size.hpp"
#include "one_line.hpp"

namespace qwen3_moe {
namespace {

constexpr const char* exit_codes =
    "Exit codes: 0 all well, 1 verify found differences past the tolerance, 2 bad options, files or "
    "addresses,\n"
    "3 something failed while it ran.";

// Every way out on a fault writes one line, whatever the file or option that it quotes holds.
void report(std::string_view problem) { std::fprintf(stderr, "qwen3-moe: %s\n", one_line(problem).c_str()); }

struct model_options {
  std::string folder;
  std::string device = "auto";
  load_options load;
};

std::string name_of(const std::filesystem::path& folder) {
  const auto path = std::filesystem::weakly_canonical(folder);
  return path.filename().empty() ? path.parent_path().filename().string() : path.filename().string();
}

device_choice choice_of(const std::string& device) {
  return device == "cuda"   ? device_choice::cuda
         : device == "host" ? device_choice::host
                            : device_choice::automatic;
}

load_options load_options_of(const model_options& options) {
  load_options load = options.load;
  load.device = choice_of(options.device);
  return load;
}

std::string megabytes(std::uint64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f MB", static_cast<double>(bytes) / 1e6);
  return text;
}

std::unique_ptr<app_model> load(const model_options& options) {
  auto text = text_model::load(options.folder);
  std::shared_ptr<loaded_model> loaded = load_model(options.folder, load_options_of(options));
  auto& runner = loaded->runner();
  const auto rows = static_cast<std::size_t>(runner.limits().vocab_size);
  if (static_cast<std::size_t>(text.tokens().vocab_size()) > rows)
    throw nibble::format_error((std::filesystem::path(options.folder) / "tokenizer.json").string() +
                               ": has the token id " + std::to_string(text.tokens().vocab_size() - 1) +
                               ", but the model's vocabulary ends at " + std::to_string(rows - 1) +
                               "; take the tokenizer of this checkpoint");
  auto model = std::make_unique<app_model>(loaded, runner, std::move(text));
  const auto& defaults = loaded->generation;
  model->sampling = {.temperature = defaults.do_sample ? defaults.temperature : 0,
                     .top_k = defaults.top_k,
                     .top_p = defaults.top_p,
                     .min_p = defaults.min_p,
                     .repetition_penalty = defaults.repetition_penalty};
  model->stop_tokens = defaults.eos_token_ids;
  model->name = name_of(options.folder);
  const auto& limits = runner.limits();
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.2f", loaded->load_seconds);
  model->notes = {
      "model: " + model->name + " as " + loaded->compiled_name + ", " + describe(loaded->config),
      "weights: " + megabytes(loaded->weight_bytes()) + " (" + describe(loaded->config.formats) +
          "), loaded in " + seconds + " s",
      "device: " + loaded->device,
      "context: " + nibble::counted(static_cast<std::uint64_t>(limits.context_tokens), "token") +
          " of at most " + std::to_string(loaded->max_positions) + "; " +
          nibble::counted(static_cast<std::uint64_t>(limits.slots), "answer") + " at once; KV cache " +
          std::to_string(static_cast<std::int64_t>(limits.pages) * limits.page_tokens) + " tokens"};
  // The GPU's start: kernels, where experts came from, the ledger (several lines).
  for (std::string note : loaded->notes) {
    while (!note.empty() && note.back() == '\n') note.pop_back();
    model->notes.push_back(std::move(note));
  }
  for (const auto& warning : loaded->warnings) model->notes.push_back(one_line("warning: " + warning));
  return model;
}

// A range that does not clutter --help; the error names it.
template <class Number>
CLI::Validator between(Number low, Number high) {
  const auto within = CLI::Range(low, high);
  return CLI::Validator(
      [within](std::string& text) {
        // A range check alone lets NaN pass.
        if (std::isnan(std::strtod(text.c_str(), nullptr))) return "Value " + text + " is not a number";
        return within(text);
      },
      "");
}

// "12GiB", "900 MB", a plain number of bytes.
CLI::Option* add_size_option(CLI::App& command, const std::string& name, std::uint64_t& bytes,
                             const std::string& help) {
  return command
      .add_option_function<std::string>(
          name,
          [&bytes, name](const std::string& text) {
            const auto parsed = nibble::parse_bytes(text);
            if (!parsed || *parsed == 0)
              throw CLI::ValidationError(name, text + " is no size; write 12GiB, 900MiB or bytes");
            bytes = *parsed;
          },
          help)
      ->type_name("SIZE");
}

// How a GPU's memory is split; what is not given follows from the memory there is.
void add_memory_options(CLI::App& command, load_options& options) {
  command
      .add_option("--context", options.context_tokens,
                  "Longest prompt and answer together, in tokens; 0 means what the model was made for: on "
                  "the CPU at most 32768, on a GPU what its memory holds")
      ->check(between(0, 1 << 24))
      ->capture_default_str();
  command.add_option("--expert-slots", options.cuda.expert_slots, "Experts that are resident on the GPU")
      ->check(between(1, 1 << 24));
  add_size_option(command, "--kv-bytes", options.cuda.kv_bytes, "Memory for keys and values on the GPU");
  command.add_flag("--kv-fp8", options.cuda.kv_fp8, "Keys and values in 8 bits on the GPU");
}
void add_max_running_option(CLI::App& command, load_options& options) {
  command
      .add_option_function<int>(
          "--max-running",
          [&options](int rows) {
            options.max_running = rows;
            options.fewer_may_run = false;
          },
          "Answers generated at once; on a GPU fewer, if not given and memory is short")
      ->check(between(1, 1024))
      ->default_str(std::to_string(options.max_running));
}

// "N" reads better than the C++ types that CLI11 shows.
void name_types(CLI::App& app) {
  for (auto* command : app.get_subcommands({}))
    for (auto* option : command->get_options()) {
      const auto type = option->get_type_name();
      if (type == "INT" || type == "UINT" || type == "FLOAT") option->type_name("N");
    }
}

// Experts that do not fit on the GPU.
void add_expert_options(CLI::App& command, expert_keeping& experts) {
  command
      .add_option_function<std::string>(
          "--expert-cache",
          [&experts](const std::string& path) {
            std::error_code unknown;
            if (std::filesystem::is_directory(path, unknown))
              throw CLI::ValidationError("--expert-cache", path + " is a folder; name a file");
            experts.cache_file = path;
          },
          "Where not all experts fit on the GPU: keep them packed in this file, so that the next start need "
          "not pack them; default: nibble-experts.bin in the model's folder")
      ->type_name("[FILE]")
      ->expected(0, 1);
  command.add_flag_callback(
      "--no-expert-history", [&experts] { experts.remember = false; },
      "Neither save which experts were in use at the end nor load those first");
  command
      .add_option_function<std::string>(
          "--expert-cpu",
          [&experts](const std::string& wish) {
            experts.cpu = wish == "off" ? cpu_share::off : cpu_share::measured;
          },
          "Experts that are missing on the GPU: auto lets the CPU compute some where steps are predicted to "
          "gain by it; off fetches all, and answers do not depend on which were missing")
      ->type_name("WHEN")
      ->check(CLI::IsMember({"auto", "off"}).description(""))
      ->default_str("auto");
  command
      .add_option_function<std::string>(
          "--expert-ahead",
          [&experts](const std::string& count) {
            if (count != "auto") experts.ahead = count[0] - '0';
          },
          "Experts that a step of few tokens fetches for the next layer while one computes, by what its "
          "router would choose now: 0 to 4; unless it is 0, prompts fetch all of those. auto is 1, or 0 "
          "where a kernel fetches and the architecture is below 90")
      ->type_name("N")
      ->check(CLI::IsMember({"auto", "0", "1", "2", "3", "4"}).description(""))
      ->default_str("auto");
  command
      .add_option_function<std::string>(
          "--expert-fetch", [&experts](const std::string& how) { experts.fetch = *expert_fetch_of(how); },
          "What brings missing experts: the copy engine of the GPU, or a kernel that reads host memory; auto "
          "takes the engine unless it takes over 5 % longer at the start")
      ->type_name("HOW")
      ->check(CLI::IsMember({"auto", "kernel", "engine"}).description(""))
      ->default_str("auto");
  add_size_option(command, "--lock-limit", experts.lock_limit_bytes,
                  "Host memory that may be page-locked for experts; those beyond come slower");
}

void add_model_options(CLI::App& command, model_options& options) {
  command
      .add_option("--model", options.folder,
                  "Folder of a checkpoint: config.json, safetensors, tokenizer.json")
      ->required()
      ->type_name("DIR");
  command
      .add_option("--device", options.device,
                  "Where to run: auto, cuda or host; auto says what it chose and why")
      ->type_name("DEVICE")
      ->check(CLI::IsMember({"auto", "cuda", "host"}).description(""))
      ->capture_default_str();
  command
      .add_option("--threads", options.load.threads, "Threads of the host backend; 0 means one for each core")
      ->check(between(0, 1024))
      ->capture_default_str();
  add_memory_options(command, options.load);
  add_size_option(command, "--vram-limit", options.load.cuda.vram_limit_bytes,
                  "GPU memory that this program may use in all; default: what is free");
  add_expert_options(command, options.load.experts);
}

void add_sampling_options(CLI::App& command, talk_options& options) {
  command
      .add_option("--temperature", options.temperature,
                  "0 takes the likeliest token; default: the checkpoint's")
      ->check(between(0.0, 2.0));
  command.add_option("--top-p", options.top_p, "Keep the likeliest tokens up to this share")
      ->check(between(0.0, 1.0));
  command.add_option("--top-k", options.top_k, "Keep this many of the likeliest tokens; 0 keeps all")
      ->check(between(0, 1 << 30));
  command.add_option("--min-p", options.min_p, "Drop tokens less likely than this share of the likeliest")
      ->check(between(0.0, 1.0));
  command.add_option("--seed", options.seed, "Same seed, same answer");
  command.add_option("--max-tokens", options.max_tokens, "Longest answer")->check(between(1, 1 << 30));
}

std::vector<std::string> read_keys(const std::string& path) {
  std::vector<std::string> keys;
  const auto add = [&](std::string key) {
    const auto first = key.find_first_not_of(" \t\r");
    if (first == std::string::npos) return;
    keys.push_back(key.substr(first, key.find_last_not_of(" \t\r") + 1 - first));
  };
  if (!path.empty()) {
    std::ifstream file(path);
    if (!file) throw nibble::format_error("--api-key-file " + path + ": cannot be read");
    for (std::string line; std::getline(file, line);) add(line);
    if (keys.empty())
      throw nibble::format_error("--api-key-file " + path + ": holds no key; one line is one key");
  }
  if (const char* key = std::getenv("NIBBLE_API_KEY")) add(key);
  return keys;
}

std::string read_prompt(std::istream& in) {
  std::string text;
  char block[1 << 14];
  while (in.read(block, sizeof block) || in.gcount() > 0) {
    text.append(block, static_cast<std::size_t>(in.gcount()));
    if (text.size() > input_limit_bytes)
      throw nibble::format_error("the prompt on standard input has more than " +
                                 std::to_string(input_limit_bytes) + " bytes");
  }
  return text;
}

// A command whose output got lost did not end well.
int written(int code) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  report("standard output cannot be written to");
  return code == exit_ok ? exit_runtime : code;
}

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host == "[::1]" || host.rfind("127.", 0) == 0;
}

int info(const std::string& folder) {
  if (!folder.empty()) {
    const auto summary = summarize(folder);
    std::printf("%s\n", folder.c_str());
    std::printf("  model type   %s\n", summary.parsed.model_type.c_str());
    std::printf("  shape        %s\n", describe(summary.parsed.config).c_str());
    std::printf("  formats      %s\n", describe(summary.parsed.config.formats).c_str());
    std::printf("  context      %d tokens\n", summary.parsed.max_positions);
    std::printf("  tensors      %llu\n", static_cast<unsigned long long>(summary.tensors));
    std::printf("  runs as      %s\n",
                summary.model ? std::string(summary.model->name).c_str()
                              : "no compiled model fits; build with -DNIBBLE_MODELS=PATH/config.json");
    for (const auto& warning : summary.warnings)
      std::printf("  warning      %s\n", one_line(warning).c_str());
  }
  std::printf("Models compiled into this program:\n");
  for (const auto& model : compiled_models())
    std::printf("  %-16s %s; %s; %s, %zu geometries\n", std::string(model.name).c_str(),
                describe(*model.config).c_str(), describe(model.config->formats).c_str(),
                megabytes(model.weight_bytes).c_str(), model.geometries.size());
  return exit_ok;
}

int run_verify(const model_options& options, const std::string& reference, double tolerance) {
  const auto model = load_model(options.folder, load_options_of(options));
  const auto result = verify(*model, reference);
  std::printf("device: %s\n", model->device.c_str());
  std::printf("prompts               %d\n", result.prompts);
  std::printf("positions             %lld\n", static_cast<long long>(result.positions));
  std::printf("largest difference    %.3g\n", result.largest_difference);
  std::printf("mean KL divergence    %.3g nats\n", result.mean_kl_divergence);
  std::printf("top-1 agreement       %.4f\n", result.top1_agreement);
  const bool fine = result.largest_difference <= tolerance;
  std::printf("%s: the tolerance is %.3g\n", fine ? "within tolerance" : "PAST TOLERANCE", tolerance);
  return fine ? exit_ok : exit_differs;
}

struct plan_options {
  std::string model;
  std::uint64_t vram_bytes = 0;
  bool json = false;
  load_options load;
};

int plan(const plan_options& options) {
  try {
    const auto paper = plan_on_paper(options.model, options.vram_bytes, options.load);
    const auto text = options.json ? paper.json() + "\n" : paper.text();
    std::printf("%s", text.c_str());
    return exit_ok;
  } catch (const nibble::plan_refused& refused) {
    if (options.json)
      std::printf("%s\n", refusal_json(options.model, options.vram_bytes, refused).c_str());
    else
      std::fprintf(stderr, "qwen3-moe: %s\n", refused.what());  // a table: the one fault of several lines
    return exit_usage;
  } catch (const nibble::wish_refused& refused) {
    if (!options.json) throw;  // like any other use that is wrong
    std::printf("%s\n", refusal_json(options.model, options.vram_bytes, refused).c_str());
    return exit_usage;
  }
}

}  // namespace

int run_command_line(int argc, const char* const* argv) try {
  CLI::App app("Serves NVFP4 Qwen3.5/3.6-MoE and Qwen3-MoE checkpoints over OpenAI's API.", "qwen3-moe");
  app.require_subcommand(1);
  app.footer(exit_codes);
  app.set_version_flag("--version", "qwen3-moe " NIBBLE_VERSION);

  model_options model;
  model.load.experts.remember = true;
  model.load.experts.cpu = cpu_share::measured;
  talk_options talk;
  serve_options server;
  std::string key_file, prompt, reference, info_folder;
  double tolerance = 5e-4;
  bool no_thinking = false;

  auto* serve_command = app.add_subcommand("serve", "Serve a model over HTTP until Ctrl-C");
  add_model_options(*serve_command, model);
  serve_command->add_option("--host", server.http.host, "Address to listen on")->capture_default_str();
  serve_command->add_option("--port", server.http.port, "Port to listen on; 0 takes any free one")
      ->check(between(0, 65535))
      ->capture_default_str();
  add_max_running_option(*serve_command, model.load);
  serve_command
      ->add_option("--max-queued", server.max_queued,
                   "Requests that may wait; one more is told to try again (429)")
      ->check(between(1, 1 << 20))
      ->capture_default_str();
  serve_command->add_option("--served-model-name", server.names,
                            "What the model answers to; several are possible; default: the folder's name");
  serve_command->add_option(
      "--api-key-file", key_file,
      "One key a line; clients then need one. NIBBLE_API_KEY in the environment adds another");
  serve_command->add_option("--allow-host", server.http.allowed_hosts,
                            "A further name that clients may reach this server by");
  serve_command
      ->add_option("--drain-seconds", server.drain_seconds,
                   "How long running answers may go on after Ctrl-C, SIGTERM or SIGHUP")
      ->check(between(0, 86400))
      ->capture_default_str();
  serve_command->footer(exit_codes);

  auto* chat_command =
      app.add_subcommand("chat", "Talk to a model in the terminal; with piped input each line is a message");
  add_model_options(*chat_command, model);
  chat_command->add_option("--system", talk.system, "System message");
  chat_command->add_flag("--no-thinking", no_thinking, "Answer without reasoning first");
  add_sampling_options(*chat_command, talk);
  chat_command->footer(exit_codes);

  auto* complete_command = app.add_subcommand("complete", "Continue a text");
  add_model_options(*complete_command, model);
  complete_command->add_option("--prompt", prompt, "The text; - reads it from stdin")
      ->required()
      ->type_name("TEXT");
  add_sampling_options(*complete_command, talk);
  complete_command->footer(exit_codes);

  auto* info_command =
      app.add_subcommand("info", "Say what a checkpoint is, and which models are compiled in");
  info_command->add_option("--model", info_folder, "Folder of a checkpoint")->type_name("DIR");
  info_command->footer(exit_codes);

  plan_options paper;
  auto* plan_command = app.add_subcommand(
      "plan", "Say how a GPU's memory would be split for a model; needs neither a GPU nor weights");
  plan_command
      ->add_option("MODEL", paper.model, "Folder of a checkpoint, a config.json, or a compiled model's name")
      ->required();
  add_size_option(*plan_command, "--vram", paper.vram_bytes, "Memory of the GPU, all of it free")->required();
  add_memory_options(*plan_command, paper.load);
  add_max_running_option(*plan_command, paper.load);
  plan_command->add_flag("--json", paper.json, "One JSON object instead of a table");
  plan_command->footer(exit_codes);

  auto* verify_command = app.add_subcommand(
      "verify", "Hold a model's logits against a file of reference logits; needs no tokenizer");
  add_model_options(*verify_command, model);
  verify_command->add_option("--reference", reference, "Holds N.input_ids and N.logits for N from 0")
      ->required()
      ->type_name("FILE");
  verify_command->add_option("--tolerance", tolerance, "Largest absolute difference that passes")
      ->check(between(0.0, 1e30))
      ->capture_default_str();
  verify_command->footer(exit_codes);

  name_types(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& request) {
    return app.exit(request);
  } catch (const CLI::CallForAllHelp& request) {
    return app.exit(request);
  } catch (const CLI::CallForVersion& request) {
    return app.exit(request);
  } catch (const CLI::ParseError& problem) {
    report(std::string(problem.what()) + "; see qwen3-moe --help");
    return exit_usage;
  }

  const auto loader = [&model] { return load(model); };
  talk.thinking = !no_thinking;
  if (serve_command->parsed()) {
    for (auto& name : server.http.allowed_hosts)
      for (auto& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    if (server.http.host.empty())
      throw nibble::format_error("--host is empty; 0.0.0.0 is every address of IPv4");
    server.api_keys = read_keys(key_file);
    if (!is_loopback(server.http.host) && server.api_keys.empty())
      server.warnings.push_back(
          server.http.host +
          " can be reached from other machines and no API key is set; use --api-key-file or NIBBLE_API_KEY");
    return serve(server, loader);
  }
  if (chat_command->parsed()) return written(chat(talk, loader));
  if (complete_command->parsed()) {
    if (prompt == "-") prompt = read_prompt(std::cin);
    return written(complete(prompt, talk, loader));
  }
  if (info_command->parsed()) return written(info(info_folder));
  if (plan_command->parsed()) return written(plan(paper));
  return written(run_verify(model, reference, tolerance));
} catch (const std::exception& problem) {
  const told_failure failure = failure_of(problem);
  report(failure.text);
  return failure.code;
}

}  // namespace qwen3_moe
