// The dispatch table of one instruction set: kernels.def (PG_PLAIN), r16.def and across.def (PG_R16), fast.def
// (PG_FAST), halves.def (PG_HALVES).
#include "kernel.h"

#define PG_KERNEL(op, variant, dst, s0, s1, work) int PG_FN(op##_##variant)(const pg_task *t, int ith, int nth);
#define PG_WORK(name) int64_t PG_FN(name)(const pg_task *t, int nth);
#include "exec/tables.def"
#undef PG_KERNEL
#undef PG_WORK

#define PG_STR_(x) #x
#define PG_STR(x) PG_STR_(x)
#define PG_KERNEL(op, variant, dst, s0, s1, work)                                                                      \
  {#op, PG_STR(PG_FN(op##_##variant)), PG_##dst, PG_##s0, PG_##s1, PG_FN(op##_##variant), work},
#define PG_WORK(name)

const pg_row PG_FN(table)[] = {
#include "exec/tables.def"
};
const int64_t PG_FN(table_size) = sizeof PG_FN(table) / sizeof *PG_FN(table);
