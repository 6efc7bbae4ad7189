// A colony on the device: breeding, screening, fits of near misses, and what is kept of it.
// colony.py completes the text: the types and operators precede it, and the names between at signs
// are replaced by switches over the operators and by the functions of genome.py.
//
// What is computed of the formulas of a generation depends on no order: a place is written by its
// own child alone, and what children have in common is the greatest or the least of something.

// One colony, and a launch over ``count`` of its children from ``first`` on.
struct Colony {
  int* grammar;
  int* units;                // of target and columns, see genome.py
  unsigned char* codes;      // population, [formulas, width]
  float* values;
  int* lengths;
  float* scores;
  float* early_scores;       // scores on the first rows
  unsigned char* child_codes;
  float* child_values;
  int* child_lengths;
  float* child_losses;
  float* child_early;        // losses on the first rows
  float* ratios;             // early score over that of the place; infinite if no fit may help
  unsigned long long* hashes;
  const int* places;         // of the children; null: child i competes for place i
  unsigned long long* tried;
  int* registers;
  unsigned long long* fits;  // how many there have been
  unsigned long long* best_keys;  // [sizes]; loss and number of the best child of each size
  unsigned char* best_codes;
  float* best_values;
  int* best_lengths;
  float* best_losses;
  float* best_early;         // losses on the first rows
  float* island_scores;      // [islands]; the best score of each
  const float* parsimony;    // [islands]
  const real* matrix;        // variables, [columns, pitch]
  const double* target;      // [rows]; minus its mean if an intercept is fitted
  const double* weights;     // [rows]; their sum is 1
  unsigned long long seed;
  unsigned long long generation;
  unsigned long long mask;
  double spread;             // variance of the target
  double floor;
  double least_spread;
  double close;              // least ratio of a child that is not worth all rows
  double first_weight;       // of the first rows: the sum of weights,
  double first_target;       // that of weights times target,
  double first_squares;      // and that of weights times its square
  int formulas;
  int island;
  int sizes;
  int rows;
  int first_rows;
  int pitch;
  int fitted;                // numbers around f: 2 for slope and intercept, 1 for a slope
  int group;                 // children of which one is fitted
  int iterations;            // of a fit
  int tries;                 // of a structure with constants
  int first;
  int count;
};

#define NEVER __int_as_float(0x7f800000)
#define NO_KEY 0xffffffffffffffffull

// Rows of which a thread has values at the same time: 16 bytes of each operand.
#define LANES (16 / REAL_BYTES)
#define STEP (32 * LANES)
// A stack whose lowest operand is never read.
#define MOST_HEIGHT (MOST_WIDTH * 2 / 3 + 2)
struct __align__(16) Lanes {
  real of[LANES];
};

@CALLED@

__device__ float apply_operator(int code, float a, float b, float c) {
  switch (code) {
@SCALARS@
  }
  return nanf("");
}

@GENOME@

extern "C" __global__ void __launch_bounds__(128) populate(const __grid_constant__ Colony own) {
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= own.count) return;
  unsigned long long random[1], words[MOST_WIDTH];
  int work[MOST_WIDTH];
  const int formula = own.first + index;
  start_random(random, own.seed, own.generation, formula);
  int* const grammar = own.grammar;
  const int place = formula * grammar[WIDTH];
  const int length = first_formula(grammar, own.units, random, own.child_codes, own.child_values,
                                   place, work);
  own.child_lengths[formula] = length;
  if (length > 0) {
    own.hashes[formula] = structure_hash(grammar, own.child_codes, own.child_values, place, length,
                                         words);
  }
}

extern "C" __global__ void __launch_bounds__(128) breed_children(
    const __grid_constant__ Colony own) {
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= own.count) return;
  unsigned long long random[1], words[MOST_WIDTH];
  int work[MOST_WIDTH];
  const int formula = own.first + index;
  start_random(random, own.seed, own.generation, formula);
  int* const grammar = own.grammar;
  own.child_lengths[formula] = breed(
      grammar, own.units, random, own.codes, own.values, own.lengths, own.scores, own.formulas,
      own.island, formula, own.child_codes, own.child_values, own.hashes, own.tried, own.mask,
      own.tries, work, words);
}

// ---------------------------------------------------------------------------------------- values

