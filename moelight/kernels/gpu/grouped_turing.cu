// The grouped product of experts for compute capability 7.5 on its tensor cores, which Triton does not use.
//
// out [R, columns] = rows of x times the page of their expert, through the activation where GATED: the contract of
// grouped_triton.py. `grouped_cuda.py` compiles this file with NVRTC, without any header, once for each VARIANT in use:
//   STORED   kFloat16 or kBfloat16
//   GATED    a matrix has 2 * columns rows, gate before up; out is act(gate) * up
//   ROWS     rows of a slot: 128, 64 or 32; an expert's last rows take the smallest of these tiles that holds them
//   ALIGNED  rows of x and of the matrices begin and end at multiples of 16 bytes
// tests/kernels/block_on_host.h plays it in host memory.
//
// A block of 4 warps multiplies ROWS rows of x by 128 rows of the matrix, 32 inputs at a time, as
// mma.m16n8k8 (float16 products, float32 sums). Numbers reach shared memory as float16 through registers, in two
// buffers: the loads of a step are in flight while the step before it is multiplied. Every sum goes over the inputs in
// ascending order whatever ROWS is, so it depends on no other row.

#ifdef __CUDACC__

#define DEVICE __device__ __forceinline__
#define SHARED(name, count) __shared__ Words name[count]

struct alignas(16) Words {
  unsigned x, y, z, w;
};

// 16 bytes of global memory that no thread writes meanwhile.
DEVICE Words load_words(const void* from) {
  Words found;
  asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
      : "l"(from));
  return found;
}

template <class T>
DEVICE T load(const T* from) {
  return *from;
}

template <class T>
DEVICE void store(T* into, T value) {
  *into = value;
}

DEVICE unsigned shared_address(const Words* in) { return static_cast<unsigned>(__cvta_generic_to_shared(in)); }

DEVICE void store_shared(Words* into, const Words& value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "r"(shared_address(into)), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

// Four 8 x 8 matrices of float16: lane i gives the address of row i % 8 of matrix i / 8, and has afterwards of each
// matrix the elements 2 * (lane % 4) and the next one of row lane / 4.
DEVICE void load_matrices(unsigned (&found)[4], const Words* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3])
               : "r"(shared_address(row))
               : "memory");
}

// sums [16, 8] += a [16, 8] times b [8, 8].
DEVICE void multiply_add(float (&sums)[4], unsigned a_top, unsigned a_bottom, unsigned b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a_top), "r"(a_bottom), "r"(b));
}

DEVICE unsigned short to_half(float value) {
  unsigned short half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}

DEVICE float from_half(unsigned short half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}

DEVICE float as_float(unsigned bits) { return __uint_as_float(bits); }

#else
#include "block_on_host.h"
#endif

