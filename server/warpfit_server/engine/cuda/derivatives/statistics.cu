// Statistics of values that stay on the device: of leaves of LEAF_ROWS rows, counted from the data
// set's first row, then of all rows, merged in pairs as the tree of sums says. The formulas are
// those of cpu/interpreter.py, which explains them.

#define LEAF_ROWS 1024
#define STATISTICS_THREADS 256

// Statistics of some rows; means are counted from the first row, so that a large mean costs no
// digits. NODE_STATISTICS of launches.py has as many numbers.
struct Statistics {
  double sum, least, greatest, strange, missing;
  double total, mean_f, mean_y, squares_f, squares_y, products, residual, first_f, first_y;
};

struct StatisticsArguments {
  const real* values;    // [jobs, pitch], at the first row of the first tile, like the next two
  const real* target;    // null: no moments
  const real* weights;   // null: 1 for every row
  double* leaves;        // leaf_count times the Statistics of all jobs, leaf_pitch numbers apart
  double* nodes;         // likewise, node_pitch numbers apart; null: these are all rows
  double* reductions;    // [jobs, 5]; null: not wanted
  double* moments;       // [jobs, 7]; null: not wanted
  long long pitch;
  long long first_row;   // rows of the first tile to leave out
  long long end_row;     // end of the rows, counted from the first row of the first tile
  long long before;      // rows of the data set before the first tile
  long long first_leaf;  // number of the first leaf
  long long rows;        // all rows
  long long leaf_pitch;
  long long node_pitch;
  int leaf_count;
  int node;              // place of the first node among the nodes
  int node_levels;       // of the tree to merge
};

__device__ __forceinline__ Statistics& statistics_of(double* rows, long long row, long long pitch,
                                                     unsigned job) {
  return ((Statistics*)(rows + row * pitch))[job];
}

#define SLOPE(s) ((s).squares_f == 0.0 ? 0.0 : (s).products / (s).squares_f)

// Adds the statistics of the rows that follow.
__device__ void merge(Statistics& into, const Statistics& other) {
  into.sum += other.sum;
  into.least = fmin(into.least, other.least);
  into.greatest = fmax(into.greatest, other.greatest);
  into.strange += other.strange;
  into.missing += other.missing;
  if (other.total == 0.0 && other.mean_f == 0.0) return;
  const Statistics one = into;
  if (one.total == 0.0 && one.mean_f == 0.0) {
    into = other;
    into.sum = one.sum, into.least = one.least, into.greatest = one.greatest;
    into.strange = one.strange, into.missing = one.missing;
    return;
  }
  const double df = (other.first_f - one.first_f) + (other.mean_f - one.mean_f);
  const double dy = (other.first_y - one.first_y) + (other.mean_y - one.mean_y);
  into.total += other.total;
  const double share = other.total / into.total, common = one.total * share;
  const double slope = SLOPE(one), other_slope = SLOPE(other), turn = slope - other_slope;
  const double left = dy - slope * df, other_left = dy - other_slope * df;
  const double squares = one.squares_f, others = other.squares_f;
  const double whole = squares + others + df * df * common;
  into.residual += other.residual;
  if (whole == 0.0)
    into.residual += common * dy * dy;
  else
    into.residual += others * (squares / whole) * turn * turn +
                     common * (squares / whole) * left * left +
                     common * (others / whole) * other_left * other_left;
  into.mean_f += df * share;
  into.mean_y += dy * share;
  into.squares_f = whole;
  into.squares_y += other.squares_y + dy * dy * common;
  into.products += other.products + df * dy * common;
}

// STATEMENT uses the row number, and w, df and dy: its weight, and values from the first row's.
#define FOR_EACH_ROW_OF_LEAF(STATEMENT)                                              \
  for (long long row = first + lane; row < end; row += 32) {                         \
    const double w = arguments.weights ? (double)arguments.weights[row] : 1.0;       \
    const double df = (double)f[row] - found.first_f - found.mean_f;                 \
    const double dy = (double)arguments.target[row] - found.first_y - found.mean_y;  \
    STATEMENT                                                                        \
  }

// Measures a leaf, from row `first` to row `end`, by a warp.
__device__ void measure_moments(const StatisticsArguments& arguments, const real* f,
                                long long first, long long end, int lane, Statistics& found) {
  found.first_f = (double)f[first];
  found.first_y = (double)arguments.target[first];
  double total = 0.0, sum_f = 0.0, sum_y = 0.0;
  FOR_EACH_ROW_OF_LEAF(total += w; sum_f += w * df; sum_y += w * dy;)
  total = warp_sum(total);
  sum_f = warp_sum(sum_f);
  sum_y = warp_sum(sum_y);
  if (total == 0.0 && sum_f == 0.0) return;
  found.total = total;
  found.mean_f = sum_f / total;
  found.mean_y = sum_y / total;
  double squares_f = 0.0, squares_y = 0.0, products = 0.0, residual = 0.0;
  FOR_EACH_ROW_OF_LEAF(squares_f += w * df * df; squares_y += w * dy * dy; products += w * df * dy;)
  found.squares_f = warp_sum(squares_f);
  found.squares_y = warp_sum(squares_y);
  found.products = warp_sum(products);
  const double slope = SLOPE(found);
  FOR_EACH_ROW_OF_LEAF(const double left = dy - slope * df; residual += w * left * left;)
  found.residual = warp_sum(residual);
}

