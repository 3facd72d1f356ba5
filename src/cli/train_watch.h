// What a training command measures beside training: held-out rows, and operations of its products.
#pragma once

#include <functional>
#include <span>

#include "cli/session.h"
#include "evaluate/validation.h"
#include "parallel/mesh.h"

namespace bifocal {

// Measures the student on the held-out rows of the configuration, whole rows shared out over all
// ranks; empty where evaluate.every is 0. The models must outlive it. Collective.
std::function<Validation()> make_validation(const RunConfig& config,
                                            Context context,
                                            const Mesh& mesh,
                                            LoadedModel& student,
                                            LoadedModel& teacher);

// The operations that `count` finds for the documents of a row, by the row's position. rows must
// outlive it.
using RowFlop = std::function<double(std::int64_t position)>;
RowFlop row_flop(const RowSource& rows,
                 std::function<double(std::span<const std::int64_t> documents)> count);

}  // namespace bifocal
