// Two ranks on GPUs, of which the second leaves in the middle of an all_gather: killed, stopped, or
// by an exception. nccl_fault.sh runs it and looks at how the first one ends.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <unistd.h>

#include <cuda_runtime.h>

#include "kernels/cuda_stream.h"
#include "kernels/device_communicator.h"
#include "parallel/mpi_communicator.h"

namespace bifocal {

namespace {

constexpr int kSkip = 77;

void leave(const std::string& way) {
  std::fprintf(stderr, "[fault] rank 1: %s\n", way.c_str());
  if (way == "kill") {
    std::raise(SIGKILL);
  } else if (way == "stop") {
    std::raise(SIGSTOP);
  } else {
    BIFOCAL_REQUIRE(way == "throw", "[fault] unknown way {}", way);
    fail("[fault] an error of rank 1");
  }
}

// Rank 0 is inside the collective, on the device and on the CPU, when rank 1 leaves.
void run(std::unique_ptr<Communicator> host, const std::string& way) {
  const int local_rank = host->split_node()->rank();
  CudaStream stream(choose_device(local_rank));
  const std::unique_ptr<Communicator> world =
      make_device_communicator(stream, stream.memory(), std::move(host));
  constexpr std::int64_t kBytes = 1 << 20;
  const Tensor whole =
      stream.memory().zeros(Region::communication, DType::u8, {kBytes * world->size()});
  const TensorView part = whole.rows(world->rank() * kBytes, (world->rank() + 1) * kBytes);
  for (int step = 0; step < 10; ++step) {
    world->all_gather(whole, part);
    stream.synchronize();
  }
  if (world->rank() == 1) {
    std::this_thread::sleep_for(std::chrono::seconds(2));
    leave(way);
  }
  world->all_gather(whole, part);
  std::fprintf(stderr, "[fault] rank %d waits\n", world->rank());
  stream.synchronize();
  std::fprintf(stderr, "[fault] rank %d was not held up\n", world->rank());
}

}  // namespace

}  // namespace bifocal

// nccl_fault kill|stop|throw DIRECTORY: process numbers are written there.
int main(int argc, char** argv) {
  bifocal::MpiSession session(&argc, &argv, true);
  try {
    std::unique_ptr<bifocal::Communicator> world = session.world();
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < 2 || world->size() != 2) {
      std::fprintf(stderr, "[fault] wants 2 ranks and 2 GPUs\n");
      return bifocal::kSkip;
    }
    BIFOCAL_REQUIRE(argc == 3, "[fault] usage: nccl_fault kill|stop|throw DIRECTORY");
    const std::filesystem::path directory = argv[2];
    std::ofstream(directory / std::to_string(world->rank())) << getpid() << '\n';
    bifocal::run(std::move(world), argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    session.abort(EXIT_FAILURE);
  }
}