__device__ void reduce_values(const real* f, long long first, long long end, int lane,
                              Statistics& found) {
  const double infinity = __longlong_as_double(0x7ff0000000000000);
  double sum = 0.0, least = infinity, greatest = -infinity, strange = 0.0, missing = 0.0;
  for (long long row = first + lane; row < end; row += 32) {
    const double value = (double)f[row];
    sum += value;
    least = value < least ? value : least;
    greatest = value > greatest ? value : greatest;
    if (value != value) missing += 1.0;
    if (!(fabs(value) < infinity)) strange += 1.0;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    least = fmin(least, __shfl_xor_sync(FULL, least, step));
    greatest = fmax(greatest, __shfl_xor_sync(FULL, greatest, step));
  }
  found.sum = warp_sum(sum);
  found.least = least;
  found.greatest = greatest;
  found.strange = warp_sum(strange);
  found.missing = warp_sum(missing);
}

// Measures the leaves; a warp a leaf, a column of blocks a job.
extern "C" __global__ void __launch_bounds__(STATISTICS_THREADS)
measure(const __grid_constant__ StatisticsArguments arguments) {
  const int lane = threadIdx.x % 32;
  const long long leaf = blockIdx.x * (STATISTICS_THREADS / 32) + threadIdx.x / 32;
  if (leaf >= arguments.leaf_count) return;
  const long long at = (arguments.first_leaf + leaf) * LEAF_ROWS - arguments.before;
  const long long first = max(at, arguments.first_row);
  const long long end = min(at + LEAF_ROWS, arguments.end_row);
  const real* const f = arguments.values + blockIdx.y * arguments.pitch;
  Statistics found = {};
  if (arguments.reductions) reduce_values(f, first, end, lane, found);
  if (arguments.target) measure_moments(arguments, f, first, end, lane, found);
  if (lane == 0) statistics_of(arguments.leaves, leaf, arguments.leaf_pitch, blockIdx.y) = found;
}

// Merges the leaves of each job and writes its results, or its nodes; a block a job.
extern "C" __global__ void __launch_bounds__(STATISTICS_THREADS)
merge_leaves(const __grid_constant__ StatisticsArguments arguments) {
#define LEAF(n) statistics_of(arguments.leaves, n, arguments.leaf_pitch, blockIdx.x)
  const long long start = arguments.first_leaf;
  const long long last = start + arguments.leaf_count - 1;
  const int levels = arguments.node_levels;
  for (int level = 0; level < levels && start >> level != last >> level; ++level) {
    // The left of each pair of nodes; a node stays where its first leaf was.
    const long long lowest = start >> (level + 1), pairs = (last >> (level + 1)) - lowest + 1;
    for (long long pair = threadIdx.x; pair < pairs; pair += STATISTICS_THREADS) {
      const long long right = (2 * (lowest + pair) + 1) << level;
      if (right <= start || right > last) continue;
      merge(LEAF(max(right - (1ll << level), start) - start), LEAF(right - start));
    }
    __syncthreads();
  }
  if (arguments.nodes) {
    const long long nodes = parent_count(start, arguments.leaf_count, levels);
    for (long long n = threadIdx.x; n < nodes; n += STATISTICS_THREADS)
      statistics_of(arguments.nodes, arguments.node + n, arguments.node_pitch, blockIdx.x) =
          LEAF(parent_place(start, n, levels));
    return;
  }
  if (threadIdx.x) return;
  const Statistics& all = LEAF(0);
  if (arguments.reductions) {
    double* const results = arguments.reductions + 5ll * blockIdx.x;
    const double nan = __longlong_as_double(0x7ff8000000000000);
    results[0] = one_nan(all.sum);
    results[1] = one_nan(all.sum / (double)arguments.rows);
    results[2] = all.missing > 0.0 ? nan : all.least;
    results[3] = all.missing > 0.0 ? nan : all.greatest;
    results[4] = all.strange;
  }
  if (arguments.moments) {
    double* const results = arguments.moments + 7ll * blockIdx.x;
    results[0] = one_nan(all.total);
    results[1] = one_nan(all.mean_f + all.first_f);
    results[2] = one_nan(all.mean_y + all.first_y);
    results[3] = one_nan(all.squares_f);
    results[4] = one_nan(all.squares_y);
    results[5] = one_nan(all.products);
    results[6] = one_nan(all.residual);
  }
}
