// Lowering of a batch from postfix tokens to the interpreter's instructions. launches.py prepends
// the constants of the encoding, batch.cu and the operator table. The tests compile the same text
// for the host, so it uses nothing but standard C++ and CUDA's keywords.
//
// A thread lowers a program in two passes over its tokens. The first goes forward. The size of a
// subtree determines where its operands end, so that no stack is needed, and the stack levels that
// its code needs follow from those of its operands (Sethi and Ullman 1970, "The generation of
// optimal code for arithmetic expressions"). The second goes backward from the root and writes the
// last instruction first. It follows the operand that is evaluated last, and keeps a list of the
// others, at most one for each stack level.
//
// An atom (a variable, or a row-invariant subtree, which contains no variable) needs no instruction
// of its own: it is an operand of the operator above it. A maximal row-invariant subtree is a slot,
// which another kernel computes once for each parameter vector.

// A subtree in pass one. A variable, which has size 1, has its index in place of the size.
struct __align__(8) Node {
  unsigned size;
  unsigned traits;  // its last token's row of the table, KINDS
};

// Kinds of subtrees: the stack levels that the code needs below the top, or a flag for an atom.
#define KIND_SHIFT 16
#define VARIABLE_KIND 0x40u
#define INVARIANT_KIND 0x80u  // with the stack height of the kernel that computes it
#define ATOM_KIND (VARIABLE_KIND | INVARIANT_KIND)
#define HEIGHT_MASK 0x1fu

// First of the slots reserved for a program: two for three tokens, as many as there would be leaves
// if every operator had three operands.
__device__ __forceinline__ unsigned first_slot(unsigned start, unsigned program) {
  return (unsigned)((2ull * start + program) / 3);
}

__device__ __forceinline__ unsigned kind_of(const Node& node) { return node.traits >> KIND_SHIFT; }

__device__ __forceinline__ unsigned size_of(const Node& node) {
  return kind_of(node) & VARIABLE_KIND ? 1 : node.size;
}

__device__ __forceinline__ unsigned maximum(unsigned a, unsigned b) { return a > b ? a : b; }

// Copies the parts of a batch together; a row of blocks for each. The last start of a part is the
// first of the next one.
extern "C" __global__ void __launch_bounds__(JOIN_THREADS)
join_parts(const __grid_constant__ Batch batch) {
  const Part part = batch.parts[blockIdx.y];
  const unsigned first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  double* const values = const_cast<double*>(batch.values) + part.token;
  unsigned char* const codes = const_cast<unsigned char*>(batch.codes) + part.token;
  double* const parameters = const_cast<double*>(batch.parameters) + part.number;
  unsigned* const starts = const_cast<unsigned*>(batch.starts) + part.program;
  unsigned* const parameter_starts = const_cast<unsigned*>(batch.parameter_starts) + part.program;
  for (unsigned token = first; token < part.tokens; token += step) {
    values[token] = part.values[token];
    codes[token] = part.codes[token];
  }
  for (unsigned number = first; number < part.numbers; number += step)
    parameters[number] = part.parameters[number];
  const unsigned tokens = part.token - part.starts[0];
  const unsigned before = part.parameter - part.parameter_starts[0];
  for (unsigned program = first; program <= part.programs; program += step) {
    starts[program] = part.starts[program] + tokens;
    parameter_starts[program] = part.parameter_starts[program] + before;
  }
}

// Looks tokens up in the operator table; leaves with an invalid index get no row.
__device__ __forceinline__ void read_tokens(const Batch& batch, Node* nodes,
                                            unsigned first, unsigned end) {
#pragma unroll 4
  for (unsigned token = first + threadIdx.x; token < end; token += blockDim.x) {
    const unsigned row = OPERATOR_TABLE[batch.codes[token]];
    const double value = batch.values[token];
    const double bound = row & IS_VARIABLE ? (double)batch.variables : 2147483648.0;
    const bool is_index = value >= 0.0 && value < bound && value == (double)(unsigned)value;
    Node node = {0, row};
    if (row & (IS_VARIABLE | IS_PARAMETER)) {
      node.size = is_index ? (unsigned)value : 0;
      node.traits = is_index ? row : 0;
    }
    nodes[token - first] = node;
  }
}

