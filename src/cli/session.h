// What commands that run models share: a device, models read from Hugging Face directories, and
// rows of data.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>

#include "config/run_config.h"
#include "data/row_source.h"
#include "hf/safetensors.h"
#include "model/decoder.h"
#include "parallel/backend.h"
#include "plan/start_values.h"

namespace bifocal {

// The device of this rank under run.device, and the ranks as it sees them. Outlives everything that
// is made from it.
class Session {
 public:
  // world: all ranks. progress: told where the rank stands; nullptr: nobody asks. Collective.
  // Throws Error for a device that is not there, or a run.dtype that it does not compute in.
  Session(const RunConfig& config,
          std::unique_ptr<Communicator> world,
          Progress* progress = nullptr);

  Context context() {
    return {.stream = backend_->stream(),
            .memory = backend_->memory(),
            .dtype = dtype_,
            .progress = progress_};
  }

  Memory& memory() { return backend_->memory(); }

  Memory& host_memory() { return backend_->host_memory(); }

  // Bytes that tensors to come may take; 0: not known.
  std::size_t free_bytes() const { return backend_->free_bytes(); }

  // All ranks, for tensors on the host and on the device. Hands them out once; collective.
  std::unique_ptr<Communicator> take_world() {
    return backend_->communicator(std::move(host_world_));
  }

 private:
  DType dtype_;
  Progress* progress_;
  std::unique_ptr<Communicator> host_world_;
  std::unique_ptr<Backend> backend_;
};

// A model with its weights.
class LoadedModel {
 public:
  // load fills the weights' parts; the units are shared afterwards. Collective over the group.
  LoadedModel(Context context,
              const ModelConfig& config,
              Communicator& group,
              const Weights::Options& options,
              const std::function<void(Weights&)>& load);
  LoadedModel(const LoadedModel&) = delete;  // parts point at each other
  LoadedModel& operator=(const LoadedModel&) = delete;
  ~LoadedModel() = default;

  const ModelConfig& config() const { return config_; }

  const ParameterTable& table() const { return table_; }

  Weights& weights() { return *weights_; }

  Decoder& decoder() { return *decoder_; }

 private:
  ModelConfig config_;
  ParameterTable table_;
  std::unique_ptr<Weights> weights_;
  std::unique_ptr<Decoder> decoder_;
};

// Where a model's weights lie.
struct ModelPlacement {
  Weights::Placement placement = Weights::Placement::replicated;
  Region region = Region::weights;
  // Parts stay in bfloat16 where the checkpoint has nothing else: a frozen model loses nothing by
  // it.
  bool frozen = false;
};

// `config` with weights from a Hugging Face directory, of which each rank reads its own part alone:
// copied tensors must be there, new ones that are not start at run.student's values. A directory
// without weights, or none (an empty path), gives random ones from run.seed. Collective.
LoadedModel load_model(Context context,
                       const ModelConfig& config,
                       const std::filesystem::path& directory,
                       Communicator& group,
                       const ModelPlacement& placement,
                       const RunConfig& run);

// A student from `path`: a Hugging Face directory, a checkpoint, or a run directory (its newest
// checkpoint); empty: the student that the configuration describes, untrained. Collective.
LoadedModel open_student(Context context,
                         const RunConfig& run,
                         const std::string& path,
                         Communicator& group,
                         const ModelPlacement& placement);

// The checkpoint that a path stands for: itself, or the newest of a run directory or of its
// checkpoints folder; none for other directories. Throws Error for a run directory without a
// complete one.
std::optional<std::filesystem::path> find_checkpoint(const std::filesystem::path& path);

StartValues start_values(const RunConfig::Student& student);

// The student that a configuration describes: its base directory (student.init, or the teacher's)
// and its mixers.
std::filesystem::path student_directory(const RunConfig& config);
ModelConfig student_config(const RunConfig& config);

// The type of a frozen model's parts, as its config.json declares it: bfloat16 stays as it is,
// other types are converted to `compute`.
DType declared_storage(const std::filesystem::path& directory, DType compute);

// Random weights for a model without any, made on the device: matrices normal with deviation 0.02,
// norms one, biases zero. piece: elements from `begin` on.
void fill_random(Stream& stream,
                 const Parameter& parameter,
                 std::uint64_t seed,
                 std::int64_t begin,
                 const TensorView& piece);

// The sources that data.mixture or data.train names.
Mixture data_mixture(const RunConfig& config);

// Rows under the configuration. Throws Error for a row longer than the model's maximum position.
RowSource open_rows(const RunConfig& config, const ModelConfig& model, Split split);

// The same without a model: rows of any length, ids below the vocabulary of the shards.
RowSource open_rows(const RunConfig& config, Split split);

}  // namespace bifocal
