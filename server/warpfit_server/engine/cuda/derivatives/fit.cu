// Small searches by Levenberg-Marquardt, with all passes of a search in one launch. derivatives.cu
// and the translation of levenberg_marquardt.advance_one precede this.
//
// A warp runs a search after the other: it computes the sums of all rows at the trial, as linearise
// and combine do, to the same bits, and its first thread judges the trial and proposes the next one.
// A search leaves the device when it has ended, or wants an orthogonal factor. After `ticks` the warps
// stop and the state of their searches is kept, so that a launch takes no longer than a step may; the
// next launch goes on with the same numbers.
//
//     while (a search is left, and time):
//         load its state
//         do: evaluate the trial; advance_one
//         while (it runs, and there is time)
//         store its state

// tier.py fills in the fields.
struct FitArguments {
  const unsigned* order;       // searches to run, [searches]
  double* vectors;             // rows of Searches.vectors, [FIT_VECTORS, parameters]
  double* numbers;             // [searches, FIT_NUMBERS]
  long long* counters;         // [searches, FIT_COUNTERS]
  double* curvatures;          // at the best parameters; triangles, row by row
  unsigned* status;            // see below
  long long parameters;        // of all searches
  long long ticks;             // cycles after which a warp stops
  double gradient;             // this and the following: the fields of SearchLimits
  double step;
  double loss;
  double flat;
  double target;
  double variation;
  double small;                // squares below this leave the range of float32; 0: they may
  int iterations;
  int searches;
  int begins;                  // only the starts are evaluated
};

// Numbers in `status`, which are 0 when a launch begins.
#define FIT_TAKEN 0       // searches that warps have taken, and how often they found none
#define FIT_UNFINISHED 1  // those of them that have not left
#define FIT_ITERATIONS 2  // most iterations of an unfinished one

// The state of a search in shared memory; what follows it are invariants and levels.
struct Search {
  Table<double> vector;
  Line<double> number;
  Line<long long> counter;
  Line<double> gradient;   // at the trial
  Line<double> curvature;  // at the best parameters
  Line<double> trial_curvature;
  double* sums;
  real* invariants;
  Workspace space;
  unsigned char* end;
};

__device__ __forceinline__ Line<double> line_at(unsigned char*& place, int count) {
  double* const first = (double*)place;
  place += 8 * count;
  return {first, count};
}

// Lays a search out. tier.py counts the bytes.
__device__ __forceinline__ Search layout_of(const Arguments& arguments, const Program& program,
                                            unsigned char* place) {
  const int n = program.parameters, size = n * (n + 1) / 2;
  Search search;
  search.sums = line_at(place, sum_count(arguments, program)).first;
  search.vector = {line_at(place, FIT_VECTORS * n).first, n};
  search.number = line_at(place, FIT_NUMBERS);
  search.counter = {(long long*)line_at(place, FIT_COUNTERS).first, FIT_COUNTERS};
  search.gradient = line_at(place, n);
  search.curvature = line_at(place, size);
  search.trial_curvature = line_at(place, size);
  search.space.role = {(long long*)line_at(place, n).first, n};
  search.space.order = {(long long*)line_at(place, n).first, n};
  search.space.step = line_at(place, n);
  search.space.target = line_at(place, n);
  search.space.best = line_at(place, n);
  search.space.unit = line_at(place, n);
  search.space.right = line_at(place, n);
  search.space.system = line_at(place, size);
  search.space.columns = {0, 0};
  place += (16 - (unsigned long long)place % 16) % 16;
  search.invariants = (real*)place;
  search.end = place + program.invariants * INVARIANT_BYTES;
  return search;
}

template <bool LOADS, typename T>
__device__ __forceinline__ void copy_numbers(T* theirs, T* own, int count, int lane) {
  for (int k = lane; k < count; k += 32)
    if (LOADS) own[k] = theirs[k];
    else theirs[k] = own[k];
}

// Copies the state from global memory, or back.
template <bool LOADS>
__device__ __forceinline__ void move_state(const FitArguments& fits, const Program& program,
                                           unsigned number, const Search& search, int lane) {
  const int n = program.parameters;
  const long long place = number;
  for (int row = 0; row < FIT_VECTORS; ++row)
    copy_numbers<LOADS>(fits.vectors + row * fits.parameters + program.parameter,
                        search.vector[row].first, n, lane);
  copy_numbers<LOADS>(fits.numbers + place * FIT_NUMBERS, search.number.first, FIT_NUMBERS, lane);
  copy_numbers<LOADS>(fits.counters + place * FIT_COUNTERS, search.counter.first, FIT_COUNTERS,
                      lane);
  copy_numbers<LOADS>(fits.curvatures + program.triangle, search.curvature.first,
                      search.curvature.count, lane);
  __syncwarp();
}

