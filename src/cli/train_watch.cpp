// Validation and operation counts for `train` and `pretrain`.
#include "cli/train_watch.h"

namespace bifocal {

namespace {

// Lengths of a row's documents, padding left out.
std::vector<std::int64_t> document_lengths(const Row& row) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t token = 0; token < row.tokens() - row.padding; ++token) {
    if (row.start[static_cast<std::size_t>(token)] == token) {
      lengths.push_back(0);
    }
    ++lengths.back();
  }
  return lengths;
}

}  // namespace

std::function<Validation()> make_validation(const RunConfig& config,
                                            Context context,
                                            const Mesh& mesh,
                                            LoadedModel& student,
                                            LoadedModel& teacher) {
  if (config.evaluate.every == 0) {
    return {};
  }
  const auto rows =
      std::make_shared<RowSource>(open_rows(config, teacher.config(), Split::held_out));
  const auto evaluator =
      std::make_shared<Evaluator>(context, mesh.world(), resolved_logit_chunk(config));
  const std::int64_t count = rows->rows_without_repeats(config.evaluate.rows);
  return [=, &mesh, &student, &teacher] {
    const EvaluationRows row = [&rows](std::int64_t index) { return rows->row(index); };
    return validate(
        context, *evaluator, mesh.world(), student.decoder(), teacher.decoder(), row, count);
  };
}

RowFlop row_flop(const RowSource& rows,
                 std::function<double(std::span<const std::int64_t> documents)> count) {
  return [&rows, count = std::move(count)](std::int64_t position) {
    return count(document_lengths(rows.row(position)));
  };
}

}  // namespace bifocal