namespace turing {

constexpr int kFloat16 = 0, kBfloat16 = 1, kFloat32 = 2;  // numbers
constexpr int kSilu = 0, kGeluTanh = 1, kSwigluOai = 2;    // activations
constexpr int kThreads = 128, kWarps = 4, kWarp = 32;
constexpr int kMatrixRows = 128;      // at a time
constexpr int kInputs = 32;           // at a time
constexpr int kChunks = kInputs / 8;  // of 8 float16, 16 bytes, in a row of shared memory
constexpr int kBand = 8;  // blocks of an expert's rows that read the same rows of the matrix one after another

// The arguments; as `Call` in grouped_cuda.py. Addresses are 0 for what is absent: tokens, or an expert's matrix, whose
// rows are zeros.
struct Call {
  const unsigned short* x;   // float16 [x_rows, depth], x_stride apart
  const long long* tokens;   // [R] rows of x; bounded here
  void* out;                 // [R, columns]
  const int* slots;          // [n, 3] (page, first row, row after the expert's last), page -1: unused
  const int* offsets;        // [experts + 1]: first rows; bounded as in `slots`
  const long long* weights;  // [pages] addresses
  const long long* biases;   // or null
  long long x_stride;        // in numbers
  int x_rows, experts, depth, columns, activation;
  int bias_dtype, out_dtype;  // of out: kFloat16 or kFloat32
  float clamp, factor;        // of the activation, or of the sums before the bias
};

DEVICE int least(int left, int right) { return left < right ? left : right; }

DEVICE unsigned pack(unsigned short low, unsigned short high) { return low | static_cast<unsigned>(high) << 16; }

// 16 bytes of which `valid` are there; the others are zeros.
template <bool ALIGNED>
DEVICE Words fetch(const unsigned char* from, int valid) {
  Words found{0, 0, 0, 0};
  if (ALIGNED) {
    if (valid > 0) found = load_words(from);
    return found;
  }
  unsigned parts[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if (i < valid) parts[i / 4] |= static_cast<unsigned>(load(from + i)) << (i % 4 * 8);
  return Words{parts[0], parts[1], parts[2], parts[3]};
}

DEVICE unsigned narrow(unsigned pair) {
  return pack(to_half(as_float(pair << 16)), to_half(as_float(pair & 0xffff0000u)));
}

// The eight numbers of a chunk as float16.
template <int STORED>
DEVICE Words narrowed(const Words& stored) {
  if (STORED == kFloat16) return stored;
  return Words{narrow(stored.x), narrow(stored.y), narrow(stored.z), narrow(stored.w)};
}

// The place of a chunk in shared memory: 8 rows at the same chunk lie in 8 different groups of banks, and so do two
// rows with all their chunks.
DEVICE int place_of(int row, int chunk) { return row * kChunks + (chunk ^ (row >> 1 & 3)); }

// The bits of number `index` of those of `dtype` at an address, and what they stand for.
DEVICE unsigned load_bits(long long address, int dtype, long long index) {
  if (dtype == kFloat32) return load(reinterpret_cast<const unsigned*>(address) + index);
  return load(reinterpret_cast<const unsigned short*>(address) + index);
}

DEVICE float number(unsigned bits, int dtype) {
  const float half = from_half(static_cast<unsigned short>(bits));
  return dtype == kFloat16 ? half : as_float(dtype == kFloat32 ? bits : bits << 16);
}

DEVICE float activated(float gate, float up, int activation, float clamp) {
  float inner = gate;
  if (activation == kGeluTanh) {
    inner = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
  } else if (activation == kSwigluOai) {
    gate = gate > clamp ? clamp : gate;
    up = up > clamp ? clamp : up < -clamp ? -clamp : up;
    inner = 1.702f * gate;
    up += 1.0f;
  }
  return gate / (1.0f + __expf(-inner)) * up;
}

// What one block computes.
struct Block {
  int page;      // the column of the tables of addresses
  int row, end;  // the first row, and the one after the expert's last
  int column;    // the first
};

// The first row of the expert with row `row`, which is below `end`: the last offset that is not above it.
DEVICE int first_row(const Call& call, int row, int end) {
  int low = 0, high = call.experts;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (load(call.offsets + middle) > row ? high : low) = middle;
  }
  const int found = load(call.offsets + low);
  return found < 0 ? 0 : least(found, end);
}

// Blocks go over at most kBand slots of one expert for one block of columns, then the next columns: a band reads the
// rows of the matrix once. False for a block without rows.
template <int ROWS>
DEVICE bool find_block(const Call& call, int columns, Block& block) {
  const int across = (call.columns + columns - 1) / columns;
  const int program = static_cast<int>(blockIdx.x), slot = program / across;
  block.page = load(call.slots + slot * 3);
  if (block.page < 0) return false;
  const int row = load(call.slots + slot * 3 + 1);
  block.end = load(call.slots + slot * 3 + 2);
  const int first = first_row(call, row, block.end), down = (block.end - first + ROWS - 1) / ROWS;
  int inside = program - (slot - (row - first) / ROWS) * across;
  const int begin = inside / (kBand * across) * kBand, band = least(down - begin, kBand);
  if (inside < 0 || band < 1) return false;  // of offsets that do not ascend
  inside -= begin * across;
  block.row = first + (begin + inside % band) * ROWS;
  block.column = inside / band * columns;
  return block.row < block.end;
}

template <int STORED, bool GATED, int ROWS, bool ALIGNED>
struct Product {
  static constexpr int kDown = ROWS == 128 ? 2 : 1;  // warps
  static constexpr int kAcross = kWarps / kDown;
  static constexpr int kWarpRows = ROWS / kDown, kWarpColumns = kMatrixRows / kAcross;
  static constexpr int kTall = kWarpRows / 16, kWide = kWarpColumns / 8;  // products of a warp
  static constexpr int kColumns = GATED ? kMatrixRows / 2 : kMatrixRows;  // of out
  static constexpr int kOutWide = GATED ? kWide / 2 : kWide;
  static constexpr int kLoads = kMatrixRows * kChunks / kThreads;
  static constexpr int kRowLoads = ROWS * kChunks / kThreads;
  static constexpr int kBuffer = (ROWS + kMatrixRows) * kChunks;  // Words in shared memory: rows of x, then the matrix

