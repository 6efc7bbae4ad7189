// The interpreter of programs with derivatives, and what sums up its results. lowering.py completes
// the text, as the interpreter's launches.py does for interpreter.cu.
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

// The kernels of programs with derivatives. What the interpreter computes of a tile is summed up here: the losses, slope times column for each column, and products
// of columns, in this order. A tile is PLAIN if no row is left out and none has a weight; the code for
// other tiles is kept short.

// In fast mode the products of a thread's own rows are float32; everything else is float64.
#if FAST
typedef float Term;
#else
typedef double Term;
#endif

#define SIDE 4  // columns that are multiplied with each other at a time

// Returns the sums of products among the sums of a tile.
__device__ __forceinline__ double* products_of(const Program& program, double* sums) {
  return sums + 1 + program.columns;
}

// Sums over WIDTH columns: of slope times column, and if wanted the lower triangle of products.
template <bool PLAIN, bool PRODUCTS, int WIDTH>
__device__ __forceinline__ void sum_diagonal(const Tile& tile, const Arguments& arguments,
                                             const Program& program, int first, double* sums,
                                             int lane) {
  constexpr int WANTED = PRODUCTS ? WIDTH + WIDTH * (WIDTH + 1) / 2 : WIDTH;
  constexpr int N = WANTED <= 2 ? WANTED : WANTED <= 4 ? 4 : WANTED <= 8 ? 8 : 16;
  Operand columns[WIDTH];
#pragma unroll
  for (int m = 0; m < WIDTH; ++m)
    columns[m] = tile.operand(__ldg(arguments.columns + program.column + first + m));
  const Operand slope = tile.operand(program.slope);
  const bool wants_slopes = arguments.wants_slopes, weighs_slope = arguments.weighs_loss;
  Term terms[N] = {};
#pragma unroll (PLAIN ? GROUPS : 1)
  for (int g = 0; g < GROUPS; ++g) {
    Pack packs[WIDTH], s, w;
#pragma unroll
    for (int m = 0; m < WIDTH; ++m) packs[m] = tile.used<PLAIN>(columns[m], g);
    if (wants_slopes) s = tile.used<PLAIN>(slope, g);
    if (!PLAIN && tile.weights) w = load(tile.weights + g * GROUP_BYTES);
#pragma unroll
    for (int j = 0; j < LANES; ++j) {
      const Term weight = !PLAIN && tile.weights ? (Term)w.lane[j] : (Term)1;
      const Term by = wants_slopes ? (Term)s.lane[j] * (weighs_slope ? weight : (Term)1) : (Term)0;
#pragma unroll
      for (int m = 0; m < WIDTH; ++m) {
        const Term c = (Term)packs[m].lane[j];
        if (wants_slopes) terms[m] += by * c;
        if (PRODUCTS) {
          const Term left = c * weight;
#pragma unroll
          for (int n = 0; n <= m; ++n)
            terms[WIDTH + m * (m + 1) / 2 + n] += left * (Term)packs[n].lane[j];
        }
      }
    }
  }
  double values[N];
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = (double)terms[i];
  const double sum = warp_sums<N>(values, lane);
  const int index = lane / (32 / N);
  if (lane % (32 / N)) return;
  if (index < WIDTH) {
    sums[1 + first + index] = sum;
  } else if (PRODUCTS) {
    const int pair = index - WIDTH, m = pair < 1 ? 0 : pair < 3 ? 1 : pair < 6 ? 2 : 3;
    const int n = pair - m * (m + 1) / 2, i = first + m, j = first + n;
    // Of N numbers only the first ones are WANTED.
    if (m < WIDTH && n <= m) products_of(program, sums)[i * (i + 1) / 2 + j] = sum;
  }
}

