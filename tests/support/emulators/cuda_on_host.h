// CUDA's words for a host compiler: a block's threads are threads, blocks run one after the other.

#include <math.h>
#include <pthread.h>
#include <string.h>

#define __device__
#define __global__
#define __shared__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(threads)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct uint2 {
  unsigned x, y;
};
struct __align__(16) uint4 {
  unsigned x, y, z, w;
};
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct Index {
  unsigned x, y;
};
static thread_local Index threadIdx, blockIdx;
static Index blockDim;
static pthread_barrier_t all_threads;

static void __syncthreads() { pthread_barrier_wait(&all_threads); }
static unsigned atomicAdd(unsigned* place, unsigned number) {
  return __atomic_fetch_add(place, number, __ATOMIC_RELAXED);
}
static unsigned atomicSub(unsigned* place, unsigned number) {
  return __atomic_fetch_sub(place, number, __ATOMIC_RELAXED);
}
static unsigned atomicMin(unsigned* place, unsigned number) {
  unsigned old = __atomic_load_n(place, __ATOMIC_RELAXED);
  while (old > number && !__atomic_compare_exchange_n(place, &old, number, false, __ATOMIC_RELAXED,
                                                      __ATOMIC_RELAXED)) {
  }
  return old;
}

static double exchanged[64];
// All threads of the block, whose number is a multiple of a warp's, must take part.
static double __shfl_xor_sync(unsigned, double value, int step) {
  exchanged[threadIdx.x] = value;
  __syncthreads();
  const double other = exchanged[threadIdx.x ^ step];
  __syncthreads();
  return other;
}
static double __longlong_as_double(long long bits) {
  double number;
  memcpy(&number, &bits, sizeof number);
  return number;
}
static long long max(long long a, long long b) { return a > b ? a : b; }
static long long min(long long a, long long b) { return a < b ? a : b; }

template <typename Arguments>
struct HostLaunch {
  void (*kernel)(Arguments);
  const Arguments* arguments;
  unsigned blocks;
};

template <typename Arguments>
struct HostThread {
  const HostLaunch<Arguments>* launch;
  unsigned number;
};

template <typename Arguments>
static void* run_thread(void* given) {
  const HostThread<Arguments>& thread = *(const HostThread<Arguments>*)given;
  threadIdx.x = thread.number;
  for (blockIdx.x = 0; blockIdx.x < thread.launch->blocks; ++blockIdx.x) {
    thread.launch->kernel(*thread.launch->arguments);
    __syncthreads();
  }
  return nullptr;
}

#define MOST_THREADS 64

template <typename Arguments>
static int launch_on_host(void (*kernel)(Arguments), const Arguments* arguments, unsigned blocks,
                          unsigned threads) {
  const HostLaunch<Arguments> launch = {kernel, arguments, blocks};
  pthread_t handles[MOST_THREADS];
  HostThread<Arguments> given[MOST_THREADS];
  if (threads > MOST_THREADS) return 1;
  blockDim.x = threads;
  pthread_barrier_init(&all_threads, nullptr, threads);
  for (unsigned number = 0; number < threads; ++number) {
    given[number] = {&launch, number};
    if (pthread_create(&handles[number], nullptr, run_thread<Arguments>, &given[number])) return 2;
  }
  for (unsigned number = 0; number < threads; ++number) pthread_join(handles[number], nullptr);
  pthread_barrier_destroy(&all_threads);
  return 0;
}
