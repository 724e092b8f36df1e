// CUDA graphs of the kinds that frameworks do not make: graphs MODE FOLDER.
#include "graphs.cuh"

// An instance that gets other parameters all the time, by an update with a new capture and by its node.
static int update(Life &life, cudaStream_t stream) {
    uint32_t *both[2] = {numbers(), numbers()}, expected[2] = {5, 5};
    cudaGraph_t graph = capture(stream, both[0], 8);
    cudaGraphExec_t instance;
    instantiate(&instance, graph);
    life.ready();
    bool going = true;
    while (going) {
        const int which = (int)(life.count / 3 % 2);
        if (life.count % 3 == 0) {
            cudaGraph_t other = capture(stream, both[which], 8);
#if CUDART_VERSION >= 12000
            cudaGraphExecUpdateResultInfo info;
            CUDA(cudaGraphExecUpdate(instance, other, &info));
#else
            cudaGraphNode_t node;
            cudaGraphExecUpdateResult info;
            CUDA(cudaGraphExecUpdate(instance, other, &node, &info));
#endif
            CUDA(cudaGraphDestroy(other));
        }
        for (int k = 0; k < 3; k++) {
            CUDA(cudaGraphLaunch(instance, stream));
        }
        CUDA(cudaStreamSynchronize(stream));
        step(life, both[which], expected[which], 24);
        going = life.tick();
    }
    return life.close();
}

