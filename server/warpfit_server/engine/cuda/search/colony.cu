// A colony on the device: breeding, packing for the interpreter, scoring, and what is kept of it.
// colony.py completes the text: the types and operators precede it, and the two names between at
// signs are replaced by a switch over the operators and by the functions of genome.py.
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
  float* losses;
  float* scores;
  unsigned char* is_new;
  unsigned char* child_codes;
  float* child_values;
  int* child_lengths;
  float* child_losses;
  unsigned long long* hashes;
  const int* places;         // of the children; null: child i competes for place i
  unsigned long long* tried;
  int* registers;
  unsigned long long* best_keys;  // [sizes]; loss and number of the best child of each size
  unsigned char* best_codes;
  float* best_values;
  int* best_lengths;
  float* best_losses;
  const float* parsimony;    // [islands]
  const double* target;      // [rows]
  const double* weights;     // [rows]
  unsigned* starts;          // [count + 1]; of packed programs
  unsigned* block_lengths;   // tokens of the packed programs of each block
  unsigned char* packed_codes;
  double* packed_values;
  const real* numbers;       // values of the packed programs, [count, pitch]
  int* chosen;               // [islands]; places of champions, -1 for none
  unsigned char* out_codes;  // gathered formulas
  float* out_values;
  int* out_lengths;
  float* out_losses;
  float* island_scores;      // [islands]; the best score of each
  unsigned long long seed;
  unsigned long long generation;
  unsigned long long mask;
  double mean;               // of the target
  double spread;             // variance of the target
  double floor;
  double least_spread;
  int formulas;
  int island;
  int islands;
  int sizes;
  int rows;
  int pitch;
  int fitted;                // numbers around f: 2 for slope and intercept, 1 for a slope
  int first;
  int count;
};

#define NEVER __int_as_float(0x7f800000)
#define NO_KEY 0xffffffffffffffffull

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
  const int length = breed(grammar, own.units, random, own.codes, own.values, own.lengths, own.scores,
                           own.formulas, own.island, formula, own.child_codes, own.child_values,
                           own.tried, own.mask, work, words);
  own.child_lengths[formula] = length;
  if (length > 0) {
    own.hashes[formula] = structure_hash(grammar, own.child_codes, own.child_values,
                                         formula * grammar[WIDTH], length, words);
  }
}

// Length of a child as it is packed: one without a program is packed as one variable.
__device__ __forceinline__ unsigned packed_length(const Colony& own, int index) {
  return index < own.count ? max(own.child_lengths[own.first + index], 1) : 0;
}

// Sum of a number of all threads of a block, and of those before each.
__device__ __forceinline__ unsigned sum_before(unsigned number, unsigned& total) {
  __shared__ unsigned sums[SCAN_THREADS];
  const int thread = threadIdx.x;
  sums[thread] = number;
  __syncthreads();
  for (int step = 1; step < SCAN_THREADS; step *= 2) {
    const unsigned before = thread >= step ? sums[thread - step] : 0;
    __syncthreads();
    sums[thread] += before;
    __syncthreads();
  }
  total = sums[SCAN_THREADS - 1];
  const unsigned before = sums[thread] - number;
  __syncthreads();
  return before;
}

// Adds up the lengths of the packed programs of each block.
extern "C" __global__ void __launch_bounds__(SCAN_THREADS) sum_lengths(
    const __grid_constant__ Colony own) {
  unsigned total;
  sum_before(packed_length(own, blockIdx.x * SCAN_THREADS + threadIdx.x), total);
  if (threadIdx.x == 0) own.block_lengths[blockIdx.x] = total;
}

// Finds where each packed program starts; there are no more blocks than threads of a block.
extern "C" __global__ void __launch_bounds__(SCAN_THREADS) find_starts(
    const __grid_constant__ Colony own) {
  const int index = blockIdx.x * SCAN_THREADS + threadIdx.x;
  unsigned before, total;
  sum_before(threadIdx.x < blockIdx.x ? own.block_lengths[threadIdx.x] : 0, before);
  const unsigned length = packed_length(own, index);
  const unsigned start = before + sum_before(length, total);
  if (index < own.count) own.starts[index] = start;
  if (index == own.count - 1) own.starts[own.count] = start + length;
}

// Copies the programs of children behind one another, a warp each.
extern "C" __global__ void __launch_bounds__(128) pack_programs(
    const __grid_constant__ Colony own) {
  const int index = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (index >= own.count) return;
  const int width = own.grammar[WIDTH], length = own.child_lengths[own.first + index];
  const long long from = (long long)(own.first + index) * width;
  const unsigned to = own.starts[index];
  if (length == 0 && lane == 0) {
    own.packed_codes[to] = VARIABLE_CODE;
    own.packed_values[to] = 0.0;
  }
  for (int token = lane; token < length; token += 32) {
    own.packed_codes[to + token] = own.child_codes[from + token];
    own.packed_values[to + token] = own.child_values[from + token];
  }
}

