// Elementary functions of precise mode in float64. Coefficients and logarithms are in memory,
// because operands from the constant bank cost half of what literals do. translation.py fills in the
// table.

#define INFINITY_64 __hiloint2double(0x7ff00000, 0)
#define NEGATIVE_INFINITY_64 __hiloint2double(0xfff00000, 0)
#define NAN_64 __hiloint2double(0x7ff80000, 0)
// Adding it rounds to a whole number, which the low word then holds.
#define ROUNDER 6755399441055744.0
#define FIRST_LOGARITHM @FIRST_LOGARITHM@

// (e^r - 1 - r) / r^2 for |r| <= ln 2 / 2, from the highest power down.
__constant__ double wf_exponential[10] = {
  2.5000067962532203e-08, 2.763024885035763e-07, 2.755758633836708e-06, 2.4801493097355382e-05,
  1.9841269506639162e-04, 1.3888888943631914e-03, 8.333333333494421e-03, 4.166666666653015e-02,
  0.16666666666666413, 0.5000000000000011,
};
// (ln(1 + z) - z + z^2 / 2) / z^3 for |z| <= 2^-7, for the logarithm and for the power.
__constant__ double wf_logarithm[5] = {
  0.14287171443591695, -0.16667848404532887, 0.1999999994239302, -0.2499999997404814,
  0.3333333333333396,
};
__constant__ double wf_power[6] = {
  -0.1250148127179617, 0.14287068965809469, -0.16666666596410917, 0.19999999950176142,
  -0.2500000000000105, 0.33333333333333853,
};
// 1 / ln 2; -ln 2 in two parts for the exponential; and ln 2 in two for the logarithm, the first of
// them with 42 binary places, so that the sum of a multiple and a tabulated logarithm is exact.
__constant__ double wf_natural[5] = {
  1.4426950408889634, -0.6931471805599453, -2.3190468138462996e-17, @LN2@,
};
// -ln c rounded to 42 places, and the remainder, for c in steps of 2^-6 (above 1) and 2^-7 (below).
__device__ const double wf_logarithms[2][@COUNT@] = {{@HIGH@}, {@LOW@}};

__device__ __forceinline__ double near_reciprocal(double a) {
  double r;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(r) : "d"(a));
  return r;
}

__device__ __forceinline__ double near_reciprocal_root(double a) {
  double r;
  asm("rsqrt.approx.ftz.f64 %0, %1;" : "=d"(r) : "d"(a));
  return r;
}

// High words compare like floats, except those of numbers above 2^1017, which are NaN.
__device__ __forceinline__ float high_word(double a) {
  return __int_as_float(__double2hiint(a));
}

__device__ __forceinline__ double with_high_word(double a, int high) {
  return __hiloint2double(high, __double2loint(a));
}

__device__ __forceinline__ double quotient(double a, double b) {
  float size = fabsf(high_word(b));
  float least = fminf(fabsf(high_word(a)), size);
  int scale = least < 1.41059322e-36f ? 0x47f00000 : 0x3ff00000;  // 2^128: one below 2^-960
  scale = size < INFINITY_32 ? scale : 0x3ef00000;                // 2^-16: divisor above 2^1017
  a *= __hiloint2double(scale, 0);
  b *= __hiloint2double(scale, 0);
  double near = near_reciprocal(b);
  double error = __fma_rn(-b, near, 1.0);
  double reciprocal = __fma_rn(near, __fma_rn(error, error, error), near);
  double first = __dmul_rz(a, reciprocal);
  double second = __fma_rn(__fma_rn(-b, first, a), reciprocal, first);
  return fabs(second) > 0.0 ? second : a * near;
}

__device__ __forceinline__ double root(double a) {
  bool small = high_word(a) < 6.11110e-37f;  // a < 2^-970
  double x = small ? a * 1.157920892373162e77 : a;
  double near = near_reciprocal_root(x);
  double error = __fma_rn(x, -(near * near), 1.0);
  double reciprocal = __fma_rn(__fma_rn(error, 0.375, 0.5), near * error, near);
  double half = with_high_word(reciprocal, __double2hiint(reciprocal) - 0x100000);
  double first = x * reciprocal;
  double second = __fma_rn(__fma_rn(-first, first, x), half, first);
  second = small ? second * 2.938735877055719e-39 : second;
  return (high_word(x) == 0.0f) | (__double2hiint(a) == 0x7ff00000) ? a : second;
}

__device__ __forceinline__ double product_sum(double a, double b, double c) {
  return __dadd_rn(__dmul_rn(a, b), c);
}

// x = exponent * ln 2 + rest, the rest in [-ln 2 / 2, ln 2 / 2].
struct Reduced {
  int exponent;
  double rest;
};

__device__ __forceinline__ Reduced reduced(double x) {
  double shifted = __fma_rn(x, wf_natural[0], ROUNDER);
  double exponent = shifted - ROUNDER;
  double rest = __fma_rn(exponent, wf_natural[1], x);
  return {__double2loint(shifted), __fma_rn(exponent, wf_natural[2], rest)};
}

