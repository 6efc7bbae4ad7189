// The bytecode interpreter. launches.py completes the text: the types, the prelude and batch.cu
// precede it, and the three names between at signs are replaced by the operators' functions and the
// two switches.
//
// A warp runs a job (a program with one parameter vector) on one tile of 32 * ROWS rows, so every
// branch is uniform and the rows share the decoding. The top of the stack is in registers, the rest
// in shared memory. The warps of a block work on the same tile, whose variables are read from the
// second-level cache once and then hit the first level.

#define WARPS_AT_MOST 8

// Instruction: word 0 holds the case label, flags and the index of a leaf to load first; word 1 the
// index of the second operand. The definitions are those of launches.py.

// Rows of a data set, cut into tiles; launches.py fills in the fields of this and of Jobs.
struct Tiles {
  const real* variables;      // [variables, stride], at the first row of the first tile
  const real* target;         // null: no losses; likewise at the first row of the first tile
  const real* weights;        // null: 1 for every row
  unsigned long long stride;  // bytes between variables
  long long first_tile;       // counted from the data set's first row
  int first_row;              // rows of the first tile to leave out
  int end_row;                // end of the rows, counted from the first row of the first tile
  int count;
  int node_levels;            // levels of the tree of sums above tiles to add up
  int nodes;                  // nodes that have some of the rows at the last of them
  int absolute;               // losses of |f - y| instead of (f - y)^2
};

// Jobs of a launch.
struct Jobs {
  real* values;      // null: no values; [jobs, tiles * TILE]
  double* partials;  // [jobs, tiles]
  int first;
  int count;
  int per_block;
};

@OPERATORS@

// Rows that a costly operator reads from the stack at a time. Precise functions have no branches,
// so those of a pack are interleaved; fast code is smaller with one row at a time.
#if FAST
#define STEP 1
#define STEP_UNROLL "unroll 2"
#define STEP_SYNC __syncwarp();
struct Step {
  real lane[STEP];
};
__device__ __forceinline__ Step load_step(unsigned place) {
  Step v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v.lane[0]) : "r"(place));
  return v;
}
__device__ __forceinline__ void store_step(unsigned place, const Step& v) {
  asm volatile("st.shared.f32 [%0], %1;" :: "r"(place), "f"(v.lane[0]));
}
#else
#define STEP LANES
#define STEP_SYNC
#if REAL_BYTES == 4
#define STEP_UNROLL "unroll 1"
#else
#define STEP_UNROLL "unroll 2"
#endif
typedef Pack Step;
__device__ __forceinline__ Step load_step(unsigned place) { return load_shared(place); }
__device__ __forceinline__ void store_step(unsigned place, const Step& v) {
  store_shared(place, v.lane);
}
#endif
#define STEP_BYTES (32 * STEP * REAL_BYTES)

__device__ __forceinline__ void push(const real (&t)[ROWS], unsigned top) {
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) store_shared(top + g * GROUP_BYTES, t + g * LANES);
}

#define VARIABLE load(place + g * GROUP_BYTES)
#define STACK load_shared(top + g * GROUP_BYTES)
#define READ_VARIABLE const char* const place = column(now.y);
#define READ_SLOT const real u = __ldg(slots + now.y);
#define READ_STACK top -= LEVEL_BYTES;

// Cheap operators: all rows unrolled in registers, one case for each source of the other operand.
#define UNARY(f, label) \
  case label: FOR_EACH_ROW(t[i] = f(t[i])) break;

#define BINARY(f, label)                                                                     \
  case label + 0: { READ_VARIABLE FOR_EACH_ROW_OF(VARIABLE, t[i] = f(t[i], u)) break; }      \
  case label + 1: { READ_VARIABLE FOR_EACH_ROW_OF(VARIABLE, t[i] = f(u, t[i])) break; }      \
  case label + 2: { READ_SLOT FOR_EACH_ROW(t[i] = f(t[i], u)) break; }                       \
  case label + 3: { READ_SLOT FOR_EACH_ROW(t[i] = f(u, t[i])) break; }                       \
  case label + 4: { READ_STACK FOR_EACH_ROW_OF(STACK, t[i] = f(t[i], u)) break; }            \
  case label + 5: { READ_STACK FOR_EACH_ROW_OF(STACK, t[i] = f(u, t[i])) break; }