// Products of one block of columns with an earlier one.
template <bool PLAIN>
__device__ __forceinline__ void sum_square(const Tile& tile, const Arguments& arguments,
                                           const Program& program, int first, int second,
                                           double* sums, int lane) {
  const unsigned* const places = arguments.columns + program.column;
  const int columns = program.columns;
  Operand lefts[SIDE], rights[SIDE];
#pragma unroll
  for (int m = 0; m < SIDE; ++m) {
    lefts[m] = tile.operand(__ldg(places + min(first + m, columns - 1)));
    rights[m] = tile.operand(__ldg(places + second + m));
  }
  Term terms[SIDE * SIDE] = {};
#pragma unroll (PLAIN ? GROUPS : 1)
  for (int g = 0; g < GROUPS; ++g) {
    Pack left[SIDE], right[SIDE], w;
#pragma unroll
    for (int m = 0; m < SIDE; ++m) {
      left[m] = tile.used<PLAIN>(lefts[m], g);
      right[m] = tile.used<PLAIN>(rights[m], g);
    }
    if (!PLAIN && tile.weights) w = load(tile.weights + g * GROUP_BYTES);
#pragma unroll
    for (int j = 0; j < LANES; ++j) {
      const Term weight = !PLAIN && tile.weights ? (Term)w.lane[j] : (Term)1;
#pragma unroll
      for (int m = 0; m < SIDE; ++m) {
        const Term by = (Term)left[m].lane[j] * weight;
#pragma unroll
        for (int n = 0; n < SIDE; ++n) terms[m * SIDE + n] += by * (Term)right[n].lane[j];
      }
    }
  }
  double values[SIDE * SIDE];
#pragma unroll
  for (int i = 0; i < SIDE * SIDE; ++i) values[i] = (double)terms[i];
  const double sum = warp_sums<SIDE * SIDE>(values, lane);
  const int i = first + lane / 2 / SIDE, j = second + lane / 2 % SIDE;
  if (lane % 2 == 0 && i < columns) products_of(program, sums)[i * (i + 1) / 2 + j] = sum;
}

// Sum of the row losses of this thread's rows, in float64. Squared and absolute deviations are
// computed from values and target, as in interpreter.cu; the program has computed other row losses.
template <bool PLAIN>
__device__ __forceinline__ double row_losses(const Tile& tile, const Arguments& arguments,
                                             const Program& program) {
  const bool weighs = !PLAIN && arguments.weighs_loss && tile.weights;
  const int deviation = arguments.deviation;
  const unsigned place = deviation == 0 ? program.loss
                         : deviation == 3 ? program.slope : program.result;
  const Operand losses = tile.operand(place);
  const char* const target = tile.operand(COLUMN, arguments.target).first;
  double sum = 0.0;
#pragma unroll (PLAIN ? GROUPS : 1)
  for (int g = 0; g < GROUPS; ++g) {
    const Pack l = tile.used<PLAIN>(losses, g);
    Pack y, w;
    if (deviation == 1 || deviation == 2) y = load(target + g * GROUP_BYTES);
    if (weighs) w = load(tile.weights + g * GROUP_BYTES);
#pragma unroll
    for (int j = 0; j < LANES; ++j) {
      double term = (double)l.lane[j];
      if (deviation) {
        const double d = deviation == 3 ? term : difference(l.lane[j], y.lane[j]);
        term = deviation == 2 ? fabs(d) : d * d;
      }
      const double weight = weighs ? (double)w.lane[j] : 1.0;
      if (PLAIN || tile.inside(g, j)) sum += weight * term;
    }
  }
  return sum;
}

__device__ __forceinline__ real* invariants_of(const Arguments& arguments, const Program& program,
                                            int vector) {
  return arguments.invariants +
         (program.invariant + (unsigned long long)vector * program.invariants) * LANES;
}

__device__ __forceinline__ real factor_of(const Entry& entry, const real* invariants) {
  return entry.factor < 0 ? (real)1 : invariants[entry.factor * LANES];
}

// Stores the derivatives of a tile's values by each parameter.
__device__ void store_jacobian(const Tile& tile, const Arguments& arguments, const Program& program,
                               real* place) {
  for (unsigned parameter = 0; parameter < program.parameters; ++parameter) {
    real x[ROWS];
    FOR_EACH_ROW(x[i] = 0)
    for (unsigned k = 0; k < program.entries; ++k) {
      const Entry entry = arguments.entries[program.entry + k];
      const real factor = factor_of(entry, (const real*)tile.invariants);
      if (entry.leaf != (int)parameter || factor == (real)0) continue;
      const Operand column = tile.operand(arguments.columns[program.column + entry.column]);
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        const Pack c = column.pack(g);
#pragma unroll
        for (int j = 0; j < LANES; ++j)
          if (c.lane[j] != (real)0) x[g * LANES + j] += factor * c.lane[j];
      }
    }
    real* const row = place + (long long)parameter * arguments.tiles * TILE;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      Pack pack;
#pragma unroll
      for (int j = 0; j < LANES; ++j) pack.lane[j] = x[g * LANES + j];
      *(Pack*)(row + g * 32 * LANES) = pack;
    }
  }
}

