// The interpreter of programs with derivatives. source.py completes the text, as the interpreter's
// source.py does for interpreter.cu.
//
// A block of threads runs one job (a program with one parameter vector) on one block of rows, of
// which its warps work on separate tiles of 32 * ROWS rows. Blocks are counted from the data set's
// first row, and each of their sums is added up in one order, however many warps there are. An instruction reads up to three operands (the
// result of the instruction before is in registers) and may store its result in a level of shared
// memory; the more levels a program needs, the fewer warps take part. Once a tile's columns
// (derivatives of the values) are computed, their products are summed:
//
//     loss += w l;  sums[k] += w s ck;  products[i, j] += w ci cj

// Instruction: word 0 holds the case label, the source of each operand, and whether to store; words
// 1 and 2 the indices of a and b; word 3 the level to store to and the index of c, 16 bits each.
// See encoding.py.
#define LABEL_MASK 1023u
#define SOURCE_A(word) ((word) >> 10 & 7u)
#define SOURCE_B(word) ((word) >> 13 & 7u)
#define SOURCE_C(word) ((word) >> 16 & 7u)
#define STORE (1u << 19)
// Sources of an operand, and kinds of a place (in its three lowest bits).
#define NOWHERE 0u
#define LEVEL 1u
#define COLUMN 2u
#define SCALAR 3u
#define BEFORE 4u  // the result of the instruction before

// PROGRAM of encoding.py, field by field.
struct Program {
  unsigned first;             // instructions for each row
  unsigned count;
  unsigned prologue;          // instructions on scalars
  unsigned prologue_count;
  unsigned load;              // scalars that are parameters or constants
  unsigned loads;
  unsigned scalar;            // scalars of the first vector
  unsigned scalars;
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
  int factor;  // scalar, -1 for 1
};

struct Load {
  int scalar;
  int parameter;  // -1: a constant
};

// Fields that differ between launches lie together: launches.py writes them at once.
struct Arguments {
  const uint4* instructions;  // this and the following ones: INPUTS of encoding.py
  const Program* programs;
  const unsigned* order;      // job numbers, the most work first; [jobs]
  const unsigned* columns;
  const Entry* entries;
  const Load* loads;
  const double* constants;
  const double* parameters;
  real* scalars;
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
  int deviation;              // the row loss: 0: the program computes it; 1: (f - y)^2; 2: |f - y|
  int target;                 // column of the target
};

@OPERATORS@

// Levels are in shared memory, or in global memory if that is too small.
#if FAR
typedef unsigned char* Place;
__device__ __forceinline__ Place place_of(unsigned char* memory) { return memory; }
__device__ __forceinline__ Pack load_level(Place place) { return *(const Pack*)place; }
__device__ __forceinline__ void store_level(Place place, const Pack& v) { *(Pack*)place = v; }
#else
typedef unsigned Place;
__device__ __forceinline__ Place place_of(unsigned char* memory) {
  return (unsigned)__cvta_generic_to_shared(memory);
}
__device__ __forceinline__ Pack load_level(Place place) { return load_shared(place); }
__device__ __forceinline__ void store_level(Place place, const Pack& v) {
  store_shared(place, v.lane);
}
#endif

// The tile that a warp works on, as one of its lanes sees it.
struct Tile {
  const char* variables;  // of the first variable, at this lane's first row
  const char* weights;
  const real* scalars;
  Place levels;           // this lane's part of the first level
  unsigned long long stride;
  bool full;              // no row is left out
  int row;                // this lane's first row
  int first_row;
  int end_row;

  __device__ __forceinline__ bool inside(int g, int j) const {
    const int at = row + g * 32 * LANES + j;
    return full || (at >= first_row && at < end_row);
  }
  __device__ __forceinline__ Place level(unsigned index) const {
    return levels + index * (unsigned)LEVEL_BYTES;
  }
  __device__ __forceinline__ const char* column(unsigned index) const {
    return variables + index * stride;
  }
  // One group of rows of a place that is a level or a column.
  __device__ __forceinline__ Pack group(unsigned place, int g) const {
    return (place & 7u) == LEVEL ? load_level(level(place >> 3) + g * GROUP_BYTES)
                                 : load(column(place >> 3) + g * GROUP_BYTES);
  }
  // Likewise, with 0 in rows that are left out.
  __device__ __forceinline__ Pack used(unsigned place, int g) const {
    Pack pack = group(place, g);
    if (!full) {
#pragma unroll
      for (int j = 0; j < LANES; ++j) pack.lane[j] = inside(g, j) ? pack.lane[j] : (real)0;
    }
    return pack;
  }
};

