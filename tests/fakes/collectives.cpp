// Says of collectives what a process group of PyTorch says, with PyTorch's own macro, without doing any.
#include <string>
#include <tuple>
#include <vector>

#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

static const std::tuple<std::string, std::string> GROUP{"7", "data parallel group with quite a long name"};

extern "C" void say_all_reduce(long elements) {
    const std::vector<int64_t> none;
    RECORD_PARAM_COMMS(std::make_tuple((int64_t)elements, false), GROUP, 1, "allreduce", elements, elements,
                       at::ScalarType::BFloat16, none, none, 4, 2, 3);
}

extern "C" void say_all_to_all() {
    const std::vector<int64_t> in{1, 2, 3}, out(40, 5);
    RECORD_PARAM_COMMS(std::make_tuple((int64_t)99, false), GROUP, 0, "all_to_allv", 6, 200, at::ScalarType::Long, in,
                       out, 0, 1, 3);
}