  const Call& call;
  const Block& block;
  Words* shared;
  const long long address;
  const int thread, lane, down, across;
  const unsigned char* rows[kRowLoads];
  const unsigned char* matrix[kLoads];
  Words held_rows[kRowLoads], held_matrix[kLoads];
  float sums[kTall][kWide][4];

  DEVICE Product(const Call& given, const Block& chosen, Words* buffers)
      : call(given),
        block(chosen),
        shared(buffers),
        address(load(given.weights + chosen.page)),
        thread(static_cast<int>(threadIdx.x)),
        lane(thread % kWarp),
        down(thread / kWarp / kAcross),
        across(thread / kWarp % kAcross) {
#pragma unroll
    for (int i = 0; i < kRowLoads; ++i) {
      const int row = block.row + (i * kThreads + thread) / kChunks;
      long long source = row < block.end ? row : block.row;
      if (call.tokens) {
        source = load(call.tokens + source);
        source = source < 0 ? 0 : source < call.x_rows ? source : call.x_rows - 1;
      }
      rows[i] = reinterpret_cast<const unsigned char*>(call.x + source * call.x_stride) + thread % kChunks * 16;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const long long row = matrix_row((i * kThreads + thread) / kChunks);
      matrix[i] = reinterpret_cast<const unsigned char*>(address) + row * call.depth * 2 + thread % kChunks * 16;
    }
    clear(sums);
  }

  template <int TALL, int WIDE>
  static DEVICE void clear(float (&of)[TALL][WIDE][4]) {
#pragma unroll
    for (int i = 0; i < TALL * WIDE * 4; ++i) of[i / (WIDE * 4)][i / 4 % WIDE][i % 4] = 0.0f;
  }

  // The matrix row in row `place` of shared memory, where a warp has its rows of gate before those of up; the last one
  // stands in for rows after it.
  DEVICE int matrix_row(int place) const {
    if (!GATED) return least(block.column + place, call.columns - 1);
    constexpr int half = kWarpColumns / 2;
    const int column = block.column + place / kWarpColumns * half + place % half;
    return least(column, call.columns - 1) + (place / half % 2 ? call.columns : 0);
  }

  // The place of the sums' number `which` in products `wide` of this thread.
  DEVICE int sum_place(int wide, int which) const { return across * kWarpColumns + wide * 8 + lane % 4 * 2 + which; }

  DEVICE void fetch_step(int step) {
    const int begin = step * 16 * kChunks, bytes = call.depth * 2 - begin - thread % kChunks * 16;
#pragma unroll
    for (int i = 0; i < kRowLoads; ++i) held_rows[i] = fetch<ALIGNED>(rows[i] + begin, bytes);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) held_matrix[i] = fetch<ALIGNED>(matrix[i] + begin, bytes);
  }

  DEVICE void stash_step(int step) {
    Words* into = shared + step % 2 * kBuffer;
#pragma unroll
    for (int i = 0; i < kRowLoads; ++i)
      store_shared(into + place_of((i * kThreads + thread) / kChunks, thread % kChunks), held_rows[i]);
    into += ROWS * kChunks;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      store_shared(into + place_of((i * kThreads + thread) / kChunks, thread % kChunks),
                   narrowed<STORED>(held_matrix[i]));
  }

