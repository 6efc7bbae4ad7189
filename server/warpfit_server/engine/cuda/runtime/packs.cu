// Functions that the interpreters share. A warp works on a tile of 32 * ROWS rows, in groups of 32
// packs; a thread reads a pack, 16 bytes of neighbouring rows, at once.

#define LANES (16 / (int)sizeof(real))
#define GROUPS (ROWS / LANES)
#define TILE (32 * ROWS)
#define GROUP_BYTES (32 * 16)
#define LEVEL_BYTES (TILE * REAL_BYTES)

struct alignas(16) Pack {
  real lane[LANES];
};

// Addresses in shared memory are 32-bit offsets, which take half the registers of pointers.
#if REAL_BYTES == 4
__device__ __forceinline__ Pack load(const void* place) {
  const float4 v = __ldg((const float4*)place);
  return {{v.x, v.y, v.z, v.w}};
}
__device__ __forceinline__ Pack load_shared(unsigned place) {
  Pack v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.lane[0]), "=f"(v.lane[1]), "=f"(v.lane[2]), "=f"(v.lane[3]) : "r"(place));
  return v;
}
__device__ __forceinline__ void store_shared(unsigned place, const real* v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
               :: "r"(place), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]));
}
#else
__device__ __forceinline__ Pack load(const void* place) {
  const double2 v = __ldg((const double2*)place);
  return {{v.x, v.y}};
}
__device__ __forceinline__ Pack load_shared(unsigned place) {
  Pack v;
  asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];"
               : "=d"(v.lane[0]), "=d"(v.lane[1]) : "r"(place));
  return v;
}
__device__ __forceinline__ void store_shared(unsigned place, const real* v) {
  asm volatile("st.shared.v2.f64 [%0], {%1, %2};" :: "r"(place), "d"(v[0]), "d"(v[1]));
}
#endif

#define FOR_EACH_ROW(STATEMENT) \
  _Pragma("unroll") for (int i = 0; i < ROWS; ++i) { STATEMENT; }

// STATEMENT uses row i of this thread, and u, the same row of an operand of which PACK is group g.
#define FOR_EACH_ROW_OF(PACK, STATEMENT)                \
  _Pragma("unroll") for (int g = 0; g < GROUPS; ++g) {  \
    const Pack pack = PACK;                             \
    _Pragma("unroll") for (int j = 0; j < LANES; ++j) { \
      const int i = g * LANES + j;                      \
      const real u = pack.lane[j];                      \
      STATEMENT;                                        \
    }                                                   \
  }

// Value minus target, for the built-in losses: in float64, but in fast mode rounded to float32
// once, a relative error of 2^-24.
__device__ __forceinline__ double difference(real f, real y) {
#if FAST
  return (double)(f - y);
#else
  return (double)f - (double)y;
#endif
}