__device__ __forceinline__ unsigned sum_count(const Arguments& arguments, const Program& program) {
  const unsigned columns = program.columns;
  return 1 + columns + (arguments.wants_products ? columns * (columns + 1) / 2 : 0);
}

// Sums over all columns.
template <bool PLAIN, bool PRODUCTS>
__device__ __forceinline__ void sum_columns(const Tile& tile, const Arguments& arguments,
                                            const Program& program, double* sums, int lane) {
  const int columns = program.columns;
  for (int first = 0; first < columns; first += SIDE) {
    switch (columns - first) {
      case 1:
        sum_diagonal<PLAIN, PRODUCTS, 1>(tile, arguments, program, first, sums, lane);
        break;
      case 2:
        sum_diagonal<PLAIN, PRODUCTS, 2>(tile, arguments, program, first, sums, lane);
        break;
      case 3:
        sum_diagonal<PLAIN, PRODUCTS, 3>(tile, arguments, program, first, sums, lane);
        break;
      default:
        sum_diagonal<PLAIN, PRODUCTS, SIDE>(tile, arguments, program, first, sums, lane);
    }
    for (int second = 0; PRODUCTS && second < first; second += SIDE)
      sum_square<PLAIN>(tile, arguments, program, first, second, sums, lane);
  }
}

// Computes a tile's sums but that of the losses; returns the losses of this lane's rows.
template <bool PLAIN>
__device__ __forceinline__ double sum_tile(const Tile& tile, const Arguments& arguments,
                                           const Program& program, double* sums, int lane) {
  if (arguments.wants_products) {
    sum_columns<PLAIN, true>(tile, arguments, program, sums, lane);
  } else if (arguments.wants_slopes) {
    sum_columns<PLAIN, false>(tile, arguments, program, sums, lane);
  } else {
    for (int k = lane; k < program.columns; k += 32) sums[1 + k] = 0.0;
  }
  return arguments.wants_loss ? row_losses<PLAIN>(tile, arguments, program) : 0.0;
}

// Runs a job on one tile and computes its sums.
__device__ __forceinline__ void compute_tile(const Arguments& arguments, const Program& program,
                                             const real* invariants, int job, int vector,
                                             int number, Place levels, double* sums, int lane) {
  const int tile_row = number * TILE, offset = tile_row + lane * LANES;
  Tile tile;
  tile.row = offset;
  tile.first_row = arguments.first_row;
  tile.end_row = arguments.end_row;
  tile.stride = arguments.stride;
  tile.variables = (const char*)(arguments.variables + offset);
  tile.weights = arguments.weights ? (const char*)(arguments.weights + offset) : 0;
  tile.invariants = (const char*)invariants;
  tile.levels = levels;
  run(arguments.instructions + program.first, program.count, tile);
  const bool full = tile_row >= arguments.first_row && tile_row + TILE <= arguments.end_row;
  const double loss = full && !tile.weights ? sum_tile<true>(tile, arguments, program, sums, lane)
                                            : sum_tile<false>(tile, arguments, program, sums, lane);
  const double total = warp_sum(loss);
  if (lane == 0) sums[0] = total;
  const long long pitch = (long long)arguments.tiles * TILE;
  if (arguments.values) {
    real* const place = arguments.values + (job - arguments.first_job) * pitch + offset;
    const Operand result = tile.operand(program.result);
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) *(Pack*)(place + g * 32 * LANES) = result.pack(g);
  }
  if (arguments.jacobian) {
    const long long row =
        program.parameter + (long long)vector * program.parameters - arguments.first_parameter;
    store_jacobian(tile, arguments, program, arguments.jacobian + row * pitch + offset);
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS_AT_LEAST)
linearise(const __grid_constant__ Arguments arguments) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int job = __ldg(arguments.order + blockIdx.y);
  const int vector = job % arguments.vectors;
  const Program& program = arguments.programs[job / arguments.vectors];
  const unsigned count = sum_count(arguments, program);
  const unsigned sum_bytes = (count * 8 + 15) / 16 * 16, level_bytes = program.levels * LEVEL_BYTES;
  // Memory of the block: sums of several tiles, then levels of each warp that takes part.
