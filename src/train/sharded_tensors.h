// Names for the pieces of flat parts, as checkpoints want them.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "model/weights.h"

namespace bifocal {

// Every piece of a parameter in this rank's parts, of which parts holds one tensor [part_size] a
// unit, on the host. Names are prefix + the parameter's name.
std::vector<ShardedTensor> sharded_tensors(const Weights& weights,
                                           const std::vector<TensorView>& parts,
                                           const std::string& prefix);

}  // namespace bifocal
