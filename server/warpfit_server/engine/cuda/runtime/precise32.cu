// Elementary functions of precise mode in float32. They have no branches and no calls, unlike those
// of CUDA's library: special operands cost no more than others, and the assembler can interleave
// neighbouring operators. Subnormals, signed zeros, infinities and NaN give what IEEE 754 and C99
// say. Polynomials are minimax (Remez). translation.py states the error bounds.

#define SMALLEST_NORMAL 1.17549435e-38f
#define INFINITY_32 __int_as_float(0x7f800000)
#define NAN_32 __int_as_float(0x7fffffff)

__device__ __forceinline__ float near_reciprocal(float a) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
}

__device__ __forceinline__ float near_reciprocal_root(float a) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
}

// Both operands are scaled so that the reciprocal and the remainder are normal; where a scaled
// operand overflows, the quotient overflows or is 0. One correction by the exact remainder follows
// (Markstein 1990). The first quotient is rounded towards zero, because one next to the largest
// number could become infinite. If the result is then 0 or NaN, an operand was 0, infinite or NaN,
// and the approximate reciprocal gives the quotient with the right sign.
__device__ __forceinline__ float quotient(float a, float b) {
  float scale = fminf(fabsf(a), fabsf(b)) < 1.05879118e-22f ? 2.81474977e14f : 0.25f;
  a *= scale;
  b *= scale;
  float near = near_reciprocal(b);
  float first = __fmul_rz(a, near);
  float second = __fmaf_rn(__fmaf_rn(-b, first, a), near, first);
  return fabsf(second) > 0.0f ? second : a * near;
}

// The first estimate is finite only for normal positive numbers. For 0, infinity, NaN, negative and
// subnormal numbers, the approximate root is used.
__device__ __forceinline__ float root(float a) {
  float near = near_reciprocal_root(a);
  float first = a * near;
  float second = __fmaf_rn(__fmaf_rn(-first, first, a), 0.5f * near, first);
  return first < INFINITY_32 ? second : fast_sqrt(a * 1.84467441e19f) * 2.32830644e-10f;
}

// As NumPy does it in float64, where the product of two float32 numbers is exact.
__device__ __forceinline__ float product_sum(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}

__device__ __forceinline__ float exponential(float a) { return expf(a); }

// a = 2^exponent * significand; the significand is between ``bound``, given by its bits, and twice
// that.
struct Parts {
  float exponent;  // times 2^23
  float significand;
};

// ``shift``, times 2^23 too, is added to the exponent.
__device__ __forceinline__ Parts parts_of(float a, int bound, int shift) {
  int whole = (__float_as_int(a) - bound) & 0xff800000;
  return {(float)(whole + shift), __int_as_float(__float_as_int(a) - whole)};
}

// ln(1 + f) = f + f^2 P(f) for f in [-1/3, 1/3]. For 0, subnormals, infinities, NaN and negative
// numbers, the approximate logarithm is used.
__device__ __forceinline__ float logarithm(float a) {
  Parts x = parts_of(a, 0x3f2aaaab, 0);
  float f = x.significand - 1.0f;
  float p = __fmaf_rn(0.140262787f, f, -0.153885252f);
  p = __fmaf_rn(p, f, 0.139958244f);
  p = __fmaf_rn(p, f, -0.164159645f);
  p = __fmaf_rn(p, f, 0.200111676f);
  p = __fmaf_rn(p, f, -0.250078186f);
  p = __fmaf_rn(p, f, 0.333331982f);
  p = __fmaf_rn(p, f, -0.499999361f);
  float normal = __fmaf_rn(x.exponent, 8.26295829e-8f, __fmaf_rn(p, f * f, f));
  float other = __fmaf_rn(fast_log2(a * 16777216.0f), 0.693147182f, -16.6355324f);
  return (a >= SMALLEST_NORMAL) & (a < INFINITY_32) ? normal : other;
}

// The exponent is clamped to where the power of two is normal; the rest stays in the remainder,
// whose exponential then overflows or underflows as it should.
struct Power2 {
  float exponent;
  float value;
};

// For t times 2^23.
__device__ __forceinline__ Power2 power_near(float t) {
  float share = __saturatef(__fmaf_rn(t, 4.73063968e-10f, 0.5f));
  float shifted = __fmaf_rn(share, 252.0f, 12582913.0f);
  return {shifted - 12583039.0f, __int_as_float(__float_as_int(shifted) << 23)};
}

// log2 |a| as high + low, accurate to 2^-31: with s = f / (2 + f), log2(1 + f) is 2 / ln 2 times s
// + s^3 / 3 + s^5 / 5 + ..., and the remainder of the division corrects the rounding of s. Part of
// the terms after s is moved to the factor of s, which halves the rest and its rounding errors.
// Logarithms are kept times 2^23, as the bits of ``a`` give the exponent.
__device__ __forceinline__ float power(float a, float b) {
  const float unit = 1.1920929e-7f;
  const float scale = 2.89959002f / unit, scale_rest = -0.014199934f / unit;
  int bits = __float_as_int(a);
  float magnitude = fabsf(a);
  float scaling = magnitude < SMALLEST_NORMAL ? 16777216.0f : 1.0f;
  float scaled = magnitude * scaling;
  Parts x = parts_of(scaled, 0x3f3504f3, 0x3f800000 - __float_as_int(scaling));
  float f = x.significand - 1.0f;
  float reciprocal = near_reciprocal(x.significand + 1.0f);
  float s = f * reciprocal;
  float rest = __fmaf_rn(-s, f, __fmaf_rn(-2.0f, s, f)) * reciprocal;
  float square = s * s;
  float p = __fmaf_rn(0.34022754f / unit, square, 0.41170588f / unit);
  p = __fmaf_rn(p, square, 0.577082872f / unit);
  p = __fmaf_rn(p, square, 0.961796701f / unit);
  p = __fmaf_rn(p, square, scale_rest);

  bool whole = rintf(b) == b;
  float exponent = (a < 0.0f) & !whole ? NAN_32 : x.exponent;
  exponent = (scaled > 0.0f) & (scaled < INFINITY_32) ? exponent : fast_log2(scaled);
  float high = __fmaf_rn(s, scale, exponent);
  float low = __fmaf_rn(s, scale, exponent - high);
  low = __fmaf_rn(s, p, __fmaf_rn(rest, __fmaf_rn(3.0f, p, 2.92798996f / unit), low));

  float t = b * high;
  float small = __fmaf_rn(b, low, __fmaf_rn(b, high, -t));
  Power2 power = power_near(t);
  float remainder = __fmaf_rn(t, unit, -power.exponent);
  // ``small`` is NaN where t is infinite.
  remainder = fabsf(t) < 8.79609302e12f ? __fmaf_rn(small, unit, remainder) : remainder;
  float r = fast_exp2(remainder) * power.value;
  r = (b == 0.0f) | (high == 0.0f) ? 1.0f : r;
  // A conversion that overflows downwards ends at an even number, and all numbers there are even.
  int sign = (int)-fabsf(b) << 31;
  return __int_as_float(__float_as_int(r) ^ ((whole ? bits : 0) & sign));
}
