// Launches of all kinds without graphs: launches MODE FOLDER.
#include <atomic>
#include <thread>

#include <cooperative_groups.h>

#include "zoo.cuh"

namespace cg = cooperative_groups;

// Copies in both directions and kernels on four streams that wait for each other by events.
static int streams(Life &life) {
    cudaStream_t streams[4];
    cudaEvent_t events[4];
    uint32_t *values[4], *host[4], expected = 5;
    for (int k = 0; k < 4; k++) {
        CUDA(cudaStreamCreateWithFlags(&streams[k], cudaStreamNonBlocking));
        CUDA(cudaEventCreateWithFlags(&events[k], cudaEventDisableTiming));
        values[k] = numbers();
        CUDA(cudaMallocHost(&host[k], COUNT * sizeof(uint32_t)));
    }
    life.ready();
    do {
        for (int k = 0; k < 4; k++) {
            advance_on(streams[k], values[k], 5);
            CUDA(cudaMemcpyAsync(host[k], values[k], COUNT * sizeof(uint32_t), cudaMemcpyDeviceToHost, streams[k]));
            CUDA(cudaMemsetAsync(values[k], 0, COUNT * sizeof(uint32_t), streams[k]));
            CUDA(cudaEventRecord(events[k], streams[k]));
            CUDA(cudaStreamWaitEvent(streams[(k + 1) % 4], events[k], 0));
            CUDA(cudaMemcpyAsync(values[k], host[k], COUNT * sizeof(uint32_t), cudaMemcpyHostToDevice, streams[k]));
        }
        CUDA(cudaDeviceSynchronize());
        expected = after(expected, 5);
        for (int k = 0; k < 4; k++) {
            life.check(host[k][5] == expected && sample(values[k]) == expected, "a number is not what the CPU gets");
        }
        if (life.due(100)) {
            life.digest_of_device(values[3], COUNT);
        }
    } while (life.tick());
    return life.close();
}

// Memory of pools, taken and given back in the order of a stream.
static int pools(Life &life) {
    cudaStream_t stream;
    CUDA(cudaStreamCreate(&stream));
    uint32_t *values = numbers(), expected = 5;
    cudaMemPool_t pool;
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    CUDA(cudaMemPoolCreate(&pool, &properties));
    life.ready();
    do {
        uint32_t *own = nullptr, *common = nullptr;
        CUDA(cudaMallocFromPoolAsync((void **)&own, COUNT * sizeof(uint32_t), pool, stream));
        CUDA(cudaMallocAsync((void **)&common, (1 + life.count % 8) * COUNT * sizeof(uint32_t), stream));
        CUDA(cudaMemcpyAsync(own, values, COUNT * sizeof(uint32_t), cudaMemcpyDeviceToDevice, stream));
        advance_on(stream, own, 5);
        CUDA(cudaMemcpyAsync(common, own, COUNT * sizeof(uint32_t), cudaMemcpyDeviceToDevice, stream));
        CUDA(cudaFreeAsync(own, stream));
        advance_on(stream, common, 5);
        CUDA(cudaMemcpyAsync(values, common, COUNT * sizeof(uint32_t), cudaMemcpyDeviceToDevice, stream));
        CUDA(cudaFreeAsync(common, stream));
        CUDA(cudaStreamSynchronize(stream));
        if (life.count % 100 == 50) {
            CUDA(cudaMemPoolTrimTo(pool, 0));
        }
        expected = after(expected, 10);
        life.check(sample(values) == expected, "a number is not what the CPU gets");
        if (life.due(200)) {
            life.digest_of_device(values, COUNT);
        }
    } while (life.tick());
    return life.close();
}

// All blocks meet between the steps; each works on what another one has written.
__global__ void advance_together(uint32_t *values, int count, int steps) {
    cg::grid_group grid = cg::this_grid();
    for (int step = 0; step < steps; step++) {
        for (int i = (int)grid.thread_rank(); i < count; i += (int)grid.size()) {
            const int place = (i + step * 1021) % count;
            values[place] = next_of(values[place]);
        }
        grid.sync();
    }
}

static int cooperative(Life &life) {
    int per_sm = 0, sms = 0, count = COUNT, steps = 8;
    CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, advance_together, BLOCK, 0));
    uint32_t *values = numbers(), expected = 5;
    void *arguments[] = {&values, &count, &steps};
    life.ready();
    do {
        for (int k = 0; k < 3; k++) {
            CUDA(cudaLaunchCooperativeKernel((const void *)advance_together, dim3(sms * per_sm), dim3(BLOCK), arguments, 0, 0));
        }
        CUDA(cudaDeviceSynchronize());
        expected = after(expected, 24);
        life.check(sample(values) == expected, "a number is not what the CPU gets");
        if (life.due(200)) {
            life.digest_of_device(values, COUNT);
        }
    } while (life.tick());
    return life.close();
}