// Finds the loss of each child by its values, relative to that of the best constant; a warp each.
// Values that hardly vary, or whose squares are no numbers, have none.
extern "C" __global__ void __launch_bounds__(128) score_children(
    const __grid_constant__ Colony own) {
  const int index = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (index >= own.count) return;
  const real* const values = own.numbers + (long long)index * own.pitch;
  double own_mean = 0.0, mean = 0.0;
  if (own.fitted == 2) {
    mean = own.mean;
    for (int row = lane; row < own.rows; row += 32) own_mean += own.weights[row] * values[row];
    own_mean = warp_sum(own_mean);
  }
  double squares = 0.0, products = 0.0, errors = 0.0;
  for (int row = lane; row < own.rows; row += 32) {
    const double d = values[row] - own_mean, y = own.target[row] - mean;
    squares += own.weights[row] * d * d;
    products += own.weights[row] * d * y;
    errors += own.weights[row] * (y - d) * (y - d);
  }
  squares = warp_sum(squares);
  if (own.fitted) {
    const double slope = warp_sum(products) / squares;
    errors = 0.0;
    for (int row = lane; row < own.rows; row += 32) {
      const double error = own.target[row] - mean - slope * (values[row] - own_mean);
      errors += own.weights[row] * error * error;
    }
  }
  errors = warp_sum(errors);
  if (lane > 0) return;
  const double deviation = sqrt(squares);
  const bool varies = deviation > LEAST_DEVIATION && deviation < MOST_DEVIATION &&
                      deviation > own.least_spread * fabs(own_mean);
  const double loss = own.fitted && !varies ? NEVER : errors / own.spread;
  const bool counts = own.child_lengths[own.first + index] > 0 && loss >= 0.0;
  own.child_losses[own.first + index] = counts ? (float)loss : NEVER;
}

// Lets children take the places of worse formulas, and notes structures and the best of each size;
// a warp each.
extern "C" __global__ void __launch_bounds__(128) keep_children(
    const __grid_constant__ Colony own) {
  const int index = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (index >= own.count) return;
  const int child = own.first + index, length = own.child_lengths[child];
  if (length == 0) return;
  const int width = own.grammar[WIDTH], place = own.places ? own.places[index] : child;
  const long long from = (long long)child * width, to = (long long)place * width;
  const float loss = own.child_losses[child];
  int better = 0;
  if (lane == 0) {
    const unsigned long long word = own.hashes[child];
    atomicMax(own.tried + (word & own.mask), tried_mark(word, own.generation));
    atomicMax(own.registers + (word >> 52), min(52, __clzll(word << 12)) + 1);
    const int size = size_of(own.grammar, own.child_codes + from, 0, length);
    const double weight = 1.0 + own.parsimony[place / own.island] * size;
    const float score = (float)(fmax((double)loss, own.floor) * weight);
    better = score < own.scores[place] * BETTER || own.lengths[place] == 0;
    if (better) {
      own.scores[place] = score;
      own.losses[place] = loss;
      own.lengths[place] = length;
      own.is_new[place] = 1;
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
  own.best_keys[size] = NO_KEY;
}

// Chooses the best new formula of each island, which is new no more; a block each.
extern "C" __global__ void __launch_bounds__(128) choose_champions(
    const __grid_constant__ Colony own) {
  __shared__ unsigned long long best;
  __shared__ int least;  // floats that are not negative are ordered as their bits
  if (threadIdx.x == 0) best = NO_KEY, least = __float_as_int(NEVER);
  __syncthreads();
  const int begin = blockIdx.x * own.island;
  for (int i = threadIdx.x; i < own.island; i += blockDim.x) {
    const int place = begin + i;
    if (own.lengths[place] > 0) atomicMin(&least, __float_as_int(own.scores[place]));
    if (own.is_new[place] && own.scores[place] < NEVER) {
      atomicMin(&best, (unsigned long long)(unsigned)__float_as_int(own.scores[place]) << 32 | (unsigned)i);
    }
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  own.island_scores[blockIdx.x] = __int_as_float(least);
  own.chosen[blockIdx.x] = best == NO_KEY ? -1 : begin + (int)(unsigned)best;
  if (best != NO_KEY) own.is_new[begin + (int)(unsigned)best] = 0;
}

// Copies the chosen formulas, a warp each; one that is -1 has no tokens.
extern "C" __global__ void __launch_bounds__(32) gather(const __grid_constant__ Colony own) {
  const int index = blockIdx.x, lane = threadIdx.x, place = own.chosen[index];
  const int width = own.grammar[WIDTH];
  if (lane == 0) {
    own.out_lengths[index] = place < 0 ? 0 : own.lengths[place];
    own.out_losses[index] = place < 0 ? NEVER : own.losses[place];
  }
  if (place < 0) return;
  for (int token = lane; token < width; token += 32) {
    own.out_codes[index * width + token] = own.codes[(long long)place * width + token];
    own.out_values[index * width + token] = own.values[(long long)place * width + token];
  }
}

// Empties the places of formulas, so that any child takes them.
extern "C" __global__ void __launch_bounds__(128) empty_places(const __grid_constant__ Colony own) {
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= own.count) return;
  own.lengths[own.first + index] = 0;
  own.scores[own.first + index] = NEVER;
  own.is_new[own.first + index] = 0;
}
