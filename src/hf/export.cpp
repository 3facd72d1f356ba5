// Writing a model as a Hugging Face directory.
#include "hf/export.h"

#include <unistd.h>

#include <fmt/format.h>

#include "core/error.h"
#include "core/file.h"
#include "hf/hf_config.h"
#include "hf/json_fields.h"
#include "hf/model_card.h"
#include "hf/remote_code.h"
#include "hf/safetensors.h"

namespace bifocal {

namespace {

namespace fs = std::filesystem;

constexpr const char* kGenerationConfig = "generation_config.json";

// What the teacher's tokenizer and chat template may consist of.
constexpr const char* kPassedOn[] = {"tokenizer.json",
                                     "tokenizer_config.json",
                                     "special_tokens_map.json",
                                     "added_tokens.json",
                                     "tokenizer.model",
                                     "vocab.json",
                                     "merges.txt",
                                     "chat_template.jinja",
                                     "chat_template.json",
                                     kGenerationConfig};

// Removed with everything in it unless it was published.
class StagingDirectory {
 public:
  explicit StagingDirectory(const fs::path& output)
      : path_(output.string() + fmt::format(".{}.tmp", ::getpid())) {
    fs::remove_all(path_);  // left by a killed process that had this id
    fs::create_directories(path_);
  }

  ~StagingDirectory() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }

  StagingDirectory(const StagingDirectory&) = delete;
  StagingDirectory& operator=(const StagingDirectory&) = delete;
  StagingDirectory(StagingDirectory&&) = delete;
  StagingDirectory& operator=(StagingDirectory&&) = delete;

  const fs::path& path() const { return path_; }

  // rename() replaces an empty directory and refuses any other.
  void publish(const fs::path& output) const {
    std::error_code error;
    fs::rename(path_, output, error);
    BIFOCAL_REQUIRE(!error,
                    "[export] cannot rename {} to {}: {}",
                    path_.string(),
                    output.string(),
                    error.message());
    fsync_directory(output.parent_path());
  }

 private:
  fs::path path_;
};

void write_weights(const ExportOptions& options,
                   const TensorProvider& provide,
                   const fs::path& directory) {
  const ParameterTable table(options.model);
  std::vector<SafetensorsWriter::Declaration> declarations;
  for (const Parameter& parameter : table.parameters()) {
    declarations.push_back({parameter.name, options.dtype, parameter.shape});
  }
  SafetensorsWriter writer(directory, declarations, options.shard_bytes);
  for (const Parameter& parameter : table.parameters()) {
    writer.write(parameter.name, provide(parameter));
  }
  writer.finish();
}

void pass_on_files(const fs::path& source, const fs::path& directory) {
  for (const char* name : kPassedOn) {
    if (fs::is_regular_file(source / name)) {
      write_file_atomically(directory / name, read_file(source / name));
    }
  }
}

// AutoTokenizer picks its class by tokenizer_config.json, else by model type, and knows none for
// ours.
void name_tokenizer_class(const fs::path& directory) {
  const fs::path file = directory / "tokenizer_config.json";
  if (!fs::exists(directory / "tokenizer.json")) {
    return;
  }
  OrderedJson json = OrderedJson::object();
  if (fs::exists(file)) {
    json = parse_json_object(read_file(file), "the teacher's tokenizer_config.json");
  }
  if (!json.contains("tokenizer_class") || json["tokenizer_class"].is_null()) {
    json["tokenizer_class"] = "PreTrainedTokenizerFast";
    write_file_atomically(file, json.dump(2) + "\n");
  }
}

// The special tokens of config.json, for a teacher without a generation_config.json.
std::string generation_config(const ModelConfig& model) {
  OrderedJson json{{"_from_model_config", true}};
  if (!model.source_json.empty()) {
    const OrderedJson source = parse_json_object(model.source_json, "the base model's config");
    for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) {
      const auto found = source.find(key);
      if (found != source.end() && !found->is_null()) {
        json[key] = *found;
      }
    }
  }
  return json.dump(2) + "\n";
}

// An absolute path without a slash at its end, whose last name may not exist yet.
fs::path checked_output(const fs::path& given) {
  fs::path output = fs::absolute(given).lexically_normal();
  if (!output.has_filename()) {
    output = output.parent_path();
  }
  BIFOCAL_REQUIRE(!fs::exists(output) || (fs::is_directory(output) && fs::is_empty(output)),
                  "[export] {} exists and is not an empty directory: give another path",
                  output.string());
  return output;
}

}  // namespace

void export_model(const ExportOptions& options, const TensorProvider& provide) {
  BIFOCAL_REQUIRE(options.dtype == DType::bf16 || options.dtype == DType::f32,
                  "[export] weights are stored as bfloat16 or float32, got {}",
                  name_of(options.dtype));
  for (const fs::path& source : {options.teacher, options.tokenizer}) {
    BIFOCAL_REQUIRE(fs::is_directory(source),
                    "[export] {} is not there, whose tokenizer and licence are passed on: set "
                    "teacher.path to where it lies now",
                    source.string());
  }
  const fs::path output = checked_output(options.output);
  const StagingDirectory staging(output);
  write_weights(options, provide, staging.path());
  write_file_atomically(staging.path() / "config.json",
                        write_hf_config(options.model, options.dtype));
  if (is_student(options.model)) {
    for (const RemoteFile& file : remote_code()) {
      write_file_atomically(staging.path() / file.name, file.text);
    }
  }
  pass_on_files(options.tokenizer, staging.path());
  name_tokenizer_class(staging.path());
  if (!fs::exists(staging.path() / kGenerationConfig)) {
    write_file_atomically(staging.path() / kGenerationConfig, generation_config(options.model));
  }
  write_file_atomically(staging.path() / "README.md", model_card(options));
  staging.publish(output);
}

}  // namespace bifocal