__device__ __forceinline__ double power_of_two(int exponent) {
  return __hiloint2double((exponent << 20) + 0x3ff00000, 0);
}

// The power of two is multiplied in two steps, so that the result may be subnormal or overflow.
__device__ __forceinline__ double exponential_of(Reduced x) {
  double p = wf_exponential[0];
#pragma unroll
  for (int i = 1; i < 10; ++i) p = __fma_rn(p, x.rest, wf_exponential[i]);
  p = __fma_rn(__fma_rn(p, x.rest, 1.0), x.rest, 1.0);
  int half = x.exponent >> 1;
  return p * power_of_two(half) * power_of_two(x.exponent - half);
}

// If ``large``, where the result is 0 or infinite anyway, a number in [746, 747] with a's sign.
__device__ __forceinline__ double bounded(double a, bool large) {
  int high = __double2hiint(a);
  return with_high_word(a, large ? (high & 0x80000000) | 0x40875000 : high);
}

__device__ __forceinline__ double exponential(double a) {
  return exponential_of(reduced(bounded(a, fabs(a) >= 746.0)));
}

// a = 2^exponent * significand; with c a short number near 1 / significand, z = significand * c - 1
// is exact, and the logarithm of a is that of 2^exponent / c, high + low, plus that of 1 + z.
struct Parts64 {
  double scaled;
  double z;
  double high;
  double low;
};

__device__ __forceinline__ Parts64 parts_of(double a) {
  bool subnormal = __double2hiint(a) < 0x00100000;
  double scaled = subnormal ? a * 18014398509481984.0 : a;
  int bits = __double2hiint(scaled) - 0x3fe6a09e;
  double exponent = (double)((bits >> 20) + (subnormal ? -54 : 0));
  double significand =
      with_high_word(scaled, __double2hiint(scaled) - (bits & 0xfff00000));
  int c = (__double2hiint(near_reciprocal(significand)) + 0x2000) & 0xffffc000;
  const double* logarithms = &wf_logarithms[0][(c >> 14) - FIRST_LOGARITHM];
  return {scaled, __fma_rn(significand, __hiloint2double(c, 0), -1.0),
          __fma_rn(exponent, wf_natural[3], logarithms[0]),
          __fma_rn(exponent, wf_natural[4], logarithms[@COUNT@])};
}

__device__ __forceinline__ bool is_positive(double a) {
  return (unsigned)(__double2hiint(a) - 1) < 0x7fefffffu;
}

__device__ __forceinline__ double logarithm(double a) {
  Parts64 x = parts_of(a);
  double p = wf_logarithm[0];
#pragma unroll
  for (int i = 1; i < 5; ++i) p = __fma_rn(p, x.z, wf_logarithm[i]);
  p = __fma_rn(p, x.z, -0.5);
  double r = x.high + (x.z + __fma_rn(x.z * x.z, p, x.low));
  double special = __fma_rn(x.scaled, INFINITY_64, INFINITY_64);
  special = high_word(x.scaled) == 0.0f ? NEGATIVE_INFINITY_64 : special;
  return is_positive(x.scaled) ? r : special;
}

// ln |a| as a sum of two numbers, accurate to 2^-64. The exponential of b times the larger one is
// computed as above; b times the smaller one is added to its remainder.
__device__ __forceinline__ double power(double a, double b) {
  int bits = __double2hiint(a);
  Parts64 x = parts_of(with_high_word(a, bits & 0x7fffffff));
  double square = x.z * x.z;
  double p = wf_power[0];
#pragma unroll
  for (int i = 1; i < 6; ++i) p = __fma_rn(p, x.z, wf_power[i]);
  double sum = x.high + x.z;
  double high = __fma_rn(square, -0.5, sum);
  double low = x.low + ((x.high - sum) + x.z);
  low += __fma_rn(square, -0.5, sum - high);
  low = __fma_rn(__fma_rn(x.z, x.z, -square), -0.5, low);
  low = __fma_rn(x.z * square, p, low);

  bool whole = rint(b) == b;
  bool odd = whole & (rint(0.5 * b) != 0.5 * b);
  high = (bits < 0) & !whole ? NAN_64 : high;
  double limit = high_word(x.scaled) == 0.0f ? NEGATIVE_INFINITY_64 : x.scaled;
  high = is_positive(x.scaled) ? high : limit;

  double t = b * high;
  bool large = fabs(t) >= 746.0;
  Reduced exponent = reduced(bounded(t, large));
  double rest = __fma_rn(b, low, __fma_rn(b, high, -t));
  exponent.rest = large ? exponent.rest : exponent.rest + rest;
  double r = exponential_of(exponent);
  r = (b == 0.0) | (high_word(high) == 0.0f) ? 1.0 : r;
  int sign = odd ? 0x80000000 : 0;
  return with_high_word(r, __double2hiint(r) ^ (bits & sign));
}