// The two blocks of a cluster exchange halves through each other's shared memory.
__global__ void advance_in_clusters(uint32_t *values, int count) {
    __shared__ uint32_t mine[BLOCK];
    cg::cluster_group cluster = cg::this_cluster();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    mine[threadIdx.x] = i < count ? next_of(values[i]) : 0;
    cluster.sync();
    const unsigned other = cluster.block_rank() ^ 1u;
    uint32_t *theirs = cluster.map_shared_rank(mine, other);
    const uint32_t found = next_of(theirs[threadIdx.x]);
    cluster.sync();
    const int place = (int)((blockIdx.x ^ 1u) * blockDim.x + threadIdx.x);
    if (place < count) {
        values[place] = found;
    }
}

static void launch_with(cudaLaunchAttribute attribute, void (*kernel)(uint32_t *, int), uint32_t *values, cudaStream_t stream) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(COUNT / BLOCK);
    config.blockDim = dim3(BLOCK);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    CUDA(cudaLaunchKernelEx(&config, kernel, values, COUNT));
}

static int clusters(Life &life) {
    uint32_t *values = numbers(), expected = 5;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = 2;
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
    life.ready();
    do {
        for (int k = 0; k < 5; k++) {
            launch_with(attribute, advance_in_clusters, values, 0);
        }
        CUDA(cudaDeviceSynchronize());
        expected = after(expected, 10);
        life.check(sample(values) == expected, "a number is not what the CPU gets");
        if (life.due(200)) {
            life.digest_of_device(values, COUNT);
        }
    } while (life.tick());
    return life.close();
}

// Each kernel may begin before the one before it has ended, and waits for its results inside.
__global__ void advance_early(uint32_t *values, int count) {
    cudaTriggerProgrammaticLaunchCompletion();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    cudaGridDependencySynchronize();
    if (i < count) {
        values[i] = next_of(values[i]);
    }
}

static int programmatic(Life &life) {
    uint32_t *values = numbers(), expected = 5;
    cudaStream_t stream;
    CUDA(cudaStreamCreate(&stream));
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    life.ready();
    do {
        for (int k = 0; k < 20; k++) {
            launch_with(attribute, advance_early, values, stream);
        }
        CUDA(cudaStreamSynchronize(stream));
        expected = after(expected, 20);
        life.check(sample(values) == expected, "a number is not what the CPU gets");
        if (life.due(200)) {
            life.digest_of_device(values, COUNT);
        }
    } while (life.tick());
    return life.close();
}

struct Launcher {
    cudaStream_t stream;
    uint32_t *values;
    uint32_t expected = 5;

    Launcher() {
        CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CUDA(cudaMalloc(&values, BLOCK * sizeof(uint32_t)));
        number<<<1, BLOCK, 0, stream>>>(values, BLOCK);
    }

    void launch(int times) {
        advance_on(stream, values, times, BLOCK);
        CUDA(cudaStreamSynchronize(stream));
        expected = after(expected, times);
    }
};

// As many launches as 64 threads can make, each on a stream of its own; the loop that is timed is one of them. All is
// made before the first of them begins: the driver does not let anybody make anything while so many launch.
static int threads(Life &life) {
    const int at_once = 16;
    std::vector<Launcher> launchers(64);
    std::vector<std::thread> others;
    std::atomic<bool> ended{false};
    CUDA(cudaDeviceSynchronize());
    for (size_t k = 1; k < launchers.size(); k++) {
        others.emplace_back([&ended, &launcher = launchers[k]] {
            while (!ended.load()) {
                launcher.launch(at_once);
            }
        });
    }
    life.ready();
    do {
        launchers[0].launch(at_once);
    } while (life.tick());
    ended = true;
    for (std::thread &each : others) {
        each.join();
    }
    for (const Launcher &each : launchers) {
        life.check(sample(each.values) == each.expected, "a number is not what the CPU gets");
    }
    return life.close();
}

int main(int argc, char **argv) {
    const std::string mode = argc == 3 ? argv[1] : "";
    Life life(argc == 3 ? argv[2] : ".");
    if (mode == "streams") {
        return streams(life);
    }
    if (mode == "pools") {
        return pools(life);
    }
    if (mode == "cooperative") {
        return cooperative(life);
    }
    if (mode == "clusters") {
        return clusters(life);
    }
    if (mode == "programmatic") {
        return programmatic(life);
    }
    if (mode == "threads") {
        return threads(life);
    }
    fprintf(stderr, "usage: launches streams|pools|cooperative|clusters|programmatic|threads FOLDER\n");
    return 2;
}
