// Kernels of the weigher of pairs; `colony.py` launches them in this order, with matrix products
// between the second and the third. Names are those of engine/search/library.py.

// Arguments of all kernels.
struct Pairs {
  const float* left;      // values of u, [lefts, rows]
  const float* right;     // values of v of a tile, [rights, rows]
  const double* roots;    // [rows]
  const double* known;    // [known_count, rows]
  const double* target;   // [rows]
  real* factors;          // left factors of the products, [terms, lefts, rows]
  real* squared;          // left factors of the squares: [lefts, rows], of sums nothing
  double* rest;           // [lefts]
  real* values;           // v, [rights, rows]
  real* squares;          // v^2, [rights, rows]
  const real* products;   // f.r and projections of f, [terms, lefts, rights]
  const real* f_squares;  // squares of f, [lefts, rights], of sums [rights]
  const real* others;     // projections of v on known rows, of sums; [known_count, rights]
  int* count;             // pairs that passed
  int* places;            // of those i * rights + j, [capacity]
  float* errors;          // what is left of the errors, about; [capacity]
  double bound;
  double rounding;        // relative errors, as in engine/cpu/pairs.py
  double product_rounding;
  int rows;
  int lefts;
  int rights;
  int known_count;
  int terms;
  int is_product;
  int beside;
  int first;              // left formulas of this launch
  int stop;
  int capacity;
};

// Add a number of each thread up, in a fixed order; all threads get the sum.
__device__ double sum_of(double number, double* scratch) {
  scratch[threadIdx.x] = number;
  __syncthreads();
  for (int half = THREADS / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) scratch[threadIdx.x] += scratch[threadIdx.x + half];
    __syncthreads();
  }
  double sum = scratch[0];
  __syncthreads();
  return sum;
}

// Write the factors of one left formula, and what is left of the target beside it; a block each.
extern "C" __global__ void prepare_left(Pairs given) {
  __shared__ double own[MOST_ROWS];
  __shared__ double scratch[THREADS];
  int i = blockIdx.x, rows = given.rows;
  const float* u = given.left + (long long)i * rows;
  double before = 0, after = 0, along = 0, rest = 0;
  for (int row = threadIdx.x; row < rows; row += THREADS) {
    own[row] = u[row] * given.roots[row];
    before += own[row] * own[row];
  }
  before = sum_of(before, scratch);
  for (int pass = 0; pass < 2; pass++)
    for (int k = 0; k < given.known_count; k++) {
      const double* known = given.known + (long long)k * rows;
      double part = 0;
      for (int row = threadIdx.x; row < rows; row += THREADS) part += own[row] * known[row];
      part = sum_of(part, scratch);
      for (int row = threadIdx.x; row < rows; row += THREADS) own[row] -= part * known[row];
    }
  for (int row = threadIdx.x; row < rows; row += THREADS) after += own[row] * own[row];
  after = sum_of(after, scratch);
  bool sound = given.beside && after > LEAST_VARIATION * before;
  for (int row = threadIdx.x; row < rows; row += THREADS) {
    own[row] = sound ? own[row] / sqrt(after) : 0.0;
    along += own[row] * given.target[row];
  }
  along = sum_of(along, scratch);
  long long term = (long long)given.lefts * rows;
  for (int row = threadIdx.x; row < rows; row += THREADS) {
    double left = given.target[row] - along * own[row];
    double weighted = given.roots[row] * (given.is_product ? u[row] : 1.0f);
    real* factor = given.factors + (long long)i * rows + row;
    rest += left * left;
    *factor = left * weighted;
    if (given.beside) *(factor += term) = own[row] * weighted;
    if (!given.is_product) continue;
    for (int k = 0; k < given.known_count; k++)
      *(factor += term) = given.known[(long long)k * rows + row] * weighted;
    given.squared[(long long)i * rows + row] = weighted * weighted;
  }
  rest = sum_of(rest, scratch);
  if (threadIdx.x == 0) given.rest[i] = rest;
}

// Write the values of right formulas, and their squares, as numbers of the products.
extern "C" __global__ void prepare_right(Pairs given) {
  long long all = (long long)given.rights * given.rows, step = (long long)gridDim.x * THREADS;
  for (long long k = (long long)blockIdx.x * THREADS + threadIdx.x; k < all; k += step) {
    real v = given.right[k];
    given.values[k] = v;
    given.squares[k] = v * v;
  }
}

// Note the pairs of some left formulas that may be within the bound; a thread looks at a pair.
extern "C" __global__ void weigh_pairs(Pairs given) {
  long long all = (long long)given.lefts * given.rights, step = (long long)gridDim.x * THREADS;
  long long last = (long long)given.stop * given.rights;
  long long place = (long long)given.first * given.rights + blockIdx.x * THREADS + threadIdx.x;
  for (; place < last; place += step) {
    int i = place / given.rights, j = place - (long long)i * given.rights;
    double rest = given.rest[i], need = rest > given.bound ? rest - given.bound : 0.0;
    if (!(rest > LEAST_REST)) continue;
    double square = given.f_squares[given.is_product ? place : j], variance = square;
    if (!given.is_product)
      for (int k = 0; k < given.known_count; k++) {
        double part = given.others[(long long)k * given.rights + j];
        variance -= part * part;
      }
    for (int k = 1; k < given.terms; k++) {
      double part = given.products[k * all + place];
      variance -= part * part;
    }
    double along = given.products[place];
    double tolerance = need * given.rounding;
    tolerance += rest * given.product_rounding * given.product_rounding / MISS;
    if (along * along < need * (1.0 - MISS) * variance - tolerance * square) continue;
    if (!(variance > LEAST_VARIATION / 2 * square)) continue;
    int number = atomicAdd(given.count, 1);
    if (number >= given.capacity) continue;
    given.places[number] = (int)place;
    given.errors[number] = (float)(rest - along * along / variance);
  }
}