#define EACH _Pragma("unroll") for (int lane = 0; lane < LANES; ++lane)
#define UNARY(function)                                              \
  EACH top.of[lane] = function(top.of[lane]);                        \
  break;
#define BINARY(function)                                             \
  --height;                                                          \
  EACH top.of[lane] = function(stack[height].of[lane], top.of[lane]); \
  break;
#define TERNARY(function)                                            \
  height -= 2;                                                       \
  EACH top.of[lane] =                                                \
      function(stack[height].of[lane], stack[height + 1].of[lane], top.of[lane]); \
  break;

// Values of a formula on LANES rows, from ``row`` on; all threads of a warp have the same formula.
__device__ __noinline__ Lanes values_at(const unsigned char* codes, const float* values, int length,
                                        const real* matrix, int pitch, int row) {
  Lanes stack[MOST_HEIGHT], top = {};
  int height = 0;  // of the operands below the top
  for (int token = 0; token < length; ++token) {
    const float value = values[token];
    switch (codes[token]) {
      case CONSTANT_CODE:
        stack[height++] = top;
        EACH top.of[lane] = value;
        break;
      case VARIABLE_CODE:
        stack[height++] = top;
        top = *(const Lanes*)(matrix + (long long)(int)value * pitch + row);
        break;
@CASES@
    }
  }
  return top;
}

// A formula of a warp, in shared memory.
struct Formula {
  unsigned char codes[MOST_WIDTH];
  float values[MOST_WIDTH];
  int length;
  int size;
};

// Reads a child; a warp.
__device__ __forceinline__ void read_child(const Colony& own, int child, Formula& formula, int lane) {
  const int length = own.child_lengths[child];
  const long long from = (long long)child * own.grammar[WIDTH];
  int size = 0;
  for (int token = lane; token < length; token += 32) {
    const int code = own.child_codes[from + token];
    formula.codes[token] = code;
    formula.values[token] = own.child_values[from + token];
    size += own.grammar[COMPLEXITY + code];
  }
  size = (int)warp_sum((double)size);
  if (lane == 0) formula.length = length, formula.size = size;
  __syncwarp();
}

// ---------------------------------------------------------------------------------------- losses

// The best a + b f of a formula, from sums over rows of f - pivot.
struct Line {
  double pivot, slope, own_mean, products;
  double errors;  // of f itself, if neither slope nor intercept is fitted
  bool varies;
};

// Finds the line on the first so many rows, whose weights and weighted targets have these sums; a
// warp. Values that hardly vary, or whose squares are no numbers, have no slope.
__device__ __noinline__ Line line_of(const Colony& own, const Formula& formula, int rows, double weight,
                        double target, int lane) {
  Line line = {};
  double sum = 0.0, squares = 0.0, products = 0.0;
  for (int start = 0; start < rows; start += STEP) {
    const int row = start + lane * LANES;
    const Lanes values = values_at(formula.codes, formula.values, formula.length, own.matrix,
                                   own.pitch, row);
    if (start == 0 && own.fitted == 2) line.pivot = __shfl_sync(FULL, values.of[0], 0);
#pragma unroll
    for (int i = 0; i < LANES; ++i) {
      if (row + i >= rows) break;
      const double d = (double)values.of[i] - line.pivot, y = own.target[row + i];
      const double weighted = own.weights[row + i] * d;
      sum += weighted;
      squares += weighted * d;
      products += own.fitted ? weighted * y : own.weights[row + i] * (y - d) * (y - d);
    }
  }
  sum = warp_sum(sum), squares = warp_sum(squares), products = warp_sum(products);
  if (own.fitted == 0) {
    line.slope = 1.0, line.errors = products, line.varies = true;
    return line;
  }
  if (own.fitted == 2) {
    line.own_mean = line.pivot + sum / weight;
    squares -= sum * sum / weight;
    products -= sum * target / weight;
  }
  const double deviation = sqrt(squares / weight);
  line.varies = deviation > LEAST_DEVIATION && deviation < MOST_DEVIATION &&
                deviation > own.least_spread * fabs(line.own_mean);
  line.products = products, line.slope = products / squares;
  return line;
}

