// Ctrl-C, while a long plan runs. posix_interrupt.c has it by SIGINT, windows.c by the console.
#pragma once
#include <stdint.h>

// Calls nest; the handler that was set before is called as well.
int32_t pg_interrupt_watch(void); // returns pg_interrupts()
void pg_interrupt_release(void);
int32_t pg_interrupts(void); // how often Ctrl-C came while a plan watched