#if FAR
  const int sets = WARPS, workers = WARPS;
  unsigned char* const memory =
      arguments.far +
      ((unsigned long long)blockIdx.y * gridDim.x + blockIdx.x) * WARPS * arguments.warp_bytes;
#else
  const unsigned size = max((unsigned)arguments.shared_bytes, sum_bytes + level_bytes);
  const int sets =
      max(1u, min((unsigned)BLOCK_TILES, min(size / 4, size - level_bytes) / sum_bytes));
  const unsigned left = size - sets * sum_bytes;
  const int workers = max(1u, min((unsigned)min(WARPS, sets), left / max(level_bytes, 1u)));
  extern __shared__ __align__(16) unsigned char memory[];
#endif
  unsigned char* const levels = memory + sets * (unsigned long long)sum_bytes +
                                warp * (unsigned long long)level_bytes + lane * 16;
  double* const partials =
      arguments.partials + (program.sum + (unsigned long long)vector * count) * arguments.blocks +
      (unsigned long long)blockIdx.x * count;
  // Tiles of the launch; those of the first block may begin before it.
  const int first_tile = (int)(blockIdx.x * BLOCK_TILES - arguments.first_tile % BLOCK_TILES);
  const int begin = max(first_tile, 0), end_tile = min(first_tile + BLOCK_TILES, arguments.tiles);
#pragma unroll 1
  for (int first = begin; first < end_tile; first += sets) {
    const int tiles = min(sets, end_tile - first);
#pragma unroll 1
    for (int k = warp; warp < workers && k < tiles; k += workers) {
      double* const sums = (double*)(memory + k * (unsigned long long)sum_bytes);
      compute_tile(arguments, program, invariants_of(arguments, program, vector), job, vector,
                   first + k, place_of(levels), sums, lane);
    }
    __syncthreads();
    for (unsigned k = threadIdx.x; k < count; k += blockDim.x) {
      double sum = first > begin ? partials[k] : 0.0;
      for (int tile = 0; tile < tiles; ++tile)
        sum += ((const double*)(memory + tile * (unsigned long long)sum_bytes))[k];
      partials[k] = sum;
    }
    __syncthreads();
  }
}

__device__ __forceinline__ void store_invariant(real* invariants, unsigned index, real x) {
  Pack pack;
#pragma unroll
  for (int j = 0; j < LANES; ++j) pack.lane[j] = x;
  *((Pack*)invariants + index) = pack;
}

// Computes the invariants of a job: parameters, constants, and what depends on them alone. A warp
// a job, because jobs take different branches.
static __device__ __noinline__ void compute_invariants(const Arguments& arguments,
                                                       const Program& program,
                                                       const double* parameters, real* invariants,
                                                       int lane) {
  for (unsigned k = lane; k < program.loads; k += 32) {
    const Load load = arguments.loads[program.load + k];
    store_invariant(invariants, load.invariant,
                 (real)(load.parameter < 0 ? arguments.constants[program.load + k]
                                           : parameters[load.parameter]));
  }
  __syncwarp();
  if (lane) return;
  for (unsigned k = 0; k < program.prologue_count; ++k) {
    const uint4 now = arguments.instructions[program.prologue + k];
    real t = invariants[now.y * LANES];
    const real u = invariants[now.z * LANES], v = invariants[(now.w >> 16) * LANES];
    switch (now.x & LABEL_MASK) {
@INVARIANT_CASES@
    }
    store_invariant(invariants, now.w & 0xffffu, t);
  }
}

extern "C" __global__ void evaluate_invariants(const __grid_constant__ Arguments arguments) {
  const int job = __ldg(arguments.order + blockIdx.x);
  const int vector = job % arguments.vectors;
  const Program& program = arguments.programs[job / arguments.vectors];
  const double* const parameters =
      arguments.parameters + program.parameter + (unsigned long long)vector * program.parameters;
  compute_invariants(arguments, program, parameters, invariants_of(arguments, program, vector),
                     threadIdx.x);
}

