// Communicator over MPI.
#include "parallel/mpi_communicator.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <source_location>
#include <utility>

#include <climits>

// Only the C interface: the old C++ bindings would need a library of their own.
#define OMPI_SKIP_MPICXX 1   // NOLINT(readability-identifier-naming)
#define MPICH_SKIP_MPICXX 1  // NOLINT(readability-identifier-naming)
#include <mpi.h>

#include "parallel/collective.h"

namespace bifocal {

namespace {

void check_mpi(int code,
               const char* call,
               std::source_location place = std::source_location::current()) {
  if (code == MPI_SUCCESS) {
    return;
  }
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  fail_call("mpi", call, {text.data(), static_cast<std::size_t>(length)}, place);
}

#define BIFOCAL_MPI(call) check_mpi(call, #call)

using Bytes = std::unique_ptr<std::byte[]>;

Bytes make_bytes(std::size_t count) {
  return std::make_unique_for_overwrite<std::byte[]>(count);
}

// `count` of `type` covers a number of bytes that may exceed an int.
class Span {
 public:
  explicit Span(std::size_t bytes) {
    if (bytes <= static_cast<std::size_t>(INT_MAX)) {
      count_ = static_cast<int>(bytes);
      return;
    }
    constexpr std::size_t kBlock = std::size_t{1} << 30;
    const std::size_t blocks = bytes / kBlock;
    BIFOCAL_REQUIRE(blocks <= static_cast<std::size_t>(INT_MAX),
                    "[mpi] wanted a message of at most 2^61 bytes, got {}",
                    bytes);
    MPI_Datatype block = MPI_DATATYPE_NULL;
    MPI_Datatype body = MPI_DATATYPE_NULL;
    BIFOCAL_MPI(MPI_Type_contiguous(static_cast<int>(kBlock), MPI_BYTE, &block));
    BIFOCAL_MPI(MPI_Type_contiguous(static_cast<int>(blocks), block, &body));
    const std::array<int, 2> lengths{1, static_cast<int>(bytes % kBlock)};
    const std::array<MPI_Aint, 2> offsets{0, static_cast<MPI_Aint>(blocks * kBlock)};
    const std::array<MPI_Datatype, 2> types{body, MPI_BYTE};
    BIFOCAL_MPI(MPI_Type_create_struct(2, lengths.data(), offsets.data(), types.data(), &type_));
    BIFOCAL_MPI(MPI_Type_commit(&type_));
    BIFOCAL_MPI(MPI_Type_free(&body));
    BIFOCAL_MPI(MPI_Type_free(&block));
    count_ = 1;
  }

  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

  Span(Span&& other) noexcept
      : type_(std::exchange(other.type_, MPI_BYTE)), count_(std::exchange(other.count_, 0)) {}

  Span& operator=(Span&&) = delete;

  ~Span() {
    if (type_ != MPI_BYTE) {
      MPI_Type_free(&type_);
    }
  }

  MPI_Datatype type() const { return type_; }

  int count() const { return count_; }

 private:
  MPI_Datatype type_ = MPI_BYTE;
  int count_ = 0;
};

// The requests of one exchange and what they need until they end.
struct Exchange {
  std::vector<MPI_Request> requests;  // receives first
  std::vector<std::size_t> wanted;    // bytes of each receive
  std::vector<Span> spans;
};

void finish_exchange(Exchange& exchange) {
  std::vector<MPI_Status> statuses(exchange.requests.size());
  const int code = MPI_Waitall(
      static_cast<int>(exchange.requests.size()), exchange.requests.data(), statuses.data());
  if (code == MPI_ERR_IN_STATUS) {
    for (const MPI_Status& status : statuses) {
      if (status.MPI_ERROR != MPI_ERR_PENDING) {
        check_mpi(status.MPI_ERROR, "MPI_Waitall of an exchange");
      }
    }
  }
  check_mpi(code, "MPI_Waitall of an exchange");
  for (std::size_t i = 0; i < exchange.wanted.size(); ++i) {
    MPI_Count got = 0;
    BIFOCAL_MPI(MPI_Get_elements_x(&statuses[i], exchange.spans[i].type(), &got));
    BIFOCAL_REQUIRE(static_cast<std::size_t>(got) == exchange.wanted[i],
                    "[exchange] receive from rank {}: wanted {} bytes, got {}: sends and receives "
                    "must pair up over the group",
                    statuses[i].MPI_SOURCE,
                    exchange.wanted[i],
                    got);
  }
}

class MpiCommunicator final : public Communicator {
 public:
  // Takes over `comm`.
  explicit MpiCommunicator(MPI_Comm comm) : comm_(comm) {
    BIFOCAL_MPI(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN));
    BIFOCAL_MPI(MPI_Comm_rank(comm_, &rank_));
    BIFOCAL_MPI(MPI_Comm_size(comm_, &size_));
  }

  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;
  MpiCommunicator(MpiCommunicator&&) = delete;
  MpiCommunicator& operator=(MpiCommunicator&&) = delete;