// Longer operators: one body for each order of the operands, because hot code must fit in the
// instruction cache.
#define MERGED_BINARY(f, label)                                                           \
  case label + 0: case label + 1: case label + 2: case label + 3: case label + 4:         \
  case label + 5: {                                                                       \
    const unsigned form = (now.x & LABEL_MASK) - (label);                                 \
    real other[ROWS];                                                                     \
    if (form < 2) { READ_VARIABLE FOR_EACH_ROW_OF(VARIABLE, other[i] = u) }               \
    else if (form < 4) { READ_SLOT FOR_EACH_ROW(other[i] = u) }                           \
    else { READ_STACK FOR_EACH_ROW_OF(STACK, other[i] = u) }                              \
    if (form & 1) { FOR_EACH_ROW(t[i] = f(other[i], t[i])) }                              \
    else { FOR_EACH_ROW(t[i] = f(t[i], other[i])) }                                       \
    break;                                                                                \
  }

// Costly operators: one body for all sources, which loops over the rows of the tile in the stack.
// Addresses are those of this lane's packs; first_step is relative to them.
#define EACH_STEP(OPERANDS, EXPRESSION, target)                                           \
  _Pragma(STEP_UNROLL) for (int at = first_step; at < first_step + LEVEL_BYTES;           \
                            at += STEP_BYTES) {                                           \
    OPERANDS                                                                              \
    Step result;                                                                          \
    _Pragma("unroll") for (int j = 0; j < STEP; ++j) result.lane[j] = EXPRESSION;         \
    store_step(target + at, result);                                                      \
  }

#define IN_STACK(WORK)                                                                    \
  push(t, top);                                                                           \
  STEP_SYNC                                                                               \
  WORK                                                                                    \
  STEP_SYNC                                                                               \
  FOR_EACH_ROW_OF(STACK, t[i] = u)

#define THROUGH_STACK(OPERANDS, EXPRESSION) IN_STACK(EACH_STEP(OPERANDS, EXPRESSION, top))

#define COSTLY_UNARY(f, label) \
  case label: { THROUGH_STACK(const Step x = load_step(top + at);, f(x.lane[j])) break; }

#define BINARY_IN_STACK(label, WORK)                                                      \
  case label + 0: case label + 1: case label + 2: case label + 3: case label + 4:         \
  case label + 5: {                                                                       \
    const unsigned form = (now.x & LABEL_MASK) - (label);                                 \
    unsigned other = top + LEVEL_BYTES;                                                   \
    if (form < 2) {                                                                       \
      READ_VARIABLE                                                                       \
      _Pragma("unroll") for (int g = 0; g < GROUPS; ++g)                                  \
        store_shared(other + g * GROUP_BYTES, VARIABLE.lane);                             \
    } else if (form < 4) {                                                                \
      READ_SLOT                                                                           \
      Step same;                                                                          \
      _Pragma("unroll") for (int j = 0; j < STEP; ++j) same.lane[j] = u;                  \
      for (int at = first_step; at < first_step + LEVEL_BYTES; at += STEP_BYTES)          \
        store_step(other + at, same);                                                     \
    } else {                                                                              \
      other = top - LEVEL_BYTES;                                                          \
    }                                                                                     \
    const unsigned a = form & 1 ? other : top, b = form & 1 ? top : other;                \
    IN_STACK(WORK)                                                                        \
    if (form >= 4) top -= LEVEL_BYTES;                                                    \
    break;                                                                                \
  }

#define COSTLY_BINARY(f, label)                                                           \
  BINARY_IN_STACK(label, EACH_STEP(const Step x = load_step(a + at);                      \
                                   const Step y = load_step(b + at);,                     \
                                   f(x.lane[j], y.lane[j]), top))

// In fast arithmetic a function of its own evaluates costly operators: their code in the interpreter
// would cost all others 8 to 20% of their speed (H100). In the other arithmetics, where they take
// most of the time, the calls would cost more than that.
#define STEPS_OF_UNARY(f, label) \
  case label: EACH_STEP(const Step x = load_step(a + at);, f(x.lane[j]), target) break;

#define STEPS_OF_BINARY(f, label)                                                         \
  case label:                                                                             \
    EACH_STEP(const Step x = load_step(a + at); const Step y = load_step(b + at);,        \
              f(x.lane[j], y.lane[j]), target)                                            \
    break;

__device__ __noinline__ void evaluate_costly(unsigned label, unsigned a, unsigned b,
                                             unsigned target, int first_step) {
  switch (label) {
@CALLED@
  }
}

#define CALLED_UNARY \
  { IN_STACK(evaluate_costly(label, top, top, top, first_step);) break; }

