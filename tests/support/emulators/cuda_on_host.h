// CUDA's words for a host compiler. The threads of a block are fibers of one thread, which take turns
// wherever they wait for each other; blocks run one after the other. cuda_on_host.py translates what
// a macro cannot: PTX, and memory that the threads of a block share.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

using std::abs;
using std::isfinite;
using std::isinf;

#define __device__
#define __global__
#define __shared__ static
#define __constant__ static
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __CUDA_ARCH__ 900

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct Index {
  unsigned x, y, z;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

// ---------------------------------------------------------------------------------- arithmetic

template <typename To, typename From>
static To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
static double __longlong_as_double(long long bits) { return bits_as<double>(bits); }
static long long __double_as_longlong(double number) { return bits_as<long long>(number); }
static int __float_as_int(float number) { return bits_as<int>(number); }
static float __int_as_float(int bits) { return bits_as<float>(bits); }
static int __double2hiint(double number) { return (int)(bits_as<long long>(number) >> 32); }
static int __double2loint(double number) { return (int)bits_as<long long>(number); }
static double __hiloint2double(int high, int low) {
  return bits_as<double>(((long long)high << 32) | (unsigned)low);
}
static double __dadd_rn(double a, double b) { return a + b; }
static double __dmul_rn(double a, double b) { return a * b; }
static double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static float __fdiv_rn(float a, float b) { return a / b; }
static double __ddiv_rn(double a, double b) { return a / b; }
static float __fdividef(float a, float b) { return a / b; }
static float __saturatef(float a) { return a >= 0.0f ? (a > 1.0f ? 1.0f : a) : 0.0f; }
static float __fmul_rz(float a, float b) {
  const float p = a * b;
  return fabs((double)p) > fabs((double)a * b) ? nextafterf(p, 0) : p;
}
static double __dmul_rz(double a, double b) {
  const double p = a * b;
  return isfinite(p) && fma(a, b, -p) * (p < 0 ? -1 : 1) < 0 ? nextafter(p, 0) :
      isinf(p) && isfinite(a) && isfinite(b) ? copysign(1.79769313486231571e308, p) : p;
}
static float rsqrtf(float a) { return 1.0f / sqrtf(a); }
static float rsqrt(float a) { return rsqrtf(a); }
static double rsqrt(double a) { return 1.0 / sqrt(a); }

// Approximate instructions are off by as much as the hardware may be: those of float32 by 1 ulp,
// those of float64 are right to 20 bits; they take and return no subnormal numbers.
static float flushed(float a) { return fabsf(a) < 1.17549435e-38f ? copysignf(0, a) : a; }
static double flushed(double a) { return fabs(a) < 2.2250738585072014e-308 ? copysign(0, a) : a; }
static float approx(long double (*function)(long double), float a) {
  a = flushed(a);
  const float exact = function(a);
  int exponent;
  const bool hits = frexpf(a, &exponent) == 0.5f || rintf(a) == a || !isfinite(exact);
  return flushed(hits ? exact : nextafterf(exact, __float_as_int(a) & 1 ? INFINITY : 0));
}
static double approx(long double (*function)(long double), double a) {
  const double exact = function(flushed(a));
  return flushed(bits_as<double>(bits_as<long long>(exact) >> 32 << 32));
}
static long double host_rcp(long double a) { return 1 / a; }
static long double host_rsqrt(long double a) { return 1 / sqrtl(a); }
static long double host_sqrt(long double a) { return sqrtl(a); }
static long double host_lg2(long double a) { return log2l(a); }
static long double host_ex2(long double a) { return exp2l(a); }
static long double host_tanh(long double a) { return tanhl(a); }

#define __cosf(a) cosf(a)
#define __sinf(a) sinf(a)
#define __tanf(a) tanf(a)
#define __expf(a) expf(a)
#define __logf(a) logf(a)
#define __log2f(a) log2f(a)
#define __log10f(a) log10f(a)

template <typename A, typename B>
static auto max(A a, B b) -> decltype(a + b) {
  const decltype(a + b) one = a, other = b;
  return one > other ? one : other;
}
template <typename A, typename B>
static auto min(A a, B b) -> decltype(a + b) {
  const decltype(a + b) one = a, other = b;
  return one < other ? one : other;
}

// ------------------------------------------------------------------------------- memory

static unsigned char* dynamic_shared;

template <typename T>
static T __ldg(const T* place) {
  return *place;
}
static size_t __cvta_generic_to_shared(const void* place) {
  return (const unsigned char*)place - dynamic_shared;
}
static void* __cvta_shared_to_generic(size_t place) {
  return dynamic_shared + place;
}
template <typename T, typename N>
static T atomicAdd(T* place, N number) {
  const T old = *place;
  *place = old + number;
  return old;
}
template <typename T, typename N>
static T atomicSub(T* place, N number) {
  const T old = *place;
  *place = old - number;
  return old;
}
template <typename T, typename N>
static T atomicMax(T* place, N number) {
  const T old = *place;
  *place = old > number ? old : number;
  return old;
}
template <typename T, typename N>
static T atomicMin(T* place, N number) {
  const T old = *place;
  *place = old < number ? old : number;
  return old;
}

static int __clzll(long long bits) { return bits ? __builtin_clzll(bits) : 64; }
// A clock that goes on by one each time somebody looks at it.
static long long clock64() {
  static long long ticks;
  return ++ticks;
}

// -------------------------------------------------------------------------------- threads

#define MOST_THREADS 1024
#define STACK_BYTES (256 << 10)
#define SHARED_BYTES (227 << 10)
// Behind the shared memory of a block, which writes nothing there.
#define GUARD_BYTES 4096
#define LANES_OF_WARP 32

struct Fiber {
  ucontext_t context;
  Index place;
  bool lives;
};
// Those that wait for each other: all threads of a block, or of a warp.
struct Group {
  int members, arrived;
  long generation;
};
static Fiber* fibers;
static ucontext_t scheduler;
static int current;
static Group block, warps[MOST_THREADS / LANES_OF_WARP];
static uint64_t exchanged[MOST_THREADS];
static void (*kernel_entry)(void**);
static void** kernel_arguments;

static void open_if_all_are_there(Group& group) {
  if (group.arrived < group.members) return;
  group.arrived = 0;
  ++group.generation;
}
static void wait_for_all(Group& group) {
  const long seen = group.generation;
  ++group.arrived;
  open_if_all_are_there(group);
  while (group.generation == seen) swapcontext(&fibers[current].context, &scheduler);
}
static void leave(Group& group) {
  --group.members;
  if (group.members) open_if_all_are_there(group);
}
static Group& own_warp() { return warps[current / LANES_OF_WARP]; }

static void __syncthreads() { wait_for_all(block); }
static void __syncwarp() { wait_for_all(own_warp()); }

template <typename T>
static T __shfl_sync(unsigned, T value, int lane) {
  memcpy(&exchanged[current], &value, sizeof value);
  wait_for_all(own_warp());
  memcpy(&value, &exchanged[current / LANES_OF_WARP * LANES_OF_WARP + lane], sizeof value);
  wait_for_all(own_warp());
  return value;
}
template <typename T>
static T __shfl_xor_sync(unsigned mask, T value, int step) {
  return __shfl_sync(mask, value, (current % LANES_OF_WARP) ^ step);
}

static void run_thread() {
  kernel_entry(kernel_arguments);
  fibers[current].lives = false;
  leave(block);
  leave(own_warp());
  swapcontext(&fibers[current].context, &scheduler);
}

static void run_block(unsigned char* stacks, int threads) {
  block = {threads, 0, 0};
  for (int first = 0; first < threads; first += LANES_OF_WARP)
    warps[first / LANES_OF_WARP] = {min(LANES_OF_WARP, threads - first), 0, 0};
  for (int number = 0; number < threads; ++number) {
    Fiber& fiber = fibers[number];
    const unsigned row = number / blockDim.x;
    fiber.place = {number % blockDim.x, row % blockDim.y, row / blockDim.y};
    fiber.lives = true;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks + (size_t)number * STACK_BYTES;
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_thread, 0);
  }
  while (block.members)
    for (current = 0; current < threads; ++current) {
      if (!fibers[current].lives) continue;
      threadIdx = fibers[current].place;
      swapcontext(&scheduler, &fibers[current].context);
    }
}

