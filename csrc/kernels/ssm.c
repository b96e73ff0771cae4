// State-space models (Mamba): the selective scan.
#include "kernels/state.h"
#include "simd/vmath.h"

enum { S, X, DT, A, B, C, IDS }; // sources of ssm_scan

static int64_t padded(int64_t n) { return (n + VF_N - 1) / VF_N * VF_N; }

static int64_t turn_floats(const pg_task *t) { return padded(t->src[S].ne[0]) + padded(t->src[S].ne[1]); }

// Bytes of work of a thread: what PG_TURNS tokens bring; or A and the states of VF_N channels.
static int64_t work_bytes(const pg_task *t) {
  const int64_t turns = pg_times(PG_TURNS, turn_floats(t)), channels = pg_times(2 * VF_N, t->src[S].ne[0]);
  return pg_times(PG_MAX(turns, t->src[S].ne[1] == 1 ? channels : 0), sizeof(float));
}

int64_t PG_FN(ssm_scan_work)(const pg_task *t, int nth) { return pg_times(nth, work_bytes(t)); }

static float softplus(float x) {
  float y[VF_N];
  vf_store(y, vf_softplus(vf_set1(x)));
  return y[0];
}

// exp(A dt), where A has one number for all n, or one for each.
static void fade_of(float *w, const float *a, int64_t n_a, float dt, int64_t n) {
  if (n_a == 1) {
    const float all = expf(dt * a[0]);
    for (int64_t l = 0; l < n; l++) w[l] = all;
  } else {
    for (int64_t l = 0; l < n; l += VF_N) {
      const vf e = l + VF_N <= n ? vf_load(a + l) : vf_load_n(a + l, (int)(n - l));
      vf_store(w + l, vf_exp(e * vf_set1(dt)));
    }
  }
}

// One token: s = s * exp(A dt) + B x dt, y = C . s. A has one number per head (Mamba-2), or per element of a row
// (Mamba-1).
static void token(const pg_task *t, const pg_cell *c, pg_turn *turn, float *memory) {
  const int64_t n = t->src[S].ne[0], n_rows = t->src[S].ne[1], group = c->head / (t->src[X].ne[1] / t->src[B].ne[1]);
  float *decay = memory, *input = memory + padded(n);
  const float dt = softplus(((const float *)pg_row_at(&t->src[DT], c->token, c->seq, 0))[c->head]);
  const float *x = (const float *)pg_row_at(&t->src[X], c->head, c->token, c->seq);
  fade_of(decay, (const float *)pg_row_at(&t->src[A], c->head, 0, 0), t->src[A].ne[0], dt, n);
  for (int64_t l = 0; l < n_rows; l++) input[l] = x[l] * dt;
  *turn = (pg_turn){.w = decay,
                    .k = (const float *)pg_row_at(&t->src[B], group, c->token, c->seq),
                    .r = (const float *)pg_row_at(&t->src[C], group, c->token, c->seq),
                    .v = input};
}

// VF_N channels from `first` on side by side, for heads of one element (Mamba-1).
static void channels(const pg_task *t, const pg_cell *c, const float *from, float *to, float *y, float *work) {
  const pg_tensor *x = &t->src[X];
  const int64_t n = t->src[S].ne[0], n_head = x->ne[1], per_a = t->src[A].ne[0] == 1 ? 0 : 1;
  const int64_t count = PG_MIN(VF_N, n_head - c->head), group = c->head / (n_head / t->src[B].ne[1]);
  float *a = work, *s = work + n * VF_N; // [n][VF_N]
  memset(work, 0, (size_t)(2 * n * VF_N) * sizeof(float));
  for (int64_t i = 0; i < count; i++) {
    const float *pa = (const float *)pg_row_at(&t->src[A], c->head + i, 0, 0);
    for (int64_t j = 0; j < n; j++) a[j * VF_N + i] = pa[j * per_a], s[j * VF_N + i] = from[i * n + j];
  }
  for (int64_t k = 0; k < x->ne[2]; k++) {
    const float *pb = (const float *)pg_row_at(&t->src[B], group, k, c->seq);
    const float *pc = (const float *)pg_row_at(&t->src[C], group, k, c->seq);
    const float *pdt = (const float *)pg_row_at(&t->src[DT], k, c->seq, 0) + c->head;
    float in[VF_N] = {0}, out[VF_N];
    for (int64_t i = 0; i < count; i++) in[i] = *(const float *)pg_row_at(x, c->head + i, k, c->seq);
    const vf dt = vf_softplus(count == VF_N ? vf_load(pdt) : vf_load_n(pdt, (int)count)), u = vf_load(in) * dt;
    vf sum = vf_zero();
    for (int64_t j = 0; j < n; j++) {
      const vf fade = vf_exp(vf_load(a + j * VF_N) * dt);
      const vf z = vf_fma(vf_load(s + j * VF_N), fade, u * vf_set1(pb[j]));
      vf_store(s + j * VF_N, z);
      sum = vf_fma(z, vf_set1(pc[j]), sum);
    }
    vf_store(out, sum);
    memcpy(y + k * n_head, out, (size_t)count * sizeof(float));
  }
  for (int64_t i = 0; i < count; i++)
    for (int64_t j = 0; j < n; j++) to[i * n + j] = s[j * VF_N + i];
}

static void scan_channels(const pg_task *t, int ith, int nth, const pg_scan *x) {
  const int64_t n = x->n, blocks = (x->n_head + VF_N - 1) / VF_N;
  float *y = (float *)t->dst.data;
  float *work = (float *)((char *)t->work + ith * work_bytes(t));
  const pg_range r = pg_share(blocks * x->n_seqs, ith, nth);
  for (int64_t i = r.first; i < r.last; i++) {
    const pg_cell c = {.head = i % blocks * VF_N, .seq = i / blocks};
    float *to = y + c.seq * x->n_tokens * x->n_head + c.head;
    channels(t, &c, pg_scan_from(x, c.seq) + c.head * n, pg_scan_to(t, x, c.seq) + c.head * n, to, work);
  }
}

int PG_FN(ssm_scan_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *s = &t->src[S], *x = &t->src[X];
  pg_scan scan = {.n = s->ne[0], .n_rows = s->ne[1], .n_head = s->ne[2], .n_tokens = x->ne[2], .n_seqs = x->ne[3]};
  scan.n_slots = (int64_t)t->param[0];
  scan.from = s;
  scan.n_from = s->ne[3];
  scan.ids = &t->src[IDS];
  const int64_t n_group = t->src[B].ne[1];
  const int side_by_side = n_group == 1 || scan.n_head / n_group % VF_N == 0; // channels share B and C
  const int status = pg_scan_begin(t, &scan);
  if (status) return status;
  if (scan.n_rows == 1 && scan.n_slots == 1 && side_by_side)
    scan_channels(t, ith, nth, &scan);
  else
    pg_scan_run(t, ith, nth, &scan, token, (float *)((char *)t->work + ith * work_bytes(t)), turn_floats(t),
                PG_TURN_PLAIN);
  pg_scan_end(t, ith, nth, &scan);
  return PG_OK;
}
