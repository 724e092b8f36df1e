// Prints where things lie in torch's objects: see generate_torch_layouts.py. Needs torch's headers, no library of it.
#include <algorithm>
#include <any>
#include <array>
#include <atomic>
#include <chrono>
#include <complex>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <iostream>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <queue>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <type_traits>
#include <typeindex>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>
// The standard library is in, so only torch's classes are opened.
#define private public
#define protected public
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <c10/util/TypeIndex.h>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

#define PUT(name, value) std::printf("%s %llu\n", name, (unsigned long long)(value))
using namespace c10;

alignas(64) static unsigned char space[4096];

// offsetof does not know bit-fields: set one in zeros and look where it is.
template <typename Set>
static void put_bits(const char* name, Set set) {
    std::memset(space, 0, sizeof space);
    set(reinterpret_cast<TensorImpl*>(space));
    for (unsigned i = 0; i < sizeof space; i++) {
        if (space[i] != 0) {
            std::printf("%s %u\n%s_mask %u\n", name, i, name, space[i]);
        }
    }
}

using Comms = torch::ParamCommsDebugInfo;

static size_t place_in(const Comms* whole, const void* part) {
    return (size_t)((const unsigned char*)part - (const unsigned char*)whole);
}

// The kind is a number up to torch 2.12, then an object whose address is looked up at run time (0 here).
template <typename Kind>
static unsigned long long number_of_comms() {
    if constexpr (std::is_enum_v<Kind>) {
        return (unsigned long long)Kind::PARAM_COMMS_INFO;
    }
    return 0;
}

template <typename T>
static auto put_sequence(const T* comms, int) -> decltype((void)comms->sequenceNumber_) {
    PUT("comms_sequence", place_in(comms, &comms->sequenceNumber_));
    PUT("comms_transfer", place_in(comms, &comms->isP2P_));
}

template <typename T>
static void put_sequence(const T*, long) {
    PUT("comms_sequence", 0); // not in this version
    PUT("comms_transfer", 0);
}

static void put_comms() {
    const Comms* comms = reinterpret_cast<const Comms*>(space);
    PUT("string_bytes", sizeof(std::string));
    PUT("comms_kind", number_of_comms<c10::DebugInfoKind>());
    PUT("comms_group", place_in(comms, &std::get<0>(comms->pgName_)));
    PUT("comms_description", place_in(comms, &std::get<1>(comms->pgName_)));
    PUT("comms_name", place_in(comms, &comms->collectiveName_));
    PUT("comms_rank", place_in(comms, &comms->rank_));
    PUT("comms_world", place_in(comms, &comms->worldSize_));
    PUT("comms_first", place_in(comms, &comms->globalRankStart_));
    PUT("comms_stride", place_in(comms, &comms->globalRankStride_));
    PUT("comms_in", place_in(comms, &comms->inMessageNelems_));
    PUT("comms_out", place_in(comms, &comms->outMessageNelems_));
    PUT("comms_dtype", place_in(comms, &comms->dType_));
    PUT("comms_in_splits", place_in(comms, &comms->inputSplitSizes_));
    PUT("comms_out_splits", place_in(comms, &comms->outputSplitSizes_));
    PUT("comms_ranks", place_in(comms, &comms->groupRanks_));
    put_sequence(comms, 0);
}

int main() {
    PUT("callback_bytes", sizeof(at::RecordFunctionCallback));
    PUT("callback_start", offsetof(at::RecordFunctionCallback, start_));
    PUT("callback_end", offsetof(at::RecordFunctionCallback, end_));
    PUT("callback_probability", offsetof(at::RecordFunctionCallback, sampling_prob_));
    PUT("callback_scopes", offsetof(at::RecordFunctionCallback, scopes_));
    PUT("callback_needs_inputs", offsetof(at::RecordFunctionCallback, needs_inputs_));
    PUT("callback_needs_outputs", offsetof(at::RecordFunctionCallback, needs_outputs_));
    PUT("callback_needs_ids", offsetof(at::RecordFunctionCallback, needs_ids_));
    PUT("scope_backward_function", at::RecordScope::BACKWARD_FUNCTION);
    PUT("scope_user", at::RecordScope::USER_SCOPE);
    PUT("scopes", at::RecordScope::NUM_SCOPES);
    PUT("function_bytes", sizeof(at::RecordFunction));
    PUT("function_scope", offsetof(at::RecordFunction, step_callbacks_) + offsetof(at::StepCallbacks, scope_));
    PUT("function_sequence", offsetof(at::RecordFunction, sequence_nr_));
    PUT("function_inputs", offsetof(at::RecordFunction, inputs_));
    PUT("function_inputs_length", offsetof(at::RecordFunction, inputs_) + offsetof(ArrayRef<IValue>, Length));
    PUT("function_forward_thread", offsetof(at::RecordFunction, fwd_thread_id_));
    PUT("value_bytes", sizeof(IValue));
    PUT("value_payload", offsetof(IValue, payload));
    PUT("value_tag", offsetof(IValue, tag));
    PUT("value_tag_bytes", sizeof(IValue::Tag));
    PUT("tag_none", IValue::Tag::None);
    PUT("tag_tensor", IValue::Tag::Tensor);
    PUT("tag_double", IValue::Tag::Double);
    PUT("tag_int", IValue::Tag::Int);
    PUT("tag_bool", IValue::Tag::Bool);
    PUT("tag_list", IValue::Tag::GenericList);
    PUT("list_values", offsetof(c10::detail::ListImpl, list));
    PUT("tensor_storage", offsetof(TensorImpl, storage_));
    PUT("tensor_sizes", offsetof(TensorImpl, sizes_and_strides_));
    PUT("tensor_dtype", offsetof(TensorImpl, data_type_));
    put_bits("tensor_policy", [](TensorImpl* t) { t->sizes_strides_policy_ = 3; });
    put_bits("tensor_symbolic", [](TensorImpl* t) { t->has_symbolic_sizes_strides_ = true; });
    PUT("sizes_count", offsetof(impl::SizesAndStrides, size_));
    PUT("sizes_values", offsetof(impl::SizesAndStrides, inlineStorage_));
    PUT("sizes_outside", offsetof(impl::SizesAndStrides, outOfLineStorage_));
    PUT("sizes_inline", C10_SIZES_AND_STRIDES_MAX_INLINE_SIZE);
    PUT("policy_custom_strides", TensorImpl::SizesStridesPolicy::CustomStrides);
    PUT("policy_custom_sizes", TensorImpl::SizesStridesPolicy::CustomSizes);
    PUT("storage_data", offsetof(StorageImpl, data_ptr_));
    put_comms();
    PUT("dtypes", ScalarType::Undefined);
#define NAME(type, name)                                                                                 \
    {                                                                                                    \
        const auto text = c10::util::get_fully_qualified_type_name<type>();                              \
        std::printf("dtype %d %.*s\n", (int)ScalarType::name, (int)text.size(), text.data());            \
    }
    AT_FORALL_SCALAR_TYPES_WITH_COMPLEX_AND_QINTS(NAME)
    return 0;
}