// Loss on the first rows, relative to that of the best constant; a warp. It says no more than
// whether a formula is worth all rows, so that it may be a difference of sums.
__device__ float first_loss(const Colony& own, const Formula& formula, int lane) {
  const Line line = line_of(own, formula, own.first_rows, own.first_weight, own.first_target, lane);
  if (!line.varies) return NEVER;
  double errors = line.errors;
  if (own.fitted) {
    errors = own.first_squares - line.slope * line.products;
    if (own.fitted == 2) errors -= own.first_target * own.first_target / own.first_weight;
    errors = errors < 0.0 ? 0.0 : errors;
  }
  return errors >= 0.0 ? (float)(errors / (own.first_weight * own.spread)) : NEVER;
}

// The same on all rows.
__device__ float whole_loss(const Colony& own, const Formula& formula, int lane) {
  const Line line = line_of(own, formula, own.rows, 1.0, 0.0, lane);
  if (!line.varies) return NEVER;
  double errors = line.errors;
  if (own.fitted) {
    errors = 0.0;
    for (int start = 0; start < own.rows; start += STEP) {
      const int row = start + lane * LANES;
      const Lanes values = values_at(formula.codes, formula.values, formula.length, own.matrix,
                                     own.pitch, row);
#pragma unroll
      for (int i = 0; i < LANES; ++i) {
        if (row + i >= own.rows) break;
        const double error = own.target[row + i] - line.slope * (values.of[i] - line.own_mean);
        errors += own.weights[row + i] * error * error;
      }
    }
    errors = warp_sum(errors);
  }
  return errors >= 0.0 ? (float)(errors / own.spread) : NEVER;
}

__device__ __forceinline__ float score_of(const Colony& own, float loss, int size, int place) {
  const double weight = 1.0 + own.parsimony[place / own.island] * size;
  return (float)(fmax((double)loss, own.floor) * weight);
}

// Finds the losses of a child; a warp. That on all rows is infinite of a child that is better on
// the first ones neither than the formula in its place nor than the best of its size.
__device__ __noinline__ void screen(const Colony& own, const Formula& formula, int place, int lane, float& loss,
                       float& early, float& ratio) {
  early = first_loss(own, formula, lane);
  loss = ratio = NEVER;
  if (!(early < NEVER)) return;
  const float known = own.early_scores[place];
  ratio = known < NEVER ? score_of(own, early, formula.size, place) / known : 0.0f;
  const bool is_close = early < own.close * own.best_early[min(formula.size, own.sizes - 1)];
  if (is_close || ratio < own.close) loss = whole_loss(own, formula, lane);
}

extern "C" __global__ void __launch_bounds__(128) screen_children(
    const __grid_constant__ Colony own) {
  __shared__ Formula formulas[4];
  const int index = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (index >= own.count) return;
  const int child = own.first + index;
  Formula& formula = formulas[threadIdx.x / 32];
  read_child(own, child, formula, lane);
  float loss = NEVER, early = NEVER, ratio = NEVER;
  if (formula.length > 0) {
    screen(own, formula, own.places ? own.places[index] : child, lane, loss, early, ratio);
  }
  int constants = 0;
  for (int token = lane; token < formula.length; token += 32) {
    constants += formula.codes[token] == CONSTANT_CODE;
  }
  const bool may_be_fitted = warp_sum((double)constants) > 0.0 && !own.places;
  if (lane > 0) return;
  own.child_losses[child] = loss;
  own.child_early[child] = early;
  own.ratios[child] = may_be_fitted ? ratio : NEVER;
}

// Lets a child take the place of a worse formula, and notes its structure and the best of each
// size; a warp.
__device__ void compete(const Colony& own, int child, int place, int lane) {
  const int width = own.grammar[WIDTH], length = own.child_lengths[child];
  const long long from = (long long)child * width, to = (long long)place * width;
  const float loss = own.child_losses[child];
  int better = 0;
  if (lane == 0) {
    const unsigned long long word = own.hashes[child];
    atomicMax(own.tried + (word & own.mask), tried_mark(word, own.generation));
    atomicMax(own.registers + (word >> 52), min(52, __clzll(word << 12)) + 1);
    const int size = size_of(own.grammar, own.child_codes + from, 0, length);
    const float score = score_of(own, loss, size, place);
    better = score < own.scores[place] * BETTER || own.lengths[place] == 0;
    if (better) {
      own.scores[place] = score;
      own.early_scores[place] = score_of(own, own.child_early[child], size, place);
      own.lengths[place] = length;
    }
    if (size < own.sizes && loss < own.best_losses[size] * BETTER) {
      atomicMin(own.best_keys + size,
                (unsigned long long)(unsigned)__float_as_int(loss) << 32 | (unsigned)child);
    }
  }
  if (!__shfl_sync(FULL, better, 0)) return;
  for (int token = lane; token < length; token += 32) {
    own.codes[to + token] = own.child_codes[from + token];
    own.values[to + token] = own.child_values[from + token];
  }
}