  // Multiply 16 inputs, which begin at `chunk` of a buffer.
  DEVICE void multiply(const Words* buffer, int chunk) {
    const Words* own = buffer + ROWS * kChunks;
    unsigned b[kWide / 2][4];
#pragma unroll
    for (int wide = 0; wide < kWide / 2; ++wide)
      load_matrices(b[wide], own + place_of(across * kWarpColumns + wide * 16 + lane % 16, chunk + lane / 16));
#pragma unroll
    for (int tall = 0; tall < kTall; ++tall) {
      unsigned a[4];
      load_matrices(a, buffer + place_of(down * kWarpRows + tall * 16 + lane % 16, chunk + lane / 16));
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int wide = 0; wide < kWide; ++wide)
          multiply_add(sums[tall][wide], a[half * 2], a[half * 2 + 1], b[wide / 2][half * 2 + wide % 2]);
    }
  }

  DEVICE void sum() {
    const int steps = address ? (call.depth + kInputs - 1) / kInputs : 0;
    if (steps) {
      fetch_step(0);
      stash_step(0);
    }
    __syncthreads();
    for (int step = 0; step < steps; ++step) {
      const bool more = step + 1 < steps;
      if (more) fetch_step(step + 1);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; chunk += 2) multiply(shared + step % 2 * kBuffer, chunk);
      if (more) stash_step(step + 1);
      __syncthreads();
    }
  }

  // Apply the factor and the bias.
  DEVICE void finish() {
    if (!address) return;
#pragma unroll
    for (int i = 0; i < kWide * 2; ++i) {
      const int row = matrix_row(sum_place(i / 2, i % 2));
      const float factor = GATED ? 1.0f : call.factor;
      float bias = 0.0f;
      if (call.biases) bias = number(load_bits(load(call.biases + block.page), call.bias_dtype, row), call.bias_dtype);
#pragma unroll
      for (int j = 0; j < kTall * 2; ++j) {
        float& value = sums[j / 2][i / 2][j % 2 * 2 + i % 2];
        value = value * factor + bias;
      }
    }
  }

  DEVICE float result(int tall, int wide, int which) const {
    if constexpr (GATED)
      return call.factor *
             activated(sums[tall][wide][which], sums[tall][wide + kOutWide][which], call.activation, call.clamp);
    else
      return sums[tall][wide][which];
  }

  DEVICE void write() const {
#pragma unroll
    for (int i = 0; i < kTall * 2; ++i) {
      const int row = block.row + down * kWarpRows + i * 8 + lane / 4;
#pragma unroll
      for (int wide = 0; wide < kOutWide; ++wide) {
        const int column = block.column + across * kOutWide * 8 + wide * 8 + lane % 4 * 2;
        if (row < block.end && column < call.columns)
          write(static_cast<long long>(row) * call.columns + column, column + 1 < call.columns,
                result(i / 2, wide, i % 2 * 2), result(i / 2, wide, i % 2 * 2 + 1));
      }
    }
  }

  // Number `index` of out and, if `both`, the next one.
  DEVICE void write(long long index, bool both, float first, float second) const {
    if (call.out_dtype == kFloat32) {
      float* into = static_cast<float*>(call.out) + index;
      store(into, first);
      if (both) store(into + 1, second);
      return;
    }
    unsigned short* into = static_cast<unsigned short*>(call.out) + index;
    if (index % 2 == 0 && both) {
      store(reinterpret_cast<unsigned*>(into), pack(to_half(first), to_half(second)));
    } else {
      store(into, to_half(first));
      if (both) store(into + 1, to_half(second));
    }
  }
};

// The rows of a block, of which at most ROWS are there; fewer take the tile that holds them.
template <int STORED, bool GATED, int ROWS, bool ALIGNED>
DEVICE void multiply(const Call& call, const Block& block, Words* buffers) {
  if constexpr (ROWS > 32) {
    if (block.end - block.row <= ROWS / 2) {
      multiply<STORED, GATED, ROWS / 2, ALIGNED>(call, block, buffers);
      return;
    }
  }
  Product<STORED, GATED, ROWS, ALIGNED> product(call, block, buffers);
  product.sum();
  product.finish();
  product.write();
}

template <int STORED, bool GATED, int ROWS, bool ALIGNED>
DEVICE void compute(const Call& call) {
  using Own = Product<STORED, GATED, ROWS, ALIGNED>;
  SHARED(buffers, 2 * Own::kBuffer);
  Block block;
  if (find_block<ROWS>(call, Own::kColumns, block))
    multiply<STORED, GATED, ROWS, ALIGNED>(call, block, buffers);
}

}  // namespace turing

#ifdef __CUDACC__
extern "C" __global__ void __launch_bounds__(turing::kThreads, 2) grouped(const turing::Call call) {
  turing::compute<VARIANT>(call);
}
#endif
