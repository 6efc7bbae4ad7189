// Sums over rows on a device: over the lanes of a warp, and then in the tree of engine/sum_tree.py.

#define FULL 0xffffffffu

__device__ __forceinline__ double warp_sum(double sum) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(FULL, sum, step);
  return sum;
}

// Sums N values over the warp, each as warp_sum does; lane i * 32 / N then holds sum i.
template <int N>
__device__ __forceinline__ double warp_sums(double (&v)[N], int lane) {
  int step = 16;
#pragma unroll
  for (int half = N / 2; half > 0; half /= 2, step /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const bool upper = lane & step;
      const double sent = upper ? v[i] : v[i + half];
      const double kept = upper ? v[i + half] : v[i];
      v[i] = kept + __shfl_xor_sync(FULL, sent, step);
    }
  }
  double sum = v[0];
#pragma unroll
  for (int rest = 16 / N; rest > 0; rest /= 2) sum += __shfl_xor_sync(FULL, sum, rest);
  return sum;
}

// Sums the values of N neighbouring groups of rows over the warp and adds up the sums of groups as
// the tree of sums says, so that the result does not depend on how many groups a warp works on.
template <int N>
__device__ __forceinline__ double group_sum(double (&groups)[N], int lane) {
  double sum = warp_sums<N>(groups, lane);
#pragma unroll
  for (int step = 32 / N; step < 32; step *= 2) sum += __shfl_xor_sync(FULL, sum, step);
  return sum;
}

#define FAN 16  // nodes that a thread adds at a time: FAN_LEVELS levels of the tree
#define FAN_LEVELS 4

// Adds up the sums of neighbouring nodes of one level, [nodes, count], as the tree says; row 0
// receives the total. All threads of a block call this. `first` is the number of the first node on
// its level. A node stays where the first of the nodes that it is made of was.
__device__ void sum_nodes(double* sums, long long first, long long nodes, unsigned count) {
  const long long last = first + nodes - 1;
  for (int level = 0; first >> level != last >> level; level += FAN_LEVELS) {
    const long long lowest = first >> (level + FAN_LEVELS);
    const long long work = ((last >> (level + FAN_LEVELS)) - lowest + 1) * count;
    for (unsigned item = threadIdx.x; item < work; item += blockDim.x) {
      const unsigned number = item / count, k = item - number * count;
      const long long child = (lowest + number) * FAN;
      double v[FAN];
#pragma unroll
      for (int c = 0; c < FAN; ++c) {
        const long long place = max((child + c) << level, first);
        const bool is_there = child + c >= first >> level && child + c <= last >> level;
        v[c] = is_there ? sums[(place - first) * count + k] : 0.0;
      }
#pragma unroll
      for (int step = 1; step < FAN; step *= 2) {
#pragma unroll
        for (int c = 0; c < FAN; c += 2 * step) v[c] += v[c + step];
      }
      sums[(max(child << level, first) - first) * count + k] = v[0];
    }
    __syncthreads();
  }
}