// A graph that takes and gives back memory.
static int memory(Life &life, cudaStream_t stream) {
    uint32_t *values = numbers(), expected = 5, *inside = nullptr;
    const size_t size = COUNT * sizeof(uint32_t);
    cudaGraph_t graph;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    CUDA(cudaMallocAsync((void **)&inside, size, stream));
    CUDA(cudaMemcpyAsync(inside, values, size, cudaMemcpyDeviceToDevice, stream));
    advance_on(stream, inside, 6);
    CUDA(cudaMemcpyAsync(values, inside, size, cudaMemcpyDeviceToDevice, stream));
    CUDA(cudaFreeAsync(inside, stream));
    CUDA(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t instance;
    instantiate(&instance, graph);
    life.ready();
    do {
        for (int k = 0; k < 3; k++) {
            CUDA(cudaGraphLaunch(instance, stream));
        }
        CUDA(cudaStreamSynchronize(stream));
        if (life.count % 100 == 50) {
            CUDA(cudaDeviceGraphMemTrim(0));
        }
        step(life, values, expected, 18);
    } while (life.tick());
    return life.close();
}

// Graphs inside a graph, with a host function between them.
static void count_up(void *number) { ++*(long *)number; }

static int child(Life &life, cudaStream_t stream) {
    uint32_t *values = numbers(), expected = 5;
    long called = 0, launched = 0;
    cudaGraph_t inner = capture(stream, values, 4), graph;
    CUDA(cudaGraphCreate(&graph, 0));
    cudaGraphNode_t first, host, second;
    cudaHostNodeParams function = {};
    function.fn = count_up;
    function.userData = &called;
    CUDA(cudaGraphAddChildGraphNode(&first, graph, nullptr, 0, inner));
    CUDA(cudaGraphAddHostNode(&host, graph, &first, 1, &function));
    CUDA(cudaGraphAddChildGraphNode(&second, graph, &host, 1, inner));
    cudaGraphExec_t instance;
    instantiate(&instance, graph);
    life.ready();
    do {
        CUDA(cudaGraphLaunch(instance, stream));
        CUDA(cudaGraphLaunch(instance, stream));
        CUDA(cudaStreamSynchronize(stream));
        launched += 2;
        life.check(called == launched, "the host function was not called once a launch");
        step(life, values, expected, 16);
    } while (life.tick());
    return life.close();
}

#if CUDART_VERSION >= 12040
__global__ void count_down(uint32_t *left, cudaGraphConditionalHandle handle) {
    *left -= 1;
    cudaGraphSetConditional(handle, *left > 0);
}

__global__ void start_count(uint32_t *left, uint32_t rounds, cudaGraphConditionalHandle handle) {
    *left = rounds;
    cudaGraphSetConditional(handle, 1);
}

// A while loop inside the graph: five rounds of its body in each launch.
static int conditional(Life &life, cudaStream_t stream) {
    uint32_t *values = numbers(), expected = 5, *left, rounds = 5;
    int count = COUNT;
    CUDA(cudaMalloc(&left, sizeof *left));
    cudaGraph_t graph;
    CUDA(cudaGraphCreate(&graph, 0));
    cudaGraphConditionalHandle handle;
    CUDA(cudaGraphConditionalHandleCreate(&handle, graph, 0, 0));
    cudaGraphNode_t begin, loop, work, down;
    void *begin_arguments[] = {&left, &rounds, &handle}, *work_arguments[] = {&values, &count},
         *down_arguments[] = {&left, &handle};
    cudaKernelNodeParams kernel = {};
    kernel.func = (void *)start_count;
    kernel.gridDim = kernel.blockDim = dim3(1);
    kernel.kernelParams = begin_arguments;
    CUDA(cudaGraphAddKernelNode(&begin, graph, nullptr, 0, &kernel));
    cudaGraphNodeParams parameters = {cudaGraphNodeTypeConditional};
    parameters.conditional.handle = handle;
    parameters.conditional.type = cudaGraphCondTypeWhile;
    parameters.conditional.size = 1;
#if CUDART_VERSION >= 13000
    CUDA(cudaGraphAddNode(&loop, graph, &begin, nullptr, 1, &parameters));
#else
    CUDA(cudaGraphAddNode(&loop, graph, &begin, 1, &parameters));
#endif
    cudaGraph_t body = parameters.conditional.phGraph_out[0];
    kernel.func = (void *)advance;
    kernel.gridDim = dim3(COUNT / BLOCK);
    kernel.blockDim = dim3(BLOCK);
    kernel.kernelParams = work_arguments;
    CUDA(cudaGraphAddKernelNode(&work, body, nullptr, 0, &kernel));
    kernel.func = (void *)count_down;
    kernel.gridDim = kernel.blockDim = dim3(1);
    kernel.kernelParams = down_arguments;
    CUDA(cudaGraphAddKernelNode(&down, body, &work, 1, &kernel));
    cudaGraphExec_t instance;
    instantiate(&instance, graph);
    life.ready();
    do {
        CUDA(cudaGraphLaunch(instance, stream));
        CUDA(cudaGraphLaunch(instance, stream));
        CUDA(cudaStreamSynchronize(stream));
        step(life, values, expected, 2 * (int)rounds);
    } while (life.tick());
    return life.close();
}
#else
static int conditional(Life &life, cudaStream_t) { life.skip("conditional nodes need CUDA 12.4"); }
#endif

// Instances are made, launched a few times and destroyed while others stay.
static int churn(Life &life, cudaStream_t stream) {
    uint32_t *values = numbers(), expected = 5;
    cudaGraphExec_t kept[4] = {};
    life.ready();
    do {
        cudaGraphExec_t &place = kept[life.count % 4];
        if (place) {
            CUDA(cudaGraphExecDestroy(place));
        }
        cudaGraph_t graph = capture(stream, values, 4);
        instantiate(&place, graph);
        CUDA(cudaGraphDestroy(graph));
        int launches = 0;
        for (cudaGraphExec_t instance : kept) {
            if (instance) {
                CUDA(cudaGraphLaunch(instance, stream));
                launches++;
            }
        }
        CUDA(cudaStreamSynchronize(stream));
        step(life, values, expected, 4 * launches);
    } while (life.tick());
    return life.close();
}

int main(int argc, char **argv) {
    const std::string mode = argc == 3 ? argv[1] : "";
    Life life(argc == 3 ? argv[2] : ".");
    struct {
        const char *name;
        int (*run)(Life &, cudaStream_t);
    } const modes[] = {{"update", update}, {"memory", memory}, {"child", child},
                       {"conditional", conditional}, {"churn", churn}};
    for (const auto &one : modes) {
        if (mode == one.name) {
            cudaStream_t stream;
            CUDA(cudaStreamCreate(&stream));
            return one.run(life, stream);
        }
    }
    fprintf(stderr, "usage: graphs update|memory|child|conditional|churn FOLDER\n");
    return 2;
}