  ~MpiCommunicator() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized == 0) {
      MPI_Comm_free(&comm_);
    }
  }

  int rank() const override { return rank_; }

  int size() const override { return size_; }

  Pending start_all_gather(const TensorView& whole, const ConstTensorView& part) override {
    check_all_gather(whole, part, size_);
    return gather(whole.data, part.data, part.bytes());
  }

  Pending start_reduce_scatter(const TensorView& part, const TensorView& whole) override {
    check_reduce_scatter(part, whole, size_);
    auto slices = std::make_shared<Bytes>(make_bytes(whole.bytes()));
    auto arrived =
        std::make_shared<Pending>(transpose(slices->get(), whole.data, whole.bytes() / size()));
    return Pending([=, dtype = whole.dtype, ranks = size_] {
      arrived->wait();
      add_in_rank_order(part, slices->get(), dtype, ranks);
    });
  }

  Pending start_exchange(const std::vector<RankMessage>& sends,
                         const std::vector<RankMessage>& receives) override {
    auto exchange = std::make_shared<Exchange>();
    exchange->requests.reserve(sends.size() + receives.size());
    exchange->spans.reserve(sends.size() + receives.size());
    // MPI keeps the order of messages between two ranks, so one tag is enough.
    constexpr int kTag = 1;
    for (const RankMessage& message : receives) {
      if (message.data.size() > 0) {
        const Span& span = exchange->spans.emplace_back(message.data.bytes());
        exchange->wanted.push_back(message.data.bytes());
        MPI_Request& request = exchange->requests.emplace_back(MPI_REQUEST_NULL);
        BIFOCAL_MPI(MPI_Irecv(
            message.data.data, span.count(), span.type(), message.peer, kTag, comm_, &request));
      }
    }
    for (const RankMessage& message : sends) {
      if (message.data.size() > 0) {
        const Span& span = exchange->spans.emplace_back(message.data.bytes());
        MPI_Request& request = exchange->requests.emplace_back(MPI_REQUEST_NULL);
        BIFOCAL_MPI(MPI_Isend(
            message.data.data, span.count(), span.type(), message.peer, kTag, comm_, &request));
      }
    }
    return Pending([exchange] { finish_exchange(*exchange); });
  }

  void all_reduce_sum(const TensorView& data) override {
    check_all_reduce(data);
    const auto ranks = static_cast<std::size_t>(size_);
    constexpr std::size_t kGatherBytes = std::size_t{1} << 16;
    if (data.bytes() <= kGatherBytes) {
      const Bytes slices = make_bytes(data.bytes() * ranks);
      gather(slices.get(), data.data, data.bytes()).wait();
      sum_in_rank_order(data, slices.get(), size_);
      return;
    }
    // Each rank sums one slice; the bits are those of the short form above.
    const std::int64_t n = (data.size() + size_ - 1) / size_;
    const std::size_t slice_bytes = static_cast<std::size_t>(n) * size_of(data.dtype);
    const Bytes padded = make_bytes(slice_bytes * ranks);
    std::memcpy(padded.get(), data.data, data.bytes());
    std::memset(padded.get() + data.bytes(), 0, slice_bytes * ranks - data.bytes());
    const Bytes slices = make_bytes(slice_bytes * ranks);
    transpose(slices.get(), padded.get(), slice_bytes).wait();
    std::byte* mine = padded.get() + slice_bytes * static_cast<std::size_t>(rank_);
    sum_in_rank_order({mine, data.dtype, {n}}, slices.get(), size_);
    gather(padded.get(), mine, slice_bytes).wait();
    std::memcpy(data.data, padded.get(), data.bytes());
  }

  void broadcast(const TensorView& data, int root) override {
    const Span span(data.bytes());
    BIFOCAL_MPI(MPI_Bcast(data.data, span.count(), span.type(), root, comm_));
  }

  void barrier() override { BIFOCAL_MPI(MPI_Barrier(comm_)); }

  std::unique_ptr<Communicator> split(int color) override {
    BIFOCAL_REQUIRE(color >= 0, "[split] wanted a color of at least 0, got {}", color);
    MPI_Comm comm = MPI_COMM_NULL;
    BIFOCAL_MPI(MPI_Comm_split(comm_, color, rank_, &comm));
    return std::make_unique<MpiCommunicator>(comm);
  }

  std::unique_ptr<Communicator> split_node() override {
    MPI_Comm comm = MPI_COMM_NULL;
    BIFOCAL_MPI(MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &comm));
    return std::make_unique<MpiCommunicator>(comm);
  }

 private:
  struct Collective {
    explicit Collective(std::size_t bytes) : span(bytes) {}

    Span span;
    MPI_Request request = MPI_REQUEST_NULL;
  };

  // The checker does not follow a request from its start into this closure.
  // NOLINTBEGIN(clang-analyzer-optin.mpi.MPI-Checker)
  static Pending pending(std::shared_ptr<Collective> collective) {
    return Pending([collective = std::move(collective)] {
      BIFOCAL_MPI(MPI_Wait(&collective->request, MPI_STATUS_IGNORE));
    });
  }

  // NOLINTEND(clang-analyzer-optin.mpi.MPI-Checker)

  // whole = every rank's `bytes` of part.
  Pending gather(void* whole, const void* part, std::size_t bytes) {
    auto collective = std::make_shared<Collective>(bytes);
    const Span& span = collective->span;
    const void* place = static_cast<std::byte*>(whole) + bytes * static_cast<std::size_t>(rank_);
    const void* source = part == place ? MPI_IN_PLACE : part;
    BIFOCAL_MPI(MPI_Iallgather(source,
                               span.count(),
                               span.type(),
                               whole,
                               span.count(),
                               span.type(),
                               comm_,
                               &collective->request));
    return pending(std::move(collective));
  }

  // slices = every rank's `bytes` of whole that are this rank's.
  Pending transpose(void* slices, const void* whole, std::size_t bytes) {
    auto collective = std::make_shared<Collective>(bytes);
    const Span& span = collective->span;
    BIFOCAL_MPI(MPI_Ialltoall(whole,
                              span.count(),
                              span.type(),
                              slices,
                              span.count(),
                              span.type(),
                              comm_,
                              &collective->request));
    return pending(std::move(collective));
  }

  MPI_Comm comm_;
  int rank_ = 0;
  int size_ = 1;
};