extern "C" __global__ void __launch_bounds__(128) keep_children(
    const __grid_constant__ Colony own) {
  const int index = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (index >= own.count) return;
  const int child = own.first + index;
  if (own.child_lengths[child] == 0) return;
  compete(own, child, own.places ? own.places[index] : child, lane);
}

// ------------------------------------------------------------------------------------------ fits

// Memory of the fit of a warp.
struct Fit {
  Formula formula;
  real columns[MOST_CONSTANTS + 1][FIT_ROWS];  // derivatives of f by each constant, then f
  double normal[MOST_CONSTANTS + 1][MOST_CONSTANTS + 2];
  double factor[MOST_CONSTANTS + 1][MOST_CONSTANTS + 1];
  double step[MOST_CONSTANTS + 1];
  float old[MOST_CONSTANTS];
  unsigned char tokens[MOST_CONSTANTS];  // of the constants
  int count;
  int is_solved;
};

// Computes f into a column.
__device__ __noinline__ void fill(const Colony& own, Fit& fit, real* column, int rows, int lane) {
  const Formula& formula = fit.formula;
  __syncwarp();
  for (int start = 0; start < rows; start += STEP) {
    const int row = start + lane * LANES;
    const Lanes values = values_at(formula.codes, formula.values, formula.length, own.matrix,
                                   own.pitch, row);
#pragma unroll
    for (int i = 0; i < LANES; ++i) {
      if (row + i < rows) column[row + i] = values.of[i];
    }
  }
  __syncwarp();
}

// Weighted mean of a column on the fit's rows.
__device__ double mean_of(const Colony& own, const real* column, int rows, double weight, int lane) {
  double sum = 0.0;
  for (int row = lane; row < rows; row += 32) sum += own.weights[row] * column[row];
  return warp_sum(sum) / weight;
}

// Slope and loss of a column of values of f, whose loss is relative to that of the best constant.
__device__ __noinline__ double column_loss(const Colony& own, const real* column, int rows, double weight,
                              double mean, int lane, double& slope) {
  const double own_mean = own.fitted == 2 ? mean_of(own, column, rows, weight, lane) : 0.0;
  double squares = 0.0, products = 0.0, errors = 0.0;
  for (int row = lane; row < rows; row += 32) {
    const double d = column[row] - own_mean;
    squares += own.weights[row] * d * d;
    products += own.weights[row] * d * (own.target[row] - mean);
  }
  squares = warp_sum(squares), products = warp_sum(products);
  slope = own.fitted ? products / squares : 1.0;
  for (int row = lane; row < rows; row += 32) {
    const double error = own.target[row] - mean - slope * (column[row] - own_mean);
    errors += own.weights[row] * error * error;
  }
  return warp_sum(errors) / (weight * own.spread);
}

// Fills in the normal equations of a step of the constants, and of the slope if it is fitted: the
// products of the derivatives of a + b f, and in the last column those with the residuals. Returns
// the number of unknowns.
__device__ int fill_normal(const Colony& own, Fit& fit, int rows, double weight, double mean,
                           double slope, int lane) {
  const int count = fit.count, unknowns = own.fitted ? count + 1 : count;
  if (own.fitted == 2) {
    for (int place = 0; place <= count; ++place) {
      const double own_mean = mean_of(own, fit.columns[place], rows, weight, lane);
      for (int row = lane; row < rows; row += 32) fit.columns[place][row] -= own_mean;
    }
  }
  for (int i = 0; i < unknowns; ++i) {
    const double scale = i < count ? slope : 1.0;
    for (int j = 0; j <= i + 1; ++j) {  // the last one is the right side
      double sum = 0.0;
      for (int row = lane; row < rows; row += 32) {
        const double other = j <= i ? (double)fit.columns[j][row]
                                    : own.target[row] - mean - slope * fit.columns[count][row];
        sum += own.weights[row] * fit.columns[i][row] * other;
      }
      sum = warp_sum(sum) * scale;
      if (lane > 0) continue;
      if (j <= i) fit.normal[i][j] = sum * (j < count ? slope : 1.0);
      else fit.normal[i][unknowns] = sum;
    }
  }
  __syncwarp();
  return unknowns;
}

