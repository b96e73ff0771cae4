// Find out which instruction sets this binary has code for, and which of them this CPU and OS can run. A level's table
// holds the kernels compiled for it; the binding looks for all others in the levels below (backends/cpu/isa.py).
#include "os/cpu.h"
#include "pg.h"
#include "products/borders.h"

#define LEVEL(isa)                                                                                                     \
  extern const pg_row pg_table__##isa[];                                                                               \
  extern const int64_t pg_table_size__##isa;
LEVEL(generic)
#if defined(PG_X86)
LEVEL(avx2)
LEVEL(avx512)
LEVEL(avx512vnni)
LEVEL(amx)
#elif defined(PG_ARM)
LEVEL(neon)
LEVEL(dotprod)
LEVEL(i8mm)
#endif
#undef LEVEL

static int isa_always(void) { return 1; }

int pg_cpu_is_amd, pg_cpu_is_zen5;

#if defined(PG_X86)
#include <cpuid.h>

#include "os/thread.h"
#include "simd/amx.h"

__attribute__((constructor)) static void isa_know_cpu(void) { // only once: it takes long on a virtual machine
  uint32_t a, b, c, d;
  pg_cpu_is_amd = __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx;
  pg_cpu_is_zen5 = pg_cpu_is_amd && __get_cpuid(1, &a, &b, &c, &d) && (a >> 8 & 0xf) + (a >> 20 & 0xff) >= 0x1a;
}

static uint64_t cpu_xcr0(void) {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 27))) return 0; // OSXSAVE
  __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  return (uint64_t)d << 32 | a;
}

static int cpu_has_avx2(void) {
  uint32_t a, b, c, d, b7, c7, d7;
  if ((cpu_xcr0() & 0x6) != 0x6 || !__get_cpuid(1, &a, &b, &c, &d)) return 0;
  if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return 0;
  return (c & (1u << 12)) && (c & (1u << 29)) && (b7 & (1u << 5)); // FMA, F16C, AVX2
}

static int cpu_has_avx512(void) {
  uint32_t a, b, c, d;
  if (!cpu_has_avx2() || (cpu_xcr0() & 0xe6) != 0xe6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  const uint32_t f_dq_bw_vl = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
  return (b & f_dq_bw_vl) == f_dq_bw_vl;
}

static int cpu_has_bf16(void) {
  uint32_t a, b, c, d;
  return cpu_has_avx512() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5));
}

static int cpu_has_avx512vnni(void) {
  uint32_t a, b, c, d;
  return cpu_has_avx512() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & (1u << 11));
}

// Test two products of tiles of ones, in case a virtual machine announces tiles that do not work.
static int tiles_work(void) {
  float sums[16][16] = {{0}};
  int32_t bytes[16][16] = {{0}};
  uint16_t ones[16][32];
  for (int i = 0; i < 16 * 32; i++) ones[i / 32][i % 32] = 0x3f80; // bytes of 63 and 128
  TILES_BEGIN();
  TILE_LOAD(0, ones, 64);
  TILE_LOAD(1, ones, 64);
  TILE_ZERO(2);
  TILE_DOT(2, 0, 1);
  TILE_STORE(2, sums, 64);
  TILE_ZERO(2);
  TILE_DOT_SU(2, 0, 1);
  TILE_STORE(2, bytes, 64);
  TILES_END();
  const int32_t sum = 32 * (63 * 63 - 128 * 128);
  return sums[0][0] == 32 && sums[15][15] == 32 && bytes[0][0] == sum && bytes[15][15] == sum;
}

static int tiles;
static void try_tiles(void) { tiles = pg_os_try_tiles(tiles_work); }

static int cpu_has_amx(void) {
  static pg_once once; // one thread at a time: all share the handler of SIGILL
  uint32_t a, b, c, d;
  const uint32_t tile = 1u << 22 | 1u << 24 | 1u << 25; // AMX-BF16, AMX-TILE, AMX-INT8
  if (!cpu_has_avx512vnni() || (cpu_xcr0() >> 17 & 3) != 3) return 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & tile) != tile) return 0;
  if (!cpu_has_bf16()) return 0;
  pg_do_once(&once, try_tiles);
  return tiles;
}
#elif defined(PG_ARM)
#if defined(PG_EMULATE) // tests/emulate.sh: the system is of x86, and knows no Arm
int pg_os_has_dotprod(void) { return 1; }
int pg_os_has_i8mm(void) { return 1; }
#endif
static int cpu_has_i8mm(void) { return pg_os_has_dotprod() && pg_os_has_i8mm(); }
#endif

static const struct {
  const char *name;
  int (*supported)(void);
  const pg_row *table;
  const int64_t *size;
} levels[] = {
    {"generic", isa_always, pg_table__generic, &pg_table_size__generic},
#if defined(PG_X86)
    {"avx2", cpu_has_avx2, pg_table__avx2, &pg_table_size__avx2},
    {"avx512", cpu_has_avx512, pg_table__avx512, &pg_table_size__avx512},
    {"avx512vnni", cpu_has_avx512vnni, pg_table__avx512vnni, &pg_table_size__avx512vnni},
    {"amx", cpu_has_amx, pg_table__amx, &pg_table_size__amx},
#elif defined(PG_ARM)
    {"neon", isa_always, pg_table__neon, &pg_table_size__neon},
    {"dotprod", pg_os_has_dotprod, pg_table__dotprod, &pg_table_size__dotprod},
    {"i8mm", cpu_has_i8mm, pg_table__i8mm, &pg_table_size__i8mm},
#endif
};

int pg_isa_count(void) { return sizeof levels / sizeof *levels; }

static int isa_known(int level) { return level >= 0 && level < pg_isa_count(); }

const char *pg_isa_name(int level) { return isa_known(level) ? levels[level].name : ""; }

int pg_isa_supported(int level) {
#if defined(PG_EMULATE) && defined(PG_X86) // tests/emulate.sh: levels above avx2 (level 1) are computed with it
  if (isa_known(level) && level > 1) level = 1;
#endif
  return isa_known(level) && levels[level].supported();
}

const pg_row *pg_isa_table(int level, int64_t *n) {
  *n = isa_known(level) ? *levels[level].size : 0;
  return isa_known(level) ? levels[level].table : NULL;
}

int64_t pg_work_size(const pg_row *row, const pg_task *t, int nth) { return row->work ? row->work(t, nth) : 0; }
