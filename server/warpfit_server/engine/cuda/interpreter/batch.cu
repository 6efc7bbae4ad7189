// A batch on the device, as the kernels of lowering.cu and interpreter.cu take it by value: both
// begin with this text. launches.py fills in the fields as they are declared here.

// A lowered program. An invalid one has no instructions and no slots.
struct __align__(16) Program {
  unsigned first;   // index of the first instruction
  unsigned count;   // number of instructions, without the one that ends the program
  unsigned slot;    // index of the first row-invariant slot
  unsigned traits;  // number of slots, NEED_SHIFT, INVALID
};

// A part of a batch as it was copied to the device, and where it begins in the whole. Its own starts
// count from any number on.
struct Part {
  const unsigned* starts;            // [programs + 1]
  const unsigned* parameter_starts;  // [programs + 1]
  const double* values;
  const double* parameters;
  const unsigned char* codes;
  unsigned token;      // its first one in the whole, as the following three
  unsigned program;
  unsigned parameter;  // counting one vector of each program
  unsigned number;     // counting all vectors
  unsigned tokens;
  unsigned programs;
  unsigned numbers;
};

struct Node;

struct Batch {
  const unsigned* starts;            // first token of each program, and the total; [count + 1]
  const unsigned* parameter_starts;  // likewise of parameters, with one vector each
  const double* values;              // [tokens]
  const double* parameters;          // for each program [vectors, its parameters]
  const unsigned char* codes;        // [tokens]
  Program* programs;                 // [count]
  unsigned* order;        // programs, longest first in each group, and flags; [count]
  uint4* slots;           // first token, end, first parameter, parameters; [slot_count]
  uint2* instructions;    // program p: from starts[p] + p on, one more than tokens
  Node* scratch;          // [tokens]
  void* results;          // values of the slots, real [vectors, slot_count]
  unsigned* invalid;      // first invalid program of each group, or NONE; [groups], on the host
  const Part* parts;      // what join_parts copies together, on the host
  long long slot_count;   // slots for each vector
  unsigned variables;     // of the data set, at most INDEX_LIMIT
  int count;              // programs
  int vectors;
  int longest;            // tokens of the longest program
  int share;              // programs of a block of lower_programs
  int room;               // tokens that its shared memory has room for
  int group;              // programs that are sorted together, or 1: a launch has part of a program
  int warps;              // warps of a block of the interpreter
  int levels;             // stack levels of each warp, scratch levels included
  int scratch_levels;
};