// Solves damped normal equations by Cholesky's method; a thread.
__device__ bool solve(Fit& fit, int size, double damping) {
  for (int i = 0; i < size; ++i) {
    for (int j = 0; j <= i; ++j) {
      double value = fit.normal[i][j] * (i == j ? 1.0 + damping : 1.0);
      for (int k = 0; k < j; ++k) value -= fit.factor[i][k] * fit.factor[j][k];
      if (i > j) {
        fit.factor[i][j] = value / fit.factor[j][j];
      } else {
        if (!(value > 1e-14 * fit.normal[i][i])) return false;
        fit.factor[i][i] = sqrt(value);
      }
    }
  }
  for (int i = 0; i < size; ++i) {
    double value = fit.normal[i][size];
    for (int k = 0; k < i; ++k) value -= fit.factor[i][k] * fit.step[k];
    fit.step[i] = value / fit.factor[i][i];
  }
  for (int i = size - 1; i >= 0; --i) {
    double value = fit.step[i];
    for (int k = i + 1; k < size; ++k) value -= fit.factor[k][i] * fit.step[k];
    fit.step[i] = value / fit.factor[i][i];
    if (!(fabs(fit.step[i]) < 1e300)) return false;
  }
  return true;
}

// Fits the constants of a formula to some of the first rows, as the CPU's colony does
// (engine/cpu/colony.py); returns whether it became better.
__device__ bool fit_constants(const Colony& own, Fit& fit, int lane) {
  Formula& formula = fit.formula;
  const int rows = min(own.first_rows, FIT_ROWS);
  if (lane == 0) {
    fit.count = 0;
    for (int token = 0; token < formula.length && fit.count < MOST_CONSTANTS; ++token) {
      if (formula.codes[token] == CONSTANT_CODE) fit.tokens[fit.count++] = token;
    }
  }
  __syncwarp();
  const int count = fit.count;
  double weight = 0.0, mean = 0.0, slope;
  for (int row = lane; row < rows; row += 32) {
    weight += own.weights[row];
    mean += own.weights[row] * own.target[row];
  }
  weight = warp_sum(weight), mean = own.fitted == 2 ? warp_sum(mean) / weight : 0.0;
  real* const column = fit.columns[count];
  fill(own, fit, column, rows, lane);
  double loss = column_loss(own, column, rows, weight, mean, lane, slope), damping = FIRST_DAMPING;
  bool is_better = false;
  for (int iteration = 0; iteration < own.iterations && loss < 1e300; ++iteration) {
    for (int place = 0; place < count; ++place) {
      float& value = formula.values[fit.tokens[place]];
      const float old = value, moved = old + DIFFERENCE * (fabsf(old) + LEAST_SIZE);
      __syncwarp();
      if (lane == 0) value = moved;
      fill(own, fit, fit.columns[place], rows, lane);
      if (lane == 0) value = old;
      for (int row = lane; row < rows; row += 32) {
        fit.columns[place][row] = (fit.columns[place][row] - column[row]) / (moved - old);
      }
      __syncwarp();
    }
    const int unknowns = fill_normal(own, fit, rows, weight, mean, slope, lane);
    bool is_taken = false;
    for (int trial = 0; trial < FIT_TRIALS && !is_taken; ++trial) {
      if (lane == 0) fit.is_solved = solve(fit, unknowns, damping);
      __syncwarp();
      if (!fit.is_solved) break;
      if (lane < count) {
        float& value = formula.values[fit.tokens[lane]];
        fit.old[lane] = value;
        value = (float)fmax(-LARGEST_CONSTANT, fmin(LARGEST_CONSTANT, value + fit.step[lane]));
      }
      fill(own, fit, column, rows, lane);
      const double found = column_loss(own, column, rows, weight, mean, lane, slope);
      is_taken = found < loss * BETTER;
      if (is_taken) {
        loss = found, damping *= 0.2;
      } else {
        damping *= 8.0;
        if (lane < count) formula.values[fit.tokens[lane]] = fit.old[lane];
      }
      __syncwarp();
    }
    if (!is_taken) break;
    is_better = true;
  }
  return is_better;
}