__device__ __forceinline__ void fetch(real (&x)[ROWS], unsigned source, unsigned index,
                                      const Tile& tile) {
  if (source == SCALAR) {
    const real u = __ldg(tile.scalars + index);
    FOR_EACH_ROW(x[i] = u)
  } else {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      const Pack pack = tile.group(index << 3 | source, g);
#pragma unroll
      for (int j = 0; j < LANES; ++j) x[g * LANES + j] = pack.lane[j];
    }
  }
}

// Cheap operators: all rows unrolled. Others: a loop, because hot code must fit in the instruction
// cache; registers cannot be indexed, so the rows are rotated.
#define CHEAP(label, EXPRESSION) \
  case label: FOR_EACH_ROW(t[i] = EXPRESSION) break;
#define COSTLY(label, EXPRESSION)                                                   \
  case label:                                                                       \
    _Pragma("unroll 1") for (int k = 0; k < ROWS; k += 2) {                         \
      real r[2];                                                                    \
      _Pragma("unroll") for (int i = 0; i < 2; ++i) r[i] = EXPRESSION;              \
      _Pragma("unroll") for (int i = 0; i < ROWS - 2; ++i) {                        \
        t[i] = t[i + 2];                                                            \
        u[i] = u[i + 2];                                                            \
        v[i] = v[i + 2];                                                            \
      }                                                                             \
      t[ROWS - 2] = r[0];                                                           \
      t[ROWS - 1] = r[1];                                                           \
    }                                                                               \
    break;

// Runs the program on one tile; its results are stored in levels.
__device__ __forceinline__ void run(const uint4* code, unsigned count, const Tile& tile) {
  real t[ROWS], u[ROWS], v[ROWS];
  FOR_EACH_ROW(t[i] = 0; u[i] = 0; v[i] = 0)
  uint4 next = __ldg(code);
  for (unsigned left = count; left > 0; --left) {
    const uint4 now = next;
    next = __ldg(++code);
    const unsigned a = SOURCE_A(now.x), b = SOURCE_B(now.x), c = SOURCE_C(now.x);
    if (b == BEFORE) {
      FOR_EACH_ROW(u[i] = t[i])
    } else if (b) {
      fetch(u, b, now.z, tile);
    }
    if (c == BEFORE) {
      FOR_EACH_ROW(v[i] = t[i])
    } else if (c) {
      fetch(v, c, now.w >> 16, tile);
    }
    if (a != BEFORE) fetch(t, a, now.y, tile);
    // jump_table.py finds the switch by the comment in this instruction.
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
      for (int g = 0; g < GROUPS; ++g) {
        Pack pack;
#pragma unroll
        for (int j = 0; j < LANES; ++j) pack.lane[j] = t[g * LANES + j];
        store_level(place + g * GROUP_BYTES, pack);
      }
    }
  }
}

// In fast mode the products of a thread's own rows are float32; everything else is float64.
#if FAST
typedef float Term;
#else
typedef double Term;
#endif

#define SIDE 4  // columns that are multiplied with each other at a time

