// Host images of tensors.
#include "model/host_images.h"

#include "ops/elementwise.h"
#include "ops/transfer.h"

namespace bifocal {

void fill_from_host(Context context,
                    const TensorView& tensor,
                    const std::function<void(const TensorView&)>& function) {
  if (context.memory.on_host()) {
    function(tensor);
    return;
  }
  Memory host;
  const Tensor staged = host.empty(Region::weights, tensor.dtype, tensor.shape);
  function(staged);
  run(context.stream, Upload{.y = tensor, .x = staged});
}

HostImages::HostImages(Context context,
                       std::vector<TensorView> tensors,
                       Kind kind,
                       Memory* host_memory)
    : context_(context), tensors_(std::move(tensors)) {
  Memory* given = context_.memory.on_host() ? &context_.memory : host_memory;
  Memory& memory = kind == Kind::copies && given != nullptr ? *given : host_;
  for (const TensorView& tensor : tensors_) {
    const DType wide = sum_type(tensor.dtype);
    if (kind == Kind::shared && context_.memory.on_host() && tensor.dtype == wide) {
      images_.push_back(tensor);
    } else {
      copies_.push_back(memory.zeros(Region::optimizer, wide, tensor.shape));
      images_.push_back(copies_.back());
    }
  }
}

void HostImages::download() {
  CpuStream cpu;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (images_[i].data == tensors_[i].data) {
      continue;
    }
    if (images_[i].dtype == tensors_[i].dtype) {
      run(context_.stream, Download{.y = images_[i], .x = tensors_[i]});
      continue;
    }
    const Tensor narrow = host_.empty(Region::optimizer, tensors_[i].dtype, tensors_[i].shape);
    run(context_.stream, Download{.y = narrow, .x = tensors_[i]});
    run(cpu, Cast{.y = images_[i], .x = narrow});
  }
}

void HostImages::upload() {
  CpuStream cpu;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (images_[i].data == tensors_[i].data) {
      continue;
    }
    if (images_[i].dtype == tensors_[i].dtype) {
      run(context_.stream, Upload{.y = tensors_[i], .x = images_[i]});
      continue;
    }
    const Tensor narrow = host_.empty(Region::optimizer, tensors_[i].dtype, tensors_[i].shape);
    run(cpu, Cast{.y = narrow, .x = images_[i]});
    run(context_.stream, Upload{.y = tensors_[i], .x = narrow});
  }
}

}  // namespace bifocal
