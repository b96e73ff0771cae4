// A clock that only goes forward.
#pragma once
#include <stdint.h>

int64_t pg_now_ns(void);