// Sums over a block of columns: of slope times column, and if wanted the lower triangle of
// products.
template <bool PRODUCTS>
__device__ __forceinline__ void add_diagonal(const Tile& tile, const unsigned* places, int first,
                                             int columns, unsigned slope, bool wants_slopes,
                                             bool weighs_slope, double* sums, double* products,
                                             int lane) {
  constexpr int N = PRODUCTS ? 16 : 4;
  const int width = min(SIDE, columns - first);
  Term terms[N] = {};
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    Pack packs[SIDE], s, w;
#pragma unroll
    for (int m = 0; m < SIDE; ++m)
      if (m < width) packs[m] = tile.used(__ldg(places + first + m), g);
    if (wants_slopes) s = tile.used(slope, g);
    if (tile.weights) w = load(tile.weights + g * GROUP_BYTES);
#pragma unroll
    for (int j = 0; j < LANES; ++j) {
      const Term weight = tile.weights ? (Term)w.lane[j] : (Term)1;
      const Term by = wants_slopes ? (Term)s.lane[j] * (weighs_slope ? weight : (Term)1) : (Term)0;
      Term c[SIDE];
#pragma unroll
      for (int m = 0; m < SIDE; ++m) {
        if (m >= width) continue;
        c[m] = (Term)packs[m].lane[j];
        if (wants_slopes) terms[m] += by * c[m];
        if (PRODUCTS) {
          const Term left = c[m] * weight;
#pragma unroll
          for (int n = 0; n <= m; ++n) terms[SIDE + m * (m + 1) / 2 + n] += left * c[n];
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
  if (index < width) {
    sums[first + index] += sum;
  } else if (index >= SIDE) {
    const int pair = index - SIDE, m = pair < 1 ? 0 : pair < 3 ? 1 : pair < 6 ? 2 : 3;
    const int n = pair - m * (m + 1) / 2;
    const int i = first + m, j = first + n;
    if (m < width && n <= m) products[i * (i + 1) / 2 + j] += sum;
  }
}

// Products of one block of columns with an earlier one.
__device__ __forceinline__ void add_square(const Tile& tile, const unsigned* places, int first,
                                           int second, int columns, double* products, int lane) {
  const int height = min(SIDE, columns - first);
  Term terms[SIDE * SIDE] = {};
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    Pack left[SIDE], right[SIDE], w;
#pragma unroll
    for (int m = 0; m < SIDE; ++m) {
      if (m < height) left[m] = tile.used(__ldg(places + first + m), g);
      right[m] = tile.used(__ldg(places + second + m), g);
    }
    if (tile.weights) w = load(tile.weights + g * GROUP_BYTES);
#pragma unroll
    for (int j = 0; j < LANES; ++j) {
      const Term weight = tile.weights ? (Term)w.lane[j] : (Term)1;
#pragma unroll
      for (int m = 0; m < SIDE; ++m) {
        if (m >= height) continue;
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
  if (lane % 2 == 0 && i < columns) products[i * (i + 1) / 2 + j] += sum;
}

// Sum of the row losses of this thread's rows, in float64. Squared and absolute deviations are
// computed from values and target, as in interpreter.cu; the program has computed other row losses.
__device__ __forceinline__ double row_losses(const Tile& tile, const Arguments& arguments,
                                             const Program& program) {
  const bool weighs = arguments.weighs_loss && tile.weights;
  const int deviation = arguments.deviation;
  const unsigned place = deviation ? program.result : program.loss;
  const char* const target = tile.column(arguments.target);
  double sum = 0.0;
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    const Pack l = tile.used(place, g);
    Pack y, w;
    if (deviation) y = load(target + g * GROUP_BYTES);
    if (weighs) w = load(tile.weights + g * GROUP_BYTES);
#pragma unroll
    for (int j = 0; j < LANES; ++j) {
      double term = (double)l.lane[j];
      if (deviation) {
        const double d = difference(l.lane[j], y.lane[j]);
        term = deviation == 1 ? d * d : fabs(d);
      }
      const double weight = weighs ? (double)w.lane[j] : 1.0;
      if (tile.full || tile.inside(g, j)) sum += weight * term;
    }
  }
  return sum;
}

__device__ __forceinline__ real factor_of(const Entry& entry, const real* scalars) {
  return entry.factor < 0 ? (real)1 : scalars[entry.factor];
}

// Stores the derivatives of a tile's values by each parameter.
__device__ void store_jacobian(const Tile& tile, const Arguments& arguments, const Program& program,
                               real* place) {
  for (unsigned parameter = 0; parameter < program.parameters; ++parameter) {
    real x[ROWS];
    FOR_EACH_ROW(x[i] = 0)
    for (unsigned k = 0; k < program.entries; ++k) {
      const Entry entry = arguments.entries[program.entry + k];
      const real factor = factor_of(entry, tile.scalars);
      if (entry.leaf != (int)parameter || factor == (real)0) continue;
      const unsigned column = arguments.columns[program.column + entry.column];
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        const Pack c = tile.group(column, g);
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

__device__ __forceinline__ void add_sums(const Tile& tile, const Arguments& arguments,
                                         const Program& program, double* sums, int lane) {
  const int columns = program.columns;
  const unsigned* const places = arguments.columns + program.column;
  double* const slopes = sums + 1;
  double* const products = slopes + columns;
  for (int first = 0; first < columns; first += SIDE) {
    if (arguments.wants_products) {
      add_diagonal<true>(tile, places, first, columns, program.slope, arguments.wants_slopes,
                         arguments.weighs_loss, slopes, products, lane);
      for (int second = 0; second < first; second += SIDE)
        add_square(tile, places, first, second, columns, products, lane);
    } else {
      add_diagonal<false>(tile, places, first, columns, program.slope, true,
                          arguments.weighs_loss, slopes, products, lane);
    }
  }
}

// Runs a job on one tile and adds to the sums, and to the loss of this lane's rows.
__device__ __forceinline__ void add_tile(const Arguments& arguments, const Program& program,
                                         int job, int vector, int number, Place levels,
                                         double* sums, double& loss, int lane) {
  const int tile_row = number * TILE, offset = tile_row + lane * LANES;
  Tile tile;
  tile.row = offset;
  tile.first_row = arguments.first_row;
  tile.end_row = arguments.end_row;
  tile.full = tile_row >= arguments.first_row && tile_row + TILE <= arguments.end_row;
  tile.stride = arguments.stride;
  tile.variables = (const char*)(arguments.variables + offset);
  tile.weights = arguments.weights ? (const char*)(arguments.weights + offset) : 0;
  tile.scalars = arguments.scalars + program.scalar + (unsigned long long)vector * program.scalars;
  tile.levels = levels;
  run(arguments.instructions + program.first, program.count, tile);
  if (arguments.wants_loss) loss += row_losses(tile, arguments, program);
  if (arguments.wants_slopes || arguments.wants_products)
    add_sums(tile, arguments, program, sums, lane);
  const long long pitch = (long long)arguments.tiles * TILE;
  if (arguments.values) {
    real* const place = arguments.values + (job - arguments.first_job) * pitch + offset;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
      *(Pack*)(place + g * 32 * LANES) = tile.group(program.result, g);
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
  const unsigned sum_bytes = (count * 8 + 15) / 16 * 16;
  const unsigned own_bytes = sum_bytes + program.levels * LEVEL_BYTES;
  const int workers = max(1u, min((unsigned)WARPS, arguments.shared_bytes / own_bytes));
#if FAR
  const unsigned long long need = arguments.warp_bytes;
  unsigned char* const memory =
      arguments.far + ((unsigned long long)blockIdx.y * gridDim.x + blockIdx.x) * WARPS * need;
#else
  extern __shared__ __align__(16) unsigned char memory[];
  const unsigned need = own_bytes;
#endif
  double* const sums = (double*)(memory + warp * need);
  // Tiles of the launch; those of the first block may begin before it.
  const int first_tile =
      (int)(blockIdx.x * BLOCK_TILES - arguments.first_tile % BLOCK_TILES);
  const int end_tile = min(first_tile + BLOCK_TILES, arguments.tiles);
  // A block of rows has WARPS parts. If there are fewer workers, they take several turns.
#pragma unroll 1
  for (int done = 0; done < WARPS; done += workers) {
    const int part = done + warp;
    if (warp < workers && part < WARPS) {
      for (unsigned k = lane; k < count; k += 32) sums[k] = 0.0;
      __syncwarp();
      double loss = 0.0;
#pragma unroll 1
      for (int number = first_tile + part; number < end_tile; number += WARPS) {
        if (number < 0) continue;
        add_tile(arguments, program, job, vector, number,
                 place_of(memory + warp * need + sum_bytes + lane * 16), sums, loss, lane);
      }
      loss = warp_sum(loss);
      if (lane == 0) sums[0] = loss;
    }
    __syncthreads();
    double* const partials =
        arguments.partials +
        (program.sum + (unsigned long long)vector * count) * arguments.blocks +
        (unsigned long long)blockIdx.x * count;
    for (unsigned k = threadIdx.x; k < count; k += blockDim.x) {
      double sum = done ? partials[k] : 0.0;
      for (int w = 0; w < min(workers, WARPS - done); ++w)
        sum += ((const double*)(memory + w * need))[k];
      partials[k] = sum;
    }
    if (done + workers < WARPS) __syncthreads();
  }
}

// Computes the scalars of every job: parameters, constants, and what depends on them alone. A warp
// a job, because jobs take different branches.
extern "C" __global__ void evaluate_scalars(const __grid_constant__ Arguments arguments) {
  const int job = __ldg(arguments.order + blockIdx.x);
  const int vector = job % arguments.vectors;
  const Program& program = arguments.programs[job / arguments.vectors];
  real* const scalars =
      arguments.scalars + program.scalar + (unsigned long long)vector * program.scalars;
  const double* const parameters =
      arguments.parameters + program.parameter + (unsigned long long)vector * program.parameters;
  for (unsigned k = threadIdx.x; k < program.loads; k += 32) {
    const Load load = arguments.loads[program.load + k];
    scalars[load.scalar] = (real)(load.parameter < 0 ? arguments.constants[program.load + k]
                                                     : parameters[load.parameter]);
  }
  __syncwarp();
  if (threadIdx.x) return;
  for (unsigned k = 0; k < program.prologue_count; ++k) {
    const uint4 now = arguments.instructions[program.prologue + k];
    real t[1] = {scalars[now.y]};
    const real u[1] = {scalars[now.z]}, v[1] = {scalars[now.w >> 16]};
    const int i = 0;
    switch (now.x & LABEL_MASK) {
@SCALAR_CASES@
    }
    scalars[now.w & 0xffffu] = t[0];
  }
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
  const real* const scalars =
      arguments.scalars + program.scalar + (unsigned long long)vector * program.scalars;
  const Entry* const entries = arguments.entries + program.entry;
  if (threadIdx.x == 0 && arguments.losses) arguments.losses[job] = one_nan(sums[0]);
  const double* const slopes = sums + 1;
  const double* const products = slopes + program.columns;
  const double scale = arguments.is_squares ? 2.0 : 1.0;
  const int leaves = program.parameters + arguments.variable_count;
  for (int k = threadIdx.x; k < leaves; k += COMBINE_THREADS) {
    const int leaf = k < program.parameters ? k : -1 - (k - (int)program.parameters);
    double* const rows = leaf >= 0 ? arguments.gradients : arguments.variable_gradients;
    if (!rows) continue;
    double sum = 0.0;
    for (unsigned e = 0; e < program.entries; ++e) {
      const Entry entry = entries[e];
      if (entry.leaf != leaf) continue;
      const double factor = (double)factor_of(entry, scalars), total = slopes[entry.column];
      if (factor != 0.0 && total != 0.0) sum += scale * factor * total;
    }
    if (leaf >= 0)
      rows[program.parameter + (long long)vector * program.parameters + leaf] = one_nan(sum);
    else
      rows[(long long)job * arguments.variable_count + (-1 - leaf)] = one_nan(sum);
  }
  if (!arguments.curvatures) return;
  const unsigned size = program.parameters * (program.parameters + 1) / 2;
  double* const triangle = arguments.curvatures + program.triangle + (long long)vector * size;
  for (unsigned k = threadIdx.x; k < size; k += COMBINE_THREADS) {
    int p = (int)((sqrt(8.0 * k + 1.0) - 1.0) / 2.0);
    while ((unsigned)(p + 1) * (p + 2) / 2 <= k) ++p;
    while ((unsigned)p * (p + 1) / 2 > k) --p;
    const int q = (int)k - p * (p + 1) / 2;
    double sum = 0.0;
    for (unsigned first = 0; first < program.entries; ++first) {
      const Entry left = entries[first];
      if (left.leaf != p) continue;
      const double a = (double)factor_of(left, scalars);
      for (unsigned second = 0; second < program.entries; ++second) {
        const Entry right = entries[second];
        if (right.leaf != q) continue;
        const double b = (double)factor_of(right, scalars);
        const int i = max(left.column, right.column), j = min(left.column, right.column);
        const double total = products[i * (i + 1) / 2 + j];
        if (a != 0.0 && b != 0.0 && total != 0.0) sum += a * b * total;
      }
    }
    triangle[k] = one_nan(sum);
  }
}

