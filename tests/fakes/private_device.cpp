// A made-up accelerator outside of torch, with a profiler in torch's PrivateUse1 registry, built against torch's own
// headers.
//
// One stream: a thread of the device executes what was launched, in order. With a session on, every launch, kernel,
// copy and fill is a row for Kineto; the device keeps its own log of all of them, which tests compare with.
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <sys/syscall.h>
#include <thread>
#include <vector>

#include <libkineto.h>
#include <output_base.h>
#include <torch/csrc/profiler/standalone/privateuse1_profiler.h>

using libkineto::ActivityType;

namespace {

constexpr int STREAM = 7;

int64_t now_ns() {
    using namespace std::chrono;
    return duration_cast<nanoseconds>(system_clock::now().time_since_epoch()).count();
}

struct Work {
    ActivityType type;
    std::string name;
    int64_t busy_ns, bytes;
    int32_t correlation, thread;
    int64_t operation; // Kineto's number of the operator around the launch; 0: none
    int64_t launched_ns, returned_ns, start_ns, end_ns;
};

class Device {
  public:
    Device() : thread_([this] { run(); }) { thread_.detach(); }

    int launch(ActivityType type, const char *name, int64_t busy_ns, int64_t bytes) {
        Work work{type,        name,     busy_ns, bytes, 0, static_cast<int32_t>(syscall(SYS_gettid)),
                  operation(), now_ns(), 0,       0,     0};
        std::lock_guard<std::mutex> lock(mutex_);
        work.correlation = ++launched_;
        work.returned_ns = now_ns();
        queue_.push_back(work);
        changed_.notify_all();
        return work.correlation;
    }

    void synchronize() {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return done_ == launched_; });
    }

    // What has been executed since the n-th piece of work.
    std::vector<Work> log(size_t from) {
        std::lock_guard<std::mutex> lock(mutex_);
        return from < log_.size() ? std::vector<Work>(log_.begin() + from, log_.end()) : std::vector<Work>();
    }

    size_t executed() {
        std::lock_guard<std::mutex> lock(mutex_);
        return log_.size();
    }

    int launched() {
        std::lock_guard<std::mutex> lock(mutex_);
        return launched_;
    }

    static std::vector<int64_t> &operations() {
        static thread_local std::vector<int64_t> stack;
        return stack;
    }

    int sessions = 0, recording = 0;

  private:
    static int64_t operation() { return operations().empty() ? 0 : operations().back(); }

    void run() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            changed_.wait(lock, [this] { return !queue_.empty(); });
            Work work = queue_.front();
            queue_.pop_front();
            lock.unlock();
            work.start_ns = now_ns();
            while (now_ns() - work.start_ns < work.busy_ns) {
            }
            work.end_ns = now_ns();
            lock.lock();
            log_.push_back(work);
            done_++;
            changed_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Work> queue_;
    std::vector<Work> log_;
    int launched_ = 0, done_ = 0;
    std::thread thread_;
};

Device &device() {
    static Device *made = new Device(); // its thread outlives static destructors
    return *made;
}

class Session : public libkineto::IActivityProfilerSession {
  public:
    explicit Session(std::set<ActivityType> types) : types_(std::move(types)) { device().sessions++; }

    void start() override {
        first_ = device().executed();
        device().recording++;
        status_ = libkineto::TraceStatus::RECORDING;
    }

    void stop() override {
        device().synchronize();
        device().recording--;
        work_ = device().log(first_);
        status_ = libkineto::TraceStatus::PROCESSING;
    }

    std::vector<std::string> errors() override { return {}; }

    void processTrace(libkineto::ActivityLogger &logger) override { process(logger, nullptr); }

    void processTrace(libkineto::ActivityLogger &logger, libkineto::getLinkedActivityCallback linked, int64_t,
                      int64_t) override {
        process(logger, linked);
    }

    std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override { return nullptr; }
    std::vector<libkineto::ResourceInfo> getResourceInfos() override { return {}; }
    std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override { return std::move(buffer_); }

    void pushCorrelationId(uint64_t id) override { Device::operations().push_back(static_cast<int64_t>(id)); }
    void popCorrelationId() override {
        if (!Device::operations().empty()) {
            Device::operations().pop_back();
        }
    }

    std::string getDeviceProperties() override {
        return R"({"id": 0, "name": "Acme A1", "totalGlobalMem": 17179869184})";
    }

