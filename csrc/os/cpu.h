// What only the system knows of the CPU: x86 programs may ask the CPU itself for everything but tiles.
#pragma once

// x86: ask for tile registers, then run `trial`. Returns what it returns; 0 when the system does not allow tiles or
// ends the trial (SIGILL).
int pg_os_try_tiles(int (*trial)(void));

// 64-bit Arm.
int pg_os_has_dotprod(void);
int pg_os_has_i8mm(void);
