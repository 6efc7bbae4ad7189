// The interpreter of programs with derivatives. source.py completes the text, as the interpreter's
// source.py does for interpreter.cu; linearise.cu follows.
//
// A block of threads runs one job (a program with one parameter vector) on one block of rows, of
// which its warps work on separate tiles of 32 * ROWS rows. The result of an instruction is in
// registers; it may be stored in a level of shared memory, too. The more levels a program needs, the
// fewer warps take part. Once a tile's columns (derivatives of the values) are computed, their
// products are summed:
//
//     loss += w l;  sums[k] += w s ck;  products[i, j] += w ci cj
//
// Blocks are counted from the data set's first row, and the sums of a block's tiles are added up in
// their order, so that a sum does not depend on how many warps have taken part.

// Instruction: word 0 holds the case label, the kind of place of each operand, and whether to
// store; words 1 and 2 the indices of a and b; word 3 the level to store to and the index of c, 16
// bits each. If a is nowhere, it is the result of the instruction before. See lowering.py.
#define LABEL_MASK 1023u
#define KIND_A(word) ((word) >> 10 & 3u)
#define KIND_B(word) ((word) >> 12 & 3u)
#define KIND_C(word) ((word) >> 14 & 3u)
#define STORE (1u << 16)
// Kinds of places, the two lowest bits of a place; its index is in the others.
#define NOWHERE 0u
#define LEVEL 1u
#define COLUMN 2u
#define INVARIANT 3u

// lowering.py fills in the fields of this and of the two structs below.
struct Program {
  unsigned first;             // instructions for each row
  unsigned count;
  unsigned prologue;          // instructions on invariants
  unsigned prologue_count;
  unsigned load;              // invariants that are parameters or constants
  unsigned loads;
  unsigned invariant;            // invariants of the first vector
  unsigned invariants;
  unsigned column;            // places of the columns
  unsigned columns;
  unsigned entry;             // factors of the sums over columns
  unsigned entries;
  unsigned loss;              // place of the row loss
  unsigned slope;             // place of its derivative
  unsigned levels;
  unsigned parameter;         // parameters of the first vector
  unsigned parameters;
  unsigned result;            // place of the value
  unsigned long long sum;     // sums of the first vector, for one block
  unsigned long long triangle;  // curvatures of the first vector
};

struct Entry {
  int column;
  int leaf;    // parameter, or -1 - variable
  int factor;  // invariant, -1 for 1
};

struct Load {
  int invariant;
  int parameter;  // -1: a constant
};

// launches.py fills in the fields.
struct Arguments {
  const uint4* instructions;  // this and the following seven: uploaded arrays
  const Program* programs;
  const unsigned* order;      // job numbers, the most work first; [jobs]
  const unsigned* columns;
  const Entry* entries;
  const Load* loads;
  const double* constants;
  const double* parameters;
  real* invariants;              // each LANES times, INVARIANT_BYTES, so that it is read like a pack of rows
  double* losses;             // [jobs of the batch]; null: not wanted, like what follows
  double* gradients;          // as the parameters
  double* variable_gradients; // [jobs, variable count]
  double* curvatures;         // triangles, row by row
  double* nodes;              // [nodes, node_pitch]; null: the sums are those of all rows
  long long node_pitch;
  long long pitch;            // of sums of nodes, [blocks, pitch]; 0: partials are sums of blocks
  unsigned long long stride;  // bytes between variables
  const real* variables;      // [variables, stride], at the first row of the first tile
  const real* weights;        // null: 1 for every row; likewise
  real* values;               // null: not wanted; [jobs, tiles * TILE]
  real* jacobian;             // null: not wanted; [parameters of these jobs, tiles * TILE]
  double* partials;           // for each job [blocks, sums]
  unsigned char* far;         // memory of all warps, if shared memory is too small
  long long first_parameter;  // of the first job, in the Jacobian
  long long first_tile;       // number of the first tile, counted from the data set's first row
  int first_row;              // rows of the first tile to leave out
  int end_row;                // end of the rows, counted from the first row of the first tile
  int tiles;
  int blocks;
  int first_job;
  int node;                   // place of the first node among the nodes
  int node_levels;            // of the tree to add up
  int vectors;
  int variable_count;
  int warp_bytes;             // memory of a warp in global memory
  int shared_bytes;           // for the warps of a block, except for programs that need more
  int wants_loss;
  int wants_slopes;
  int wants_products;
  int is_squares;             // the slope's place holds half the slope of a square
  int weighs_loss;            // each row loss counts w times
  int deviation;              // the row loss: 0: the program computes it; 1: (f - y)^2; 2: |f - y|;
                              // 3: the square of what is in the slope's place
  int target;                 // column of the target
};