  private:
    void process(libkineto::ActivityLogger &logger, const libkineto::getLinkedActivityCallback &linked) {
        buffer_ = std::make_unique<libkineto::CpuTraceBuffer>();
        buffer_->span = libkineto::TraceSpan(0, 0, "acme");
        for (const Work &work : work_) {
            if (types_.count(ActivityType::PRIVATEUSE1_RUNTIME)) {
                row(ActivityType::PRIVATEUSE1_RUNTIME, "acmeLaunch", getpid(), work.thread, work, work.launched_ns,
                    work.returned_ns, linked);
            }
            if (types_.count(work.type)) {
                auto &made = row(work.type, work.name, 0, STREAM, work, work.start_ns, work.end_ns, linked);
                made.addMetadata("device", 0);
                made.addMetadata("stream", STREAM);
                if (work.type == ActivityType::CONCURRENT_KERNEL) {
                    made.addMetadata("grid", "[4, 2, 1]");
                    made.addMetadata("block", "[32, 1, 1]");
                    made.addMetadata("tiles", 12);
                } else {
                    made.addMetadata("bytes", work.bytes);
                }
            }
        }
        for (const auto &activity : buffer_->activities) {
            activity->log(logger);
        }
    }

    libkineto::GenericTraceActivity &row(ActivityType type, const std::string &name, int where, int track,
                                         const Work &work, int64_t start_ns, int64_t end_ns,
                                         const libkineto::getLinkedActivityCallback &linked) {
        buffer_->emplace_activity(buffer_->span, type, name);
        auto &made = *buffer_->activities.back();
        made.startTime = start_ns;
        made.endTime = end_ns;
        made.id = work.correlation;
        made.device = where;
        made.resource = made.threadId = track;
        made.flow.id = work.correlation;
        made.flow.type = libkineto::kLinkAsyncCpuGpu;
        made.flow.start = type == ActivityType::PRIVATEUSE1_RUNTIME;
        if (linked) {
            made.linked = linked(static_cast<int32_t>(work.operation));
        }
        made.addMetadata("correlation", work.correlation);
        return made;
    }

    std::set<ActivityType> types_;
    size_t first_ = 0;
    std::vector<Work> work_;
    std::unique_ptr<libkineto::CpuTraceBuffer> buffer_;
};

class AcmeProfiler : public libkineto::IActivityProfiler {
  public:
    const std::string &name() const override { return name_; }
    const std::set<ActivityType> &availableActivities() const override { return types_; }

    std::unique_ptr<libkineto::IActivityProfilerSession> configure(const std::set<ActivityType> &types,
                                                                   const libkineto::Config &) override {
        std::set<ActivityType> wanted;
        for (auto type : types) {
            if (types_.count(type)) {
                wanted.insert(type);
            }
        }
        return wanted.empty() ? nullptr : std::make_unique<Session>(wanted);
    }

    std::unique_ptr<libkineto::IActivityProfilerSession>
    configure(int64_t, int64_t, const std::set<ActivityType> &types, const libkineto::Config &config) override {
        return configure(types, config);
    }

  private:
    std::string name_{"acme"};
    std::set<ActivityType> types_{ActivityType::CONCURRENT_KERNEL, ActivityType::GPU_MEMCPY, ActivityType::GPU_MEMSET,
                                  ActivityType::PRIVATEUSE1_RUNTIME};
};

} // namespace

extern "C" {

void acme_register_profiler() { torch::profiler::impl::RegisterPrivateUse1Profiler<AcmeProfiler> registered; }

int acme_launch(const char *name, int64_t busy_ns) {
    return device().launch(ActivityType::CONCURRENT_KERNEL, name, busy_ns, 0);
}

int acme_copy(int64_t bytes) {
    return device().launch(ActivityType::GPU_MEMCPY, "Memcpy HtoD (Host -> Acme)", 1000, bytes);
}

int acme_fill(int64_t bytes) { return device().launch(ActivityType::GPU_MEMSET, "Memset (Acme)", 1000, bytes); }

void acme_synchronize() { device().synchronize(); }

int acme_launched() { return device().launched(); }

int acme_sessions() { return device().sessions; }

int acme_recording() { return device().recording; }

// The n-th piece of work: name, correlation, thread, start and end in Unix ns. Returns 0 if it was not executed yet.
int acme_executed(size_t place, char *name, size_t size, int64_t numbers[5]) {
    static std::vector<Work> kept;
    if (place >= kept.size()) {
        kept = device().log(0);
    }
    if (place >= kept.size()) {
        return 0;
    }
    const Work &work = kept[place];
    snprintf(name, size, "%s", work.name.c_str());
    numbers[0] = work.correlation;
    numbers[1] = work.thread;
    numbers[2] = work.start_ns;
    numbers[3] = work.end_ns;
    numbers[4] = work.launched_ns;
    return 1;
}
}