// Fits the child that came closest to its place among those of each group; a warp each.
extern "C" __global__ void __launch_bounds__(FIT_THREADS) fit_children(
    const __grid_constant__ Colony own) {
  __shared__ Fit fits[FIT_THREADS / 32];
  const int index = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (index >= own.count) return;
  const int groups = (own.island + own.group - 1) / own.group, island = index / groups;
  const int first = island * own.island + index % groups * own.group;
  const int stop = min(first + own.group, (island + 1) * own.island);
  unsigned long long key = NO_KEY;
  for (int child = first + lane; child < stop; child += 32) {
    const unsigned long long ratio = (unsigned)__float_as_int(own.ratios[child]);
    if (own.ratios[child] < NEVER) key = min(key, ratio << 32 | (unsigned)child);
  }
  for (int step = 16; step > 0; step /= 2) key = min(key, __shfl_xor_sync(FULL, key, step));
  if (key == NO_KEY) return;
  const int child = (int)(unsigned)key, width = own.grammar[WIDTH];
  Fit& fit = fits[threadIdx.x / 32];
  read_child(own, child, fit.formula, lane);
  if (lane == 0) atomicAdd(own.fits, 1ull);
  if (!fit_constants(own, fit, lane)) return;
  float loss, early, ratio;
  screen(own, fit.formula, child, lane, loss, early, ratio);
  if (!(loss < own.child_losses[child])) return;
  for (int token = lane; token < fit.formula.length; token += 32) {
    own.child_values[(long long)child * width + token] = fit.formula.values[token];
  }
  __syncwarp();
  if (lane == 0) own.child_losses[child] = loss, own.child_early[child] = early;
  __syncwarp();
  compete(own, child, child, lane);
}

// ------------------------------------------------------------------------------------ the colony

// Copies the best child of each size, if it is better than what there was; a warp each.
extern "C" __global__ void __launch_bounds__(32) note_best(const __grid_constant__ Colony own) {
  const int size = blockIdx.x, lane = threadIdx.x;
  const unsigned long long key = own.best_keys[size];
  if (key == NO_KEY) return;
  const int width = own.grammar[WIDTH], child = (int)(unsigned)key;
  const int length = own.child_lengths[child];
  for (int token = lane; token < length; token += 32) {
    own.best_codes[size * width + token] = own.child_codes[(long long)child * width + token];
    own.best_values[size * width + token] = own.child_values[(long long)child * width + token];
  }
  __syncwarp();
  if (lane > 0) return;
  own.best_lengths[size] = length;
  own.best_losses[size] = __int_as_float((int)(key >> 32));
  own.best_early[size] = own.child_early[child];
  own.best_keys[size] = NO_KEY;
}

// Finds the best score of each island; a block each.
extern "C" __global__ void __launch_bounds__(128) score_islands(
    const __grid_constant__ Colony own) {
  __shared__ int least;  // floats that are not negative are ordered as their bits
  if (threadIdx.x == 0) least = __float_as_int(NEVER);
  __syncthreads();
  for (int i = threadIdx.x; i < own.island; i += blockDim.x) {
    const int place = blockIdx.x * own.island + i;
    if (own.lengths[place] > 0) atomicMin(&least, __float_as_int(own.scores[place]));
  }
  __syncthreads();
  if (threadIdx.x == 0) own.island_scores[blockIdx.x] = __int_as_float(least);
}

// Empties the places of formulas, so that any child takes them.
extern "C" __global__ void __launch_bounds__(128) empty_places(const __grid_constant__ Colony own) {
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= own.count) return;
  own.lengths[own.first + index] = 0;
  own.scores[own.first + index] = own.early_scores[own.first + index] = NEVER;
}