#define CALLED_BINARY(f, label) \
  BINARY_IN_STACK(label, evaluate_costly(label, a, b, top, first_step);)

// Two operands are on the stack and one is in t. Word 1 holds the place of each, in levels above
// the lower stack operand: 2 bits each for a, b and c.
#define TERNARY(f, label)                                                         \
  case label: {                                                                   \
    const unsigned lower = top - 2 * LEVEL_BYTES;                                 \
    const unsigned a = lower + (now.y & 3) * LEVEL_BYTES;                         \
    const unsigned b = lower + (now.y >> 2 & 3) * LEVEL_BYTES;                    \
    const unsigned c = lower + (now.y >> 4 & 3) * LEVEL_BYTES;                    \
    THROUGH_STACK(const Step x = load_step(a + at); const Step y = load_step(b + at);    \
                  const Step z = load_step(c + at);,                              \
                  f(x.lane[j], y.lane[j], z.lane[j]))                             \
    top = lower;                                                                  \
    break;                                                                        \
  }

// Sums of the loss terms of this thread's rows in each group, in float64.
template <bool ABSOLUTE, bool PLAIN>
__device__ __forceinline__ void add_terms(const real (&t)[ROWS], const Tiles& tiles,
                                          long long row, double (&sums)[GROUPS]) {
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    long long first = row + g * 32 * LANES;
    Pack y = load(tiles.target + first);
    Pack w;
    if (!PLAIN && tiles.weights) w = load(tiles.weights + first);
    double sum = 0.0;
#pragma unroll
    for (int j = 0; j < LANES; ++j) {
      double d = difference(t[g * LANES + j], y.lane[j]);
      if (PLAIN) {
        sum = ABSOLUTE ? sum + fabs(d) : fma(d, d, sum);
      } else {
        // Without weights the bits are those of the plain form.
        bool inside = first + j >= tiles.first_row && first + j < tiles.end_row;
        double by = tiles.weights ? (double)w.lane[j] : ABSOLUTE ? 1.0 : d;
        double term = ABSOLUTE ? fabs(d) : tiles.weights ? d * d : d;
        if (inside) sum = fma(by, term, sum);
      }
    }
    sums[g] = sum;
  }
}

// Sum of a tile's loss terms.
__device__ __forceinline__ double tile_loss(const real (&t)[ROWS], const Tiles& tiles,
                                            long long tile_row, int lane) {
  bool full = tile_row >= tiles.first_row && tile_row + TILE <= tiles.end_row;
  long long row = tile_row + lane * LANES;
  double sums[GROUPS];
  if (full && !tiles.weights) {
    if (tiles.absolute) add_terms<true, true>(t, tiles, row, sums);
    else add_terms<false, true>(t, tiles, row, sums);
  } else {
    if (tiles.absolute) add_terms<true, false>(t, tiles, row, sums);
    else add_terms<false, false>(t, tiles, row, sums);
  }
  return group_sum(sums, lane);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS_AT_MOST, BLOCKS_AT_LEAST)