// Returns 1 for what no device would launch, and for a block that writes behind its shared memory.
// `arguments` are as for cuLaunchKernel.
extern "C" int launch_kernel(void (*entry)(void**), const unsigned* grid, const unsigned* threads,
                             unsigned shared, void** arguments) {
  static unsigned char* stacks;
  if (!stacks) {
    stacks = (unsigned char*)malloc((size_t)MOST_THREADS * STACK_BYTES);
    fibers = (Fiber*)calloc(MOST_THREADS, sizeof(Fiber));
    dynamic_shared = (unsigned char*)aligned_alloc(256, (1 << 20) + GUARD_BYTES);
  }
  const unsigned count = threads[0] * threads[1] * threads[2];
  if (!count || count > MOST_THREADS || shared > SHARED_BYTES) return 1;
  if (!grid[0] || !grid[1] || !grid[2] || grid[1] > 65535 || grid[2] > 65535) return 1;
  kernel_entry = entry;
  kernel_arguments = arguments;
  blockDim = {threads[0], threads[1], threads[2]};
  gridDim = {grid[0], grid[1], grid[2]};
  for (unsigned z = 0; z < grid[2]; ++z)
    for (unsigned y = 0; y < grid[1]; ++y)
      for (unsigned x = 0; x < grid[0]; ++x) {
        blockIdx = {x, y, z};
        memset(dynamic_shared, 0xA5, shared + GUARD_BYTES);
        run_block(stacks, count);
        for (unsigned k = 0; k < GUARD_BYTES; ++k)
          if (dynamic_shared[shared + k] != 0xA5) return 1;
      }
  return 0;
}