// Computes loss, gradient and curvature at the trial.
__device__ __forceinline__ void evaluate_trial(const Arguments& arguments, const Program& program,
                                               const Search& search, int lane) {
  const unsigned count = sum_count(arguments, program);
  const Place levels = place_of(search.end + lane * 16);
  // The sums of one tile lie behind the levels.
  double* const tile_sums = (double*)(search.end + program.levels * LEVEL_BYTES);
  compute_invariants(arguments, program, search.vector[TRIAL].first, search.invariants, lane);
  __syncwarp();
  for (int tile = 0; tile < arguments.tiles; ++tile) {
    compute_tile(arguments, program, search.invariants, 0, 0, tile, levels, tile_sums, lane);
    __syncwarp();
    for (unsigned k = lane; k < count; k += 32)
      search.sums[k] = (tile ? search.sums[k] : 0.0) + tile_sums[k];
    __syncwarp();
  }
  const double* const slopes = search.sums + 1;
  const double* const products = slopes + program.columns;
  for (int k = lane; k < search.gradient.count; k += 32)
    search.gradient[k] = gradient_of(arguments, program, search.invariants, slopes, k);
  for (int k = lane; k < search.curvature.count; k += 32)
    search.trial_curvature[k] = curvature_of(arguments, program, search.invariants, products, k);
  __syncwarp();
}

// Whether squares at a start leave the range of float32.
__device__ __forceinline__ bool leaves_float32(const FitArguments& fits, const Search& search,
                                               double loss) {
  bool leaves = !isfinite(loss) || loss < fits.small;
  for (int i = 0; i < search.gradient.count; ++i) {
    const double slope = search.gradient[i], square = search.trial_curvature[i * (i + 3) / 2];
    leaves = leaves || !isfinite(slope) || !isfinite(square) || (slope != 0.0 && square < fits.small);
  }
  return leaves && fits.small > 0.0;
}

__device__ __forceinline__ bool has_left(const Search& search) {
  return search.counter[REASON] != RUNNING || search.counter[FACTOR] == WANTED;
}

extern "C" __global__ void __launch_bounds__(32, WARPS * BLOCKS_AT_LEAST)
fit(const __grid_constant__ FitArguments fits, const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int lane = threadIdx.x;
  const long long begun = clock64();
  const SearchLimits limits = {fits.gradient, fits.step,   fits.loss,      fits.iterations,
                               REAL_BYTES == 4, fits.flat, fits.target, fits.variation, true, false};
  for (bool goes_on = true; goes_on;) {
    unsigned place = 0;
    if (lane == 0) place = atomicAdd(fits.status + FIT_TAKEN, 1u);
    place = __shfl_sync(FULL, place, 0);
    if (place >= (unsigned)fits.searches) return;
    const unsigned number = fits.order[place];
    const Program& program = arguments.programs[number];
    const Search search = layout_of(arguments, program, memory);
    move_state<true>(fits, program, number, search, lane);
    if (has_left(search) || (fits.begins && search.counter[EVALUATIONS])) continue;
    for (bool runs = true; runs;) {
      evaluate_trial(arguments, program, search, lane);
      if (lane == 0) {
        const double loss = one_nan(search.sums[0]);
        if (!search.counter[EVALUATIONS] && leaves_float32(fits, search, loss))
          search.counter[REASON] = LEAVES_FLOAT32;
        else
          levenberg_marquardt_advance_one(search.vector, search.number, search.counter,
                                          search.gradient, search.trial_curvature,
                                          search.curvature, Line<double>{0, 0}, loss, limits,
                                          search.space);
      }
      __syncwarp();
      goes_on = __shfl_sync(FULL, (int)(clock64() - begun < fits.ticks), 0);
      runs = goes_on && !has_left(search) && !fits.begins;
    }
    move_state<false>(fits, program, number, search, lane);
    if (lane == 0 && !has_left(search)) {
      atomicAdd(fits.status + FIT_UNFINISHED, 1u);
      atomicMax(fits.status + FIT_ITERATIONS, (unsigned)search.counter[ITERATIONS]);
    }
    __syncwarp();
  }
}