interpret(const __grid_constant__ Batch batch, const __grid_constant__ Tiles tiles,
          const __grid_constant__ Jobs jobs) {
  extern __shared__ __align__(16) unsigned char shared[];
  int* const next_job = (int*)shared;
  const int lane = threadIdx.x % 32;
  const unsigned bottom = (unsigned)__cvta_generic_to_shared(shared) + 16 + lane * 16 +
                          (threadIdx.x / 32) * batch.levels * LEVEL_BYTES;
  const int first_step = lane * (STEP * REAL_BYTES - 16);
  const int first = jobs.first + blockIdx.y * jobs.per_block;
  const int end = min(first + jobs.per_block, jobs.first + jobs.count);
  const long long tile_row = (long long)blockIdx.x * TILE;
  const char* const variables = (const char*)(tiles.variables + tile_row) + lane * 16;
  const auto column = [&](unsigned index) {
    return variables + index * tiles.stride;
  };

  const auto program_at = [&](int position) {
    return batch.vectors == 1 ? position : position / batch.vectors;
  };

  if (threadIdx.x == 0) *next_job = first;
  __syncthreads();
  // Programs that need more levels than a warp has come first, and use all levels of the block.
  const unsigned flags = __ldg(batch.order + program_at(first));
  if ((flags & SKIPPED) || ((flags & DEEP) && threadIdx.x >= 32)) return;
  for (;;) {
    int position = 0;
    if (lane == 0) position = atomicAdd(next_job, 1);
    position = __shfl_sync(FULL, position, 0);
    if (position >= end) break;
    const int place = program_at(position);
    const int vector = position - place * batch.vectors;
    const int program = __ldg(batch.order + place) & ~(DEEP | SKIPPED);
    const int job = program * batch.vectors + vector;
    const uint4 record = __ldg((const uint4*)batch.programs + program);
    const real* const slots = (const real*)batch.results + vector * batch.slot_count + record.z;
    const uint2* code = batch.instructions + record.x;
    unsigned top = bottom;
    real t[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) t[i] = 0;
    uint2 next = __ldg(code);
    for (;;) {
      const uint2 now = next;
      next = __ldg(++code);
      if (now.x & (LOAD_VARIABLE | LOAD_SLOT)) {
        if (now.x & PUSH) {
          push(t, top);
          top += LEVEL_BYTES;
        }
        if (now.x & LOAD_VARIABLE) {
          const char* const place = column(now.x >> INDEX_SHIFT);
          FOR_EACH_ROW_OF(VARIABLE, t[i] = u)
        } else {
          const real u = __ldg(slots + (now.x >> INDEX_SHIFT));
          FOR_EACH_ROW(t[i] = u)
        }
      }
      // compiler.py finds the switch by the comment in this instruction.
      unsigned label;
      asm volatile("mov.b32 %0, %1; // dispatch" : "=r"(label) : "r"(now.x & LABEL_MASK));
      switch (label) {
        case 0: break;
        case END_LABEL: goto finished;
@CASES@
        default: __builtin_unreachable();
      }
    }
  finished:
    if (jobs.values) {
      real* place = jobs.values + (long long)(job - jobs.first) * tiles.count * TILE + tile_row +
                    lane * LANES;
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        Pack v;
#pragma unroll
        for (int j = 0; j < LANES; ++j) v.lane[j] = t[g * LANES + j];
        *(Pack*)(place + g * 32 * LANES) = v;
      }
    }
    if (tiles.target) {
      double sum = tile_loss(t, tiles, tile_row, lane);
      if (lane == 0) {
        jobs.partials[(long long)(job - jobs.first) * tiles.count + blockIdx.x] = sum;
      }
    }
  }
}

// Computes the row-invariant subtrees, the slots, for each parameter vector. A warp runs the
// postfix tokens of one program's slots; with many vectors its lanes run the same slot.
__device__ __forceinline__ real run_slot(const Batch& batch, uint4 record, int vector) {
  const double* parameters = batch.parameters + record.z + (long long)vector * record.w;
  real stack[SLOT_LEVELS];
  int height = 0;
  for (unsigned token = record.x; token < record.y; ++token) {
    const unsigned code = batch.codes[token];
    const double value = batch.values[token];
    switch (code) {
      case 2: stack[height++] = (real)parameters[(int)value]; break;
      case 3: stack[height++] = (real)value; break;
@INVARIANT_CASES@
    }
  }
  return stack[0];
}

extern "C" __global__ void evaluate_slots(const __grid_constant__ Batch batch) {
  const int program = blockIdx.x * blockDim.y + threadIdx.y;
  if (program >= batch.count) return;
  const uint4 record = __ldg((const uint4*)batch.programs + program);
  const long long work = (long long)(record.w & SLOTS_MASK) * batch.vectors;
  long long item = (long long)blockIdx.y * 32 + threadIdx.x;
  for (; item < work; item += 32ll * gridDim.y) {
    const int slot = (int)(item / batch.vectors);
    const int vector = (int)(item - (long long)slot * batch.vectors);
    ((real*)batch.results)[vector * batch.slot_count + record.z + slot] =
        run_slot(batch, batch.slots[record.z + slot], vector);
  }
}

// Adds up each job's sums over tiles to those of the nodes so many levels above, [nodes, jobs];
// first_tile is counted from the data set's first row.
extern "C" __global__ void __launch_bounds__(128)
sum_partials(double* partials, double* sums, long long tiles, long long first_tile,
             long long levels) {
  double* const own = partials + blockIdx.x * tiles;
  sum_nodes(own, first_tile, tiles, 1, 1, (int)levels);
  const long long nodes = parent_count(first_tile, tiles, (int)levels);
  for (long long n = threadIdx.x; n < nodes; n += blockDim.x) {
    sums[n * gridDim.x + blockIdx.x] = one_nan(own[parent_place(first_tile, n, (int)levels)]);
  }
}