// Derivative of the sum of row losses by a leaf, from the sums over columns of slope times column.
__device__ __forceinline__ double gradient_of(const Arguments& arguments, const Program& program,
                                              const real* invariants, const double* slopes,
                                              int leaf) {
  const Entry* const entries = arguments.entries + program.entry;
  const double scale = arguments.is_squares ? 2.0 : 1.0;
  double sum = 0.0;
  for (unsigned e = 0; e < program.entries; ++e) {
    const Entry entry = entries[e];
    if (entry.leaf != leaf) continue;
    const double factor = (double)factor_of(entry, invariants), total = slopes[entry.column];
    if (factor != 0.0 && total != 0.0) sum += scale * factor * total;
  }
  return one_nan(sum);
}

// Sum of products of the derivatives of the values by two parameters: number k of the triangle.
__device__ __forceinline__ double curvature_of(const Arguments& arguments, const Program& program,
                                               const real* invariants, const double* products,
                                               unsigned k) {
  const Entry* const entries = arguments.entries + program.entry;
  int p = (int)((sqrt(8.0 * k + 1.0) - 1.0) / 2.0);
  while ((unsigned)(p + 1) * (p + 2) / 2 <= k) ++p;
  while ((unsigned)p * (p + 1) / 2 > k) --p;
  const int q = (int)k - p * (p + 1) / 2;
  double sum = 0.0;
  for (unsigned first = 0; first < program.entries; ++first) {
    const Entry left = entries[first];
    if (left.leaf != p) continue;
    const double a = (double)factor_of(left, invariants);
    for (unsigned second = 0; second < program.entries; ++second) {
      const Entry right = entries[second];
      if (right.leaf != q) continue;
      const double b = (double)factor_of(right, invariants);
      const int i = max(left.column, right.column), j = min(left.column, right.column);
      const double total = products[i * (i + 1) / 2 + j];
      if (a != 0.0 && b != 0.0 && total != 0.0) sum += a * b * total;
    }
  }
  return one_nan(sum);
}

// Adds up the sums over blocks, or nodes, and computes losses, gradients and curvatures from them
// unless there are more nodes; a block of threads a job.
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)
combine(const __grid_constant__ Arguments arguments) {
  const int job = __ldg(arguments.order + blockIdx.x);
  const int vector = job % arguments.vectors;
  const Program& program = arguments.programs[job / arguments.vectors];
  const unsigned count = sum_count(arguments, program);
  const unsigned long long own = program.sum + (unsigned long long)vector * count;
  const long long pitch = arguments.pitch ? arguments.pitch : count;
  double* const sums = arguments.partials + own * (arguments.pitch ? 1 : arguments.blocks);
  const long long first = arguments.first_tile / BLOCK_TILES;
  const int levels = arguments.node_levels;
  sum_nodes(sums, first, arguments.blocks, count, pitch, levels);
  if (arguments.nodes) {
    const long long items = parent_count(first, arguments.blocks, levels) * count;
    for (long long item = threadIdx.x; item < items; item += COMBINE_THREADS) {
      const long long n = item / count, k = item - n * count;
      arguments.nodes[(arguments.node + n) * arguments.node_pitch + own + k] =
          sums[parent_place(first, n, levels) * pitch + k];
    }
    return;
  }
  const real* const invariants = invariants_of(arguments, program, vector);
  if (threadIdx.x == 0 && arguments.losses) arguments.losses[job] = one_nan(sums[0]);
  const double* const slopes = sums + 1;
  const double* const products = slopes + program.columns;
  const int leaves = program.parameters + arguments.variable_count;
  for (int k = threadIdx.x; k < leaves; k += COMBINE_THREADS) {
    const int leaf = k < program.parameters ? k : -1 - (k - (int)program.parameters);
    double* const rows = leaf >= 0 ? arguments.gradients : arguments.variable_gradients;
    if (!rows) continue;
    const double sum = gradient_of(arguments, program, invariants, slopes, leaf);
    if (leaf >= 0)
      rows[program.parameter + (long long)vector * program.parameters + leaf] = sum;
    else
      rows[(long long)job * arguments.variable_count + (-1 - leaf)] = sum;
  }
  if (!arguments.curvatures) return;
  const unsigned size = program.parameters * (program.parameters + 1) / 2;
  double* const triangle = arguments.curvatures + program.triangle + (long long)vector * size;
  for (unsigned k = threadIdx.x; k < size; k += COMBINE_THREADS)
    triangle[k] = curvature_of(arguments, program, invariants, products, k);
}