// Kind of a subtree whose root has two operands.
__device__ __forceinline__ unsigned join_two(unsigned left, unsigned right) {
  if (left & right & INVARIANT_KIND) {
    const unsigned height = maximum(left & HEIGHT_MASK, (right & HEIGHT_MASK) + 1);
    return height <= SLOT_LEVELS ? INVARIANT_KIND | height : 0;
  }
  if (left & ATOM_KIND) return right & ATOM_KIND ? 0 : right;
  if (right & ATOM_KIND) return left;
  return left == right ? left + 1 : maximum(left, right);
}

// Likewise with three operands, which are evaluated in falling order of the levels they need.
__device__ __forceinline__ unsigned join_three(unsigned a, unsigned b, unsigned c) {
  if (a & b & c & INVARIANT_KIND) {
    const unsigned height = maximum(a & HEIGHT_MASK, maximum((b & HEIGHT_MASK) + 1,
                                                             (c & HEIGHT_MASK) + 2));
    return height <= SLOT_LEVELS ? INVARIANT_KIND | height : 0;
  }
  const unsigned x = a & ATOM_KIND ? 0 : a, y = b & ATOM_KIND ? 0 : b, z = c & ATOM_KIND ? 0 : c;
  const unsigned most = maximum(x, maximum(y, z));
  const unsigned least = x < y ? (x < z ? x : z) : (y < z ? y : z);
  return maximum(most, maximum(x + y + z - most - least + 1, least + 2));
}

// Pass one: sizes and kinds. Returns whether the tokens are a program with so many parameters.
__device__ __forceinline__ bool measure(Node* nodes, unsigned count, unsigned parameters) {
  Node last = {0, 0};  // the node before
  unsigned needed = 0;
  for (unsigned place = 0; place < count; ++place) {
    Node node = nodes[place];
    const unsigned row = node.traits, arity = row >> ARITY_SHIFT & 3;
    if (!(row & IS_KNOWN)) return false;
    if (arity == 0) {
      if (row & IS_PARAMETER) needed = maximum(needed, node.size + 1);
      if (!(row & IS_VARIABLE)) node.size = 1;
      node.traits |= (row & IS_VARIABLE ? VARIABLE_KIND : INVARIANT_KIND | 1) << KIND_SHIFT;
    } else {
      // The last operand ends before this token; each operand must leave tokens for the next.
      unsigned kind = kind_of(last), size = place == 0 ? place : size_of(last);
      if (place == 0) return false;
      if (arity >= 2) {
        if (size >= place) return false;
        const Node second = nodes[place - 1 - size];
        size += size_of(second);
        if (arity == 2) {
          kind = join_two(kind_of(second), kind);
        } else {
          if (size >= place) return false;
          const Node first = nodes[place - 1 - size];
          size += size_of(first);
          kind = join_three(kind_of(first), kind_of(second), kind);
        }
      } else if (kind & VARIABLE_KIND) {
        kind = 0;
      }
      node.size = size + 1;
      node.traits |= kind << KIND_SHIFT;
    }
    nodes[place] = node;
    last = node;
  }
  return count > 0 && size_of(last) == count && needed == parameters;
}

// Where a program's code is written, and how much of it has been.
struct Writer {
  uint2* place;      // the instruction that was written last, the first one of the code so far
  uint4* slots;      // the program's
  unsigned written;  // slots
  unsigned token;    // first token of the program
  unsigned parameter, parameters;
};

__device__ __forceinline__ void write(Writer& writer, unsigned head, unsigned word) {
  *--writer.place = make_uint2(head, word);
}

// Returns the index of a variable, or of a new slot for the row-invariant subtree that ends there.
__device__ __forceinline__ unsigned leaf(Writer& writer, const Node& node, unsigned place) {
  if (kind_of(node) & VARIABLE_KIND) return node.size;
  const unsigned end = writer.token + place + 1;
  writer.slots[writer.written] =
      make_uint4(end - node.size, end, writer.parameter, writer.parameters);
  return writer.written++;
}

__device__ __forceinline__ unsigned load_of(Writer& writer, const Node& node, unsigned place) {
  const unsigned source = kind_of(node) & VARIABLE_KIND ? LOAD_VARIABLE : LOAD_SLOT;
  return source | leaf(writer, node, place) << INDEX_SHIFT;
}

// Order of evaluation of a ternary's operands: most levels first, atoms last, then from the left.
__device__ __forceinline__ int rank_of(const Node& node) {
  const unsigned kind = kind_of(node);
  return kind & ATOM_KIND ? -1 : (int)kind;
}

