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
#define ALL_LEVELS 62  // to the root of any tree

// What a sum is to the host: all NaNs are one, because which of two an addition keeps, with its sign,
// is up to the instruction.
__device__ __forceinline__ double one_nan(double sum) {
  return sum == sum ? sum : __longlong_as_double(0x7ff8000000000000);
}

// Number of the nodes so many levels above some neighbouring ones, of which the first has a number.
__device__ __forceinline__ long long parent_count(long long first, long long nodes, int levels) {
  return ((first + nodes - 1) >> levels) - (first >> levels) + 1;
}

// Place of the n-th of these nodes among the others: that of the first one that it is made of.
__device__ __forceinline__ long long parent_place(long long first, long long n, int levels) {
  return max(((first >> levels) + n) << levels, first) - first;
}

// Adds up the sums of neighbouring nodes of one level to those of the nodes so many levels above,
// as the tree says. All threads of a block call this. `first` is the number of the first node on
// its level; a node has `count` sums, and the next one lies `pitch` behind it. The sums of a parent
// are where parent_place says.
__device__ void sum_nodes(double* sums, long long first, long long nodes, unsigned count,
                          long long pitch, int levels) {
  const long long last = first + nodes - 1;
  for (int level = 0; level < levels && first >> level != last >> level; level += FAN_LEVELS) {
    const int up = min(FAN_LEVELS, levels - level);
    const long long lowest = first >> (level + up);
    const long long work = ((last >> (level + up)) - lowest + 1) * count;
    for (unsigned item = threadIdx.x; item < work; item += blockDim.x) {
      const unsigned number = item / count, k = item - number * count;
      const long long child = (lowest + number) << up;
      double v[FAN];
#pragma unroll
      for (int c = 0; c < FAN; ++c) {
        const long long place = max((child + c) << level, first);
        const bool is_there = c >> up == 0 && child + c >= first >> level &&
                              child + c <= last >> level;
        v[c] = is_there ? sums[(place - first) * pitch + k] : 0.0;
      }
#pragma unroll
      for (int step = 1; step < FAN; step *= 2) {
#pragma unroll
        for (int c = 0; c < FAN; c += 2 * step) v[c] += v[c + step];
      }
      sums[(max(child << level, first) - first) * pitch + k] = v[0];
    }
    __syncthreads();
  }
}