// The number of processes that a launcher says it started, 0 where none says so.
int launched_processes() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    if (const char* text = std::getenv(name); text != nullptr) {
      return std::max(0, std::atoi(text));  // NOLINT(cert-err34-c): 0 for no number is meant
    }
  }
  return 0;
}

bool started_by_mpi_launcher() {
  const auto names = {"OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK"};
  return std::any_of(
      names.begin(), names.end(), [](const char* name) { return std::getenv(name) != nullptr; });
}

// N processes that each believe they are alone would write over each other's files.
void require_one_job(int size) {
  BIFOCAL_REQUIRE(size > 1 || launched_processes() <= 1,
                  "[mpi] the launcher started {} processes, but they do not see each other: start "
                  "them with the mpirun of this MPI library ({}), or with srun --mpi=pmix",
                  launched_processes(),
                  mpi_library_version());
}

}  // namespace

MpiSession::MpiSession(int* argc, char*** argv, bool force) {
  if (!force && !started_by_mpi_launcher()) {
    require_one_job(1);
    return;
  }
  int provided = MPI_THREAD_SINGLE;
  BIFOCAL_MPI(MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided));
  active_ = true;
  BIFOCAL_MPI(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
  BIFOCAL_MPI(MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN));
  int size = 0;
  BIFOCAL_MPI(MPI_Comm_size(MPI_COMM_WORLD, &size));
  require_one_job(size);
  BIFOCAL_REQUIRE(provided >= MPI_THREAD_FUNNELED,
                  "[mpi] wanted thread level MPI_THREAD_FUNNELED, got {}: use an MPI library built "
                  "with thread support",
                  provided);
}

MpiSession::~MpiSession() {
  if (!active_) {
    return;
  }
  // A rank that leaves by an exception cannot meet the others in MPI_Finalize.
  if (std::uncaught_exceptions() > 0) {
    MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
  }
  MPI_Finalize();
}

std::unique_ptr<Communicator> MpiSession::world() const {
  if (!active_) {
    return make_self_communicator();
  }
  MPI_Comm comm = MPI_COMM_NULL;
  BIFOCAL_MPI(MPI_Comm_dup(MPI_COMM_WORLD, &comm));
  return std::make_unique<MpiCommunicator>(comm);
}

int MpiSession::rank() const {
  int rank = 0;
  if (active_) {
    BIFOCAL_MPI(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
  }
  return rank;
}

int MpiSession::size() const {
  int size = 1;
  if (active_) {
    BIFOCAL_MPI(MPI_Comm_size(MPI_COMM_WORLD, &size));
  }
  return size;
}

void MpiSession::abort(int exit_code) const {
  if (active_) {
    std::fflush(nullptr);
    MPI_Abort(MPI_COMM_WORLD, exit_code);
  }
  std::exit(exit_code);
}

std::string mpi_library_version() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  BIFOCAL_MPI(MPI_Get_library_version(text.data(), &length));
  const std::string version(text.data());  // Open MPI counts the terminating zero in length
  return version.substr(0, version.find('\n'));
}

}  // namespace bifocal