// Pass two: writes the code backward.
__device__ __forceinline__ void write_code(Node* nodes, unsigned count, Writer& writer) {
  unsigned pending[MOST_PENDING];  // last tokens of operands whose code is still to be written
  int height = 0;
  unsigned place = count - 1;
  write(writer, END_LABEL, 0);
  for (;;) {
    const Node node = nodes[place];
    const unsigned label = node.traits & LABEL_MASK, arity = node.traits >> ARITY_SHIFT & 3;
    // The code of an operand begins with a load. For all but the first, the top holds a value.
    const unsigned push = height > 0 ? PUSH : 0;
    bool begins = true;
    if (kind_of(node) & ATOM_KIND) {
      write(writer, push | load_of(writer, node, place), 0);
    } else if (arity == 1) {
      const Node operand = nodes[place - 1];
      begins = kind_of(operand) & ATOM_KIND;
      write(writer, begins ? label | push | load_of(writer, operand, place - 1) : label, 0);
      --place;
    } else if (arity == 2) {
      const Node right = nodes[place - 1];
      const unsigned left_place = place - 1 - size_of(right);
      const Node left = nodes[left_place];
      const unsigned left_atom = kind_of(left) & ATOM_KIND, right_atom = kind_of(right) & ATOM_KIND;
      if (left_atom || right_atom) {
        // Of a variable and a slot, the variable is loaded and the slot is the other operand.
        const bool left_is_other =
            left_atom && (!right_atom || (left_atom & INVARIANT_KIND) != 0);
        const Node other = {left_is_other ? left.size : right.size,
                            left_is_other ? left.traits : right.traits};
        const Node loaded = {left_is_other ? right.size : left.size,
                             left_is_other ? right.traits : left.traits};
        const unsigned other_place = left_is_other ? left_place : place - 1;
        place = left_is_other ? place - 1 : left_place;
        begins = left_atom && right_atom;
        unsigned head = label + (kind_of(other) & VARIABLE_KIND ? FROM_VARIABLE : FROM_SLOT);
        head += left_is_other;
        if (begins) head |= push | load_of(writer, loaded, place);
        write(writer, head, leaf(writer, other, other_place));
      } else {
        const bool left_first = kind_of(left) >= kind_of(right);
        write(writer, label + FROM_STACK + left_first, 0);
        pending[height++] = left_first ? left_place : place - 1;
        place = left_first ? place - 1 : left_place;
        begins = false;
      }
    } else {
      const unsigned third = place - 1, second = third - size_of(nodes[third]);
      const unsigned first = second - size_of(nodes[second]);
      const int a = rank_of(nodes[first]), b = rank_of(nodes[second]), c = rank_of(nodes[third]);
      const unsigned when_a = (b > a) + (c > a), when_b = (a >= b) + (c > b);
      const unsigned when_c = (a >= c) + (b >= c);
      write(writer, label, when_a | when_b << 2 | when_c << 4);
      pending[height++] = when_a == 0 ? first : when_b == 0 ? second : third;
      pending[height++] = when_a == 1 ? first : when_b == 1 ? second : third;
      place = when_a == 2 ? first : when_b == 2 ? second : third;
      begins = false;
    }
    if (begins) {
      if (height == 0) return;
      place = pending[--height];
    }
  }
}

__device__ __forceinline__ void lower_program(const Batch& batch, Node* nodes,
                                              unsigned program) {
  const unsigned start = batch.starts[program];
  const unsigned count = batch.starts[program + 1] - start;
  const unsigned parameter = batch.parameter_starts[program];
  const unsigned parameters = batch.parameter_starts[program + 1] - parameter;
  const unsigned slot = first_slot(start, program), end = start + program + count + 1;
  Writer writer = {batch.instructions + end, batch.slots + slot,         0, start,
                   parameter * batch.vectors, parameters};
  unsigned traits = INVALID;
  if (measure(nodes, count, parameters)) {
    write_code(nodes, count, writer);
    const unsigned kind = kind_of(nodes[count - 1]);
    traits = writer.written | (kind & ATOM_KIND ? 0 : kind) << NEED_SHIFT;
  } else {
    write(writer, END_LABEL, 0);
  }
  const unsigned first = (unsigned)(writer.place - batch.instructions);
  batch.programs[program] = {first, end - 1 - first, slot, traits};
}

