// Weights from a function on the host.
#pragma once

#include "model/host_images.h"
#include "model/weights.h"

namespace bifocal::test {

// Calls fill_piece with each piece of this rank's masters, on the host, which it may fill but not
// keep; then rounds the masters. Padding stays as it is. Afterwards share() makes the whole units
// current.
inline void fill_weights(Context context, Weights& weights, const Weights::Visit& fill_piece) {
  weights.for_each_piece(
      [&](const Parameter& parameter, std::int64_t first, const TensorView& piece) {
        fill_from_host(context, piece, [&](const TensorView& on_host) {
          fill_piece(parameter, first, on_host);
        });
      });
  weights.round_masters();
}

}  // namespace bifocal::test