@OPERATORS@

// Operands are read by volatile instructions only, and levels written by them. As the compiler does
// not see what these do, it does not merge cases of the switch, and the result of an instruction
// stays in the registers of the one before.
#if REAL_BYTES == 4
__device__ __forceinline__ real load_row(const char* place) {
  real v;
  asm volatile("ld.f32 %0, [%1];" : "=f"(v) : "l"(place));
  return v;
}
__device__ __forceinline__ Pack load_pack(const char* place) {
  Pack v;
  asm volatile("ld.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.lane[0]), "=f"(v.lane[1]), "=f"(v.lane[2]), "=f"(v.lane[3]) : "l"(place));
  return v;
}
#else
__device__ __forceinline__ real load_row(const char* place) {
  real v;
  asm volatile("ld.f64 %0, [%1];" : "=d"(v) : "l"(place));
  return v;
}
__device__ __forceinline__ Pack load_pack(const char* place) {
  Pack v;
  asm volatile("ld.v2.f64 {%0, %1}, [%2];" : "=d"(v.lane[0]), "=d"(v.lane[1]) : "l"(place));
  return v;
}
#endif

// Levels are in shared memory, or in global memory if that is too small.
#if FAR
typedef char* Place;
__device__ __forceinline__ Place place_of(unsigned char* memory) { return (char*)memory; }
__device__ __forceinline__ const char* address_of(Place place) { return place; }
__device__ __forceinline__ Pack load_level(Place place) { return load_pack(place); }
__device__ __forceinline__ void store_level(Place place, const real* v) {
#pragma unroll
  for (int j = 0; j < LANES; ++j) ((volatile real*)place)[j] = v[j];
}
#else
typedef unsigned Place;
__device__ __forceinline__ Place place_of(unsigned char* memory) {
  return (unsigned)__cvta_generic_to_shared(memory);
}
__device__ __forceinline__ const char* address_of(Place place) {
  return (const char*)__cvta_shared_to_generic(place);
}
__device__ __forceinline__ Pack load_level(Place place) { return load_shared(place); }
__device__ __forceinline__ void store_level(Place place, const real* v) { store_shared(place, v); }
#endif

// Rows of an operand, in any memory.
struct Operand {
  const char* first;  // this lane's first pack
  unsigned step;      // bytes to its next one

  __device__ __forceinline__ Pack pack(int g) const { return load_pack(first + g * step); }
  __device__ __forceinline__ real row(int i) const {
    return load_row(first + i / LANES * step + i % LANES * REAL_BYTES);
  }
};

// The tile that a warp works on, as one of its lanes sees it.
struct Tile {
  const char* variables;  // of the first variable, at this lane's first row
  const char* weights;
  const char* invariants;
  Place levels;           // this lane's part of the first level
  unsigned long long stride;
  int row;                // this lane's first row
  int first_row;
  int end_row;

  __device__ __forceinline__ bool inside(int g, int j) const {
    const int at = row + g * 32 * LANES + j;
    return at >= first_row && at < end_row;
  }
  __device__ __forceinline__ Place level(unsigned index) const {
    return levels + index * (unsigned)LEVEL_BYTES;
  }
  __device__ __forceinline__ const char* column(unsigned index) const {
    return variables + index * stride;
  }
  __device__ __forceinline__ const char* invariant(unsigned index) const {
    return invariants + index * (unsigned long long)INVARIANT_BYTES;
  }
  __device__ __forceinline__ Operand operand(unsigned kind, unsigned index) const {
    if (kind == LEVEL) return {address_of(level(index)), GROUP_BYTES};
    if (kind == COLUMN) return {column(index), GROUP_BYTES};
    return {invariant(index), 0u};
  }
  __device__ __forceinline__ Operand operand(unsigned place) const {
    return operand(place & 3u, place >> 2);
  }
  // One group of rows; if the tile is not PLAIN, with 0 in rows that are left out.
  template <bool PLAIN>
  __device__ __forceinline__ Pack used(const Operand& operand, int g) const {
    Pack pack = operand.pack(g);
    if (!PLAIN) {
#pragma unroll
      for (int j = 0; j < LANES; ++j) pack.lane[j] = inside(g, j) ? pack.lane[j] : (real)0;
    }
    return pack;
  }
};

// Operators of two operands have a case for each kind of b and, behind it, one for the operands the
// other way round. The cheapest ones have code for every case.
#define DIRECT_CASES(label, PLACE, LOAD, f)                   \
  case label: {                                               \
    const auto place = PLACE;                                 \
    FOR_EACH_ROW_OF(LOAD(place + g * GROUP_BYTES), t[i] = f(t[i], u)) \
    break;                                                    \
  }                                                           \
  case label + 1: {                                           \
    const auto place = PLACE;                                 \
    FOR_EACH_ROW_OF(LOAD(place + g * GROUP_BYTES), t[i] = f(u, t[i])) \
    break;                                                    \
  }
#define DIRECT_2(label, f)                                        \
  DIRECT_CASES(label, tile.level(now.z), load_level, f)           \
  DIRECT_CASES(label + 2, tile.column(now.z), load_pack, f)       \
  case label + 4: {                                               \
    const real u = load_row(tile.invariant(now.z));                  \
    FOR_EACH_ROW(t[i] = f(t[i], u))                               \
    break;                                                        \
  }                                                               \
  case label + 5: {                                               \
    const real u = load_row(tile.invariant(now.z));                  \
    FOR_EACH_ROW(t[i] = f(u, t[i]))                               \
    break;                                                        \
  }

// Other cheap operators: all rows unrolled.
#define SECOND const Operand second = tile.operand(KIND_B(now.x), now.z);
#define THIRD const Operand third = tile.operand(KIND_C(now.x), now.w >> 16);
#define ALL_CASES(label) \
  case label: case label + 1: case label + 2: case label + 3: case label + 4: case label + 5
#define SWAPPED(label) ((now.x & LABEL_MASK) - (label) & 1)
#define CHEAP_1(label, f) \
  case label: FOR_EACH_ROW(t[i] = f(t[i])) break;
#define CHEAP_2(label, f)                                                                    \
  ALL_CASES(label): {                                                                        \
    SECOND                                                                                   \
    const bool swapped = SWAPPED(label);                                                     \
    FOR_EACH_ROW_OF(second.pack(g), t[i] = f(swapped ? u : t[i], swapped ? t[i] : u))        \
    break;                                                                                   \
  }
#define CHEAP_3(label, f)                                                          \
  case label: {                                                                    \
    SECOND THIRD                                                                   \
    _Pragma("unroll") for (int g = 0; g < GROUPS; ++g) {                           \
      const Pack b = second.pack(g), c = third.pack(g);                            \
      _Pragma("unroll") for (int j = 0; j < LANES; ++j)                            \
        t[g * LANES + j] = f(t[g * LANES + j], b.lane[j], c.lane[j]);              \
    }                                                                              \
    break;                                                                         \
  }

// Costly operators: a loop over the rows, because hot code must fit in the instruction cache. The
// rows are copied to memory, because registers cannot be indexed.
#define EACH_ROW_IN_TURN(STATEMENT)                       \
  FOR_EACH_ROW(rows[i] = t[i])                            \
  _Pragma("unroll 2") for (int i = 0; i < ROWS; ++i) {    \
    STATEMENT;                                            \
  }                                                       \
  FOR_EACH_ROW(t[i] = rows[i])
#define COSTLY_1(label, f) \
  case label: { EACH_ROW_IN_TURN(rows[i] = f(rows[i])) break; }
#define COSTLY_2(label, f)                                         \
  ALL_CASES(label): {                                              \
    SECOND                                                         \
    const bool swapped = SWAPPED(label);                           \
    EACH_ROW_IN_TURN(                                              \
        const real u = second.row(i);                              \
        rows[i] = f(swapped ? u : rows[i], swapped ? rows[i] : u)) \
    break;                                                         \
  }
#define COSTLY_3(label, f) \
  case label: {            \
    SECOND THIRD           \
    EACH_ROW_IN_TURN(rows[i] = f(rows[i], second.row(i), third.row(i))) \
    break;                 \
  }

// Runs the program on one tile; its results are stored in levels. It is not inlined, and the tile is
// a copy, so that all registers are the loop's.
__device__ __noinline__ void run(const uint4* code, unsigned count, const Tile tile) {
  real t[ROWS], rows[ROWS];
  FOR_EACH_ROW(t[i] = 0)
  uint4 next = __ldg(code);
  for (unsigned left = count; left > 0; --left) {
    const uint4 now = next;
    next = __ldg(++code);
    if (KIND_A(now.x) != NOWHERE) {
      const Operand first = tile.operand(KIND_A(now.x), now.y);
      FOR_EACH_ROW_OF(first.pack(g), t[i] = u)
    }
    // compiler.py finds the switch by the comment in this instruction.
    unsigned label;
    asm volatile("mov.b32 %0, %1; // dispatch" : "=r"(label) : "r"(now.x & LABEL_MASK));
    switch (label) {
      case 0: break;
@CASES@
      default: __builtin_unreachable();
    }
    if (now.x & STORE) {
      const Place place = tile.level(now.w & 0xffffu);
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) store_level(place + g * GROUP_BYTES, t + g * LANES);
    }
  }
}
