// The kernels of programs with derivatives. The interpreter, derivatives.cu, precedes this; what it
// computes of a tile is summed up here: the losses, slope times column for each column, and products
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
