// Largest error of a function of precise mode in float32, in ulp of the result in float64. Stands
// after the prelude; FUNCTION and EXACT are expressions over the operands a and b.

__device__ unsigned long long mixed(unsigned long long x) {  // SplitMix64 (Steele et al. 2014)
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

struct Operands {
  float a, b;
};

// All bits of a if ``pairs`` is 0. Else pairs whose power has any magnitude: of any base, of one
// near 1, of a negative base with multiples of 1/2, and of any two numbers.
__device__ Operands drawn(unsigned long long i, int pairs) {
  if (!pairs) return {__uint_as_float((unsigned)i), 0.0f};
  const unsigned long long random = mixed(i >> 2);
  const unsigned low = (unsigned)random, high = (unsigned)(random >> 32);
  const double share = high * 2.3283064365386963e-10 - 0.5;
  float a = __uint_as_float(low & 0x7fffffff);
  if ((i & 3) == 1) a = 1.0f + (float)ldexp(low * 2.3283064365386963e-10 - 0.5, -(int)(high % 24));
  if ((i & 3) == 2) {
    a = -__uint_as_float(low & 0x01ffffff | 0x3f000000);
    return {a, 0.5f * (int)(high % 400) - 100.0f};
  }
  if ((i & 3) == 3) return {__uint_as_float(low), __uint_as_float(high)};
  return {a, (float)(310.0 * share / log2((double)a))};
}

__device__ double ulps(float got, double exact) {
  const double largest = 3.402823669209385e38;  // 2^128, which infinities count as
  const double size = fmin(fabs(exact), largest / 2);
  const double ulp = ldexp(1.0, size < 1.1754943508222875e-38 ? -149 : ilogb(size) - 23);
  const double bounded = fmax(fmin(exact, largest), -largest);
  return fabs(fmax(fmin((double)got, largest), -largest) - bounded) / ulp;
}

extern "C" __global__ void errors(unsigned long long count, int pairs, unsigned long long* worst,
                                  unsigned long long* wrong) {
  unsigned long long most = 0, bad = 0;
  for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x; i < count;
       i += (unsigned long long)gridDim.x * blockDim.x) {
    const Operands operands = drawn(i, pairs);
    const float a = operands.a, b = operands.b;
    const float got = FUNCTION;
    const double exact = EXACT;
    if (isnan(got) || isnan(exact)) {
      bad += isnan(got) != isnan(exact);
    } else {
      bad += signbit(got) != signbit(exact);
      most = max(most, (unsigned long long)__double_as_longlong(ulps(got, exact)));
    }
  }
  atomicMax(worst, most);
  atomicAdd(wrong, bad);
}
