// Cut words into the texts whose scores have the highest sum. Sums are doubles; among equal sums the first one counts.
#include <math.h>

#include "vocab/trie.h"
#include "vocab/utf8.h"
#include "vocab/watch.h"

static void cut_offer(double *best, pg_step *step, double sum, int32_t token, int64_t from, int64_t end) {
  if (sum > best[end]) {
    best[end] = sum;
    step[end] = (pg_step){.token = token, .from = (int32_t)from};
  }
}

int64_t pg_best_cut(const pg_trie *t, const double *scores, const uint8_t *words, int64_t *ends, int64_t n_words,
                    double unknown, int32_t unk, int always, double *best, pg_step *step, int32_t *ids, int watch) {
  text_watch w = watch_begin(watch);
  int64_t n_ids = 0, start = 0;
  for (int64_t i = 0; i < n_words; start = ends[i], ends[i++] = n_ids) {
    const uint8_t *word = words + start;
    const int64_t n = ends[i] - start;
    for (int64_t at = 0; at <= n; at++) {
      best[at] = at ? -INFINITY : 0;
      step[at] = (pg_step){.token = unk, .from = 0};
    }
    for (int64_t at = 0; at < n; at++) {
      if (best[at] == -INFINITY) continue; // inside a character
      const int64_t next = at + utf8_length(word + at, n - at);
      int known = 0;
      int64_t end = at;
      for (int32_t node = 0; end < n && (node = trie_step(t, node, word[end]));) {
        const int32_t token = trie_text(t, node);
        end++;
        if (token < 0) continue;
        known |= end == next;
        cut_offer(best, step, best[at] + scores[token], token, at, end);
      }
      if (!known || always) cut_offer(best, step, best[at] + unknown, unk, at, next);
      if (watch_stops(&w, end - at + 1)) return watch_end(&w, PG_STOPPED);
    }
    int64_t n_word = 0;
    for (int64_t at = n; at > 0; at = step[at].from) ids[n_ids + n_word++] = step[at].token;
    for (int64_t a = 0, b = n_word - 1; a < b; a++, b--) {
      const int32_t id = ids[n_ids + a];
      ids[n_ids + a] = ids[n_ids + b];
      ids[n_ids + b] = id;
    }
    n_ids += n_word;
  }
  return watch_end(&w, n_ids);
}
