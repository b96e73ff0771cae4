// Four of the eight elements of two vectors of four dwords, by number, as clang's builtin gives them. gcc has it since
// 12, and before (Ubuntu 22.04 has 11) another one, which takes the numbers as a vector.
#pragma once
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12
#include <stdint.h>
typedef int32_t pg_numbers __attribute__((vector_size(16)));
#define PG_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (pg_numbers){__VA_ARGS__})
#else
#define PG_SHUFFLE __builtin_shufflevector
#endif
