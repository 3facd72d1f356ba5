// Tensors of the device as files see them.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "model/context.h"

namespace bifocal {

// Fills a tensor from the host: calls function with it, or, where the host cannot write it, with a
// tensor on the host that is then uploaded.
void fill_from_host(Context context,
                    const TensorView& tensor,
                    const std::function<void(const TensorView&)>& function);

// Host images of tensors, for files, in the sum type: the tensors themselves where the host can use
// them and a copy is not asked for.
class HostImages {
 public:
  enum class Kind : std::uint8_t {
    shared,  // the tensors themselves where that is possible
    copies   // memory of their own, drawn from the context's where that is the host's
  };

  // host_memory: of copies of a device's tensors, where the device copies fastest; nullptr: any.
  HostImages(Context context,
             std::vector<TensorView> tensors,
             Kind kind = Kind::shared,
             Memory* host_memory = nullptr);

  // On the host, float32 or float64.
  const std::vector<TensorView>& images() const { return images_; }

  // Images from tensors. Returns when they are there.
  void download();
  // Tensors from images.
  void upload();

 private:
  Context context_;
  Memory host_;
  std::vector<TensorView> tensors_;
  std::vector<TensorView> images_;
  std::vector<Tensor> copies_;  // of images_ that are not their tensors
};

}  // namespace bifocal