__device__ __forceinline__ void lower_share(const Batch& batch, Node* nodes,
                                            unsigned first, unsigned end) {
  const unsigned start = batch.starts[first];
  read_tokens(batch, nodes, start, batch.starts[end]);
  __syncthreads();
  const unsigned program = first + threadIdx.x;
  if (program < end) lower_program(batch, nodes + (batch.starts[program] - start), program);
}

// A block lowers consecutive programs, with their tokens in shared memory if they fit.
extern "C" __global__ void __launch_bounds__(LOWER_THREADS)
lower_programs(const __grid_constant__ Batch batch) {
  extern __shared__ Node shared_nodes[];
  const unsigned first = blockIdx.x * batch.share, count = batch.count;
  const unsigned end = first + batch.share < count ? first + batch.share : count;
  const unsigned start = batch.starts[first];
  if (batch.starts[end] - start <= (unsigned)batch.room) {
    lower_share(batch, shared_nodes, first, end);
  } else {
    lower_share(batch, batch.scratch + start, first, end);
  }
}

// Buckets of programs in the order in which they run: first those that need more levels than a warp
// has, then by falling number of instructions, exactly up to EXACT and in steps of 1/32 beyond.
#define EXACT 512u
#define BUCKETS 1024u

__device__ __forceinline__ unsigned weight_of(unsigned count) {
  unsigned weight = count, octave = 0;
  while (weight >= EXACT) {
    weight >>= 1;
    ++octave;
  }
  return octave == 0 ? weight : EXACT + 32 * (octave - 1) + (weight - EXACT / 2) / 8;
}

__device__ __forceinline__ bool is_deep(const Program& program, int levels) {
  return (program.traits >> NEED_SHIFT & NEED_MASK) > (unsigned)levels;
}

__device__ __forceinline__ unsigned bucket_of(const Program& program, int levels) {
  return is_deep(program, levels) ? 0 : BUCKETS - 1 - weight_of(program.count);
}

// Sorts the programs of each group, the longest first so that short ones fill the gaps at the end;
// a block a group. Marks programs that need more levels than a warp has, and reports the first
// invalid program; of a group with one, no program will be run. Shared memory: ORDER_BYTES.
extern "C" __global__ void __launch_bounds__(ORDER_THREADS)
order_programs(const __grid_constant__ Batch batch) {
  extern __shared__ Node shared_nodes[];
  const int levels = batch.levels - batch.scratch_levels;
  unsigned* counts = (unsigned*)shared_nodes;
  unsigned* sums = counts + BUCKETS;
  unsigned* const invalid = sums + BUCKETS;
  const unsigned first = blockIdx.x * batch.group, count = batch.count;
  const unsigned end = first + batch.group < count ? first + batch.group : count;
  for (unsigned bucket = threadIdx.x; bucket < BUCKETS; bucket += blockDim.x) counts[bucket] = 0;
  if (threadIdx.x == 0) *invalid = NONE;
  __syncthreads();
  for (unsigned program = first + threadIdx.x; program < end; program += blockDim.x) {
    const Program record = batch.programs[program];
    atomicAdd(counts + bucket_of(record, levels), 1u);
    if (record.traits & INVALID) atomicMin(invalid, program);
  }
  __syncthreads();
  // Ends of the buckets: prefix sums, over twice as many buckets in each round.
  for (unsigned reach = 1; reach < BUCKETS; reach *= 2) {
    for (unsigned bucket = threadIdx.x; bucket < BUCKETS; bucket += blockDim.x)
      sums[bucket] = counts[bucket] + (bucket >= reach ? counts[bucket - reach] : 0);
    __syncthreads();
    unsigned* const summed = sums;
    sums = counts;
    counts = summed;
  }
  const unsigned skipped = *invalid == NONE ? 0 : SKIPPED;
  for (unsigned program = first + threadIdx.x; program < end; program += blockDim.x) {
    const Program record = batch.programs[program];
    const unsigned place = atomicSub(counts + bucket_of(record, levels), 1u) - 1;
    const unsigned flags = (is_deep(record, levels) ? DEEP : 0) | skipped;
    batch.order[first + place] = program | flags;
  }
  if (threadIdx.x == 0) batch.invalid[blockIdx.x] = *invalid;
}
