// The frozen teacher, and where it runs: whole rows ahead of the student, or beside it with heads
// cut over ranks.
#pragma once

#include <deque>
#include <functional>
#include <memory>

#include "data/row.h"
#include "model/decoder.h"
#include "model/row_shard.h"
#include "parallel/mesh.h"
#include "plan/memory_forecast.h"

namespace bifocal {

// The rows of one sequence group in the order it trains on them.
using GroupRows = std::function<Row(std::int64_t index)>;

// Final hidden states of the teacher for this rank's shard of the group's rows, in order.
//
// look_ahead: the ranks of a group each run the teacher on one whole row of the next size() rows;
// one exchange hands every rank its slice of every row. Rows at or past `rows` do not exist: their
// ranks only take part in gathers. ulysses: every row when it is asked for, heads cut over the
// group.
class TeacherFeed {
 public:
  TeacherFeed(Context context,
              Decoder& teacher,
              Communicator& group,
              TeacherPlacement placement,
              GroupRows rows,
              std::int64_t row_count);

  // [tokens of this shard, D]. index must not decrease by more than what a restart explains: rows
  // are asked for in order.
  Tensor hidden(std::int64_t index, RowShard& shard);

 private:
  void run_ahead(std::int64_t first);

  Context context_;
  Decoder* teacher_;
  Communicator* group_;
  TeacherPlacement placement_;
  GroupRows rows_;
  std::int64_t row_count_;
  std::unique_ptr<Communicator> self_;
  std::int64_t next_ = 0;  // index of ready_.front()
  std::deque<Tensor> ready_;
};

}  // namespace bifocal
