// The matrix unit of x86 (AMX): eight tile registers of 16 rows x 64 bytes for each thread.
//
//   kMatrixUnit    whether this build may use it; has_matrix_unit() whether this process may
//   MatrixUnit     configures the tiles of the calling thread while it lives
//
// A thread that holds configured tiles has 8 KiB more to save at each switch, so they are released.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AMX_INT8__) && defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace trnc {

#if defined(__AMX_INT8__) && defined(__AMX_TILE__)

constexpr bool kMatrixUnit = true;

// Linux gives the tile state to a process that asks for it, once, for all of its threads.
inline bool has_matrix_unit() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

class MatrixUnit {
 public:
  // Registers 0, 1, 4 and 5 are sums of `rows` rows; 3 and 7 have as many rows of `bytes`, which are multiplied at once
  // with the fours of bytes that registers 2 and 6 have for 16 columns.
  explicit MatrixUnit(int bytes, int rows = 16) {
    Config config{};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.rows[i] = static_cast<uint8_t>(i % 4 == 2 ? bytes / 4 : rows);
      config.bytes[i] = static_cast<uint16_t>(i % 4 == 3 ? bytes : 64);
    }
    asm volatile("ldtilecfg %0" ::"m"(config));  // the intrinsic hides from gcc 11 and 12 that it reads memory
  }
  ~MatrixUnit() { asm volatile("tilerelease"); }
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;

 private:
  struct Config {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  };
};

// The compiler's intrinsics want a literal for a register.
template <int Register>
void tile_load(const void* from, int64_t stride = 64) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Register) : "memory");
}
template <int Register>
void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(Register));
}
template <int Register>
void tile_store(void* to) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(int64_t{64}), "i"(Register) : "memory");
}
// Sum = A (signed bytes) times B (unsigned bytes).
template <int Sum, int A, int B>
void tile_multiply() {
  asm volatile("tilezero %%tmm%c0\n\ttdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
}
// Sum += A times B, of signed bytes; and of unsigned A.
template <int Sum, int A, int B>
void tile_add_signed() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
}
template <int Sum, int A, int B>
void tile_add_unsigned() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
}

// Sum += A times B, pairs of bf16 in every four bytes.
template <int Sum, int A, int B>
void tile_add_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
}

#else

constexpr bool kMatrixUnit = false;

inline bool has_matrix_unit() { return false; }

#endif

}  // namespace trnc
