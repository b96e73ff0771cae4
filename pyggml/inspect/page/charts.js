// What several parts share: numbers as text, dragging and zooming, colours of ops; the time line and the memory map.
const trimmed = (ne) => { const d = [...ne]; while (d.length > 1 && d[d.length - 1] === 1) d.pop(); return "[" + d.join(", ") + "]"; };
const micro = (us) => (us >= 1e4 ? (us / 1e3).toFixed(1) + " ms" : us >= 1e3 ? (us / 1e3).toFixed(2) + " ms" : us.toFixed(us < 10 ? 2 : 1) + " µs");
const bytes = (n) => (n < 1e4 ? n + " B" : n < 1e7 ? (n / 1e3).toFixed(0) + " kB" : n < 1e10 ? (n / 1e6).toFixed(1) + " MB" : (n / 1e9).toFixed(2) + " GB");
const rate = (n, us) => (us > 0 ? n / us / 1e3 : 0); // bytes or operations in microseconds, as 10^9 per second
const fixed = (x) => (x === 0 ? "–" : x < 10 ? x.toFixed(2) : x.toFixed(1));
const number = (x) => (typeof x === "string" ? x : x === 0 ? "0" : Math.abs(x) >= 1e5 || Math.abs(x) < 1e-3 ? x.toExponential(2) : String(+x.toPrecision(4)));
// Layers by name: the shortest that tells one, and what several are called together.
const numberOf = (names, il) => names[il].match(/\d+$/)?.[0] ?? names[il];
const titleOf = (names, first, last) => (names[first] === `layer ${first}` ? `layers ${first} to ${last}` : `${names[first]} to ${numberOf(names, last)}`);
// The name of a tensor within the box of its layer: without the layer's own scope.
const inLayer = (names, t) => (t.layer !== undefined && t.name.startsWith(names[t.layer] + "/") ? t.name.slice(names[t.layer].length + 1) : t.name);
// The same, shorter: also without the layer's number and ".weight", which its box and its colour say; the op of a node without a name.
const shortly = (names, t) => (/(^|\/)node_\d+$/.test(t.name) ? t.op : t.layer === undefined ? t.name : inLayer(names, t).replace(/^(.*\.)?(blk|blocks?|layers?|h)\.\d+\./, "").replace(/\.weight$/, "").replace(/-\d+(?= |$)/, ""));
// What a step works at: of a fused one, the first of these that any of its nodes does.
const WORK = [
  ["attention", "#c9a98b", /^(soft_max|flash_attn|diag_mask|lightning|top_k_mask)/], ["product", "#6fa8f5", /^(mul_mat|out_prod|conv_|im2col|solve_tri)/],
  ["recurrence", "#b9c24d", /^(ssm_|rwkv|gated_)/], ["norm", "#f2a65e", /norm$/], ["rope", "#e57f86", /^rope/],
  ["copy", "#b39ddb", /^(cpy|cont|dup|cast|get_rows|set_rows|concat|repeat|pad|roll|set|acc|win_|col2im)/], ["by element", "#7fc97a", /./],
];
const workOf = (ops) => WORK.find(([, , which]) => ops.some((op) => which.test(op)));

function zoomable(canvas, pan, zoom, click, move) {
  let from = null, moved = 0;
  const point = (e) => { const r = canvas.getBoundingClientRect(); return [e.clientX - r.left, e.clientY - r.top]; };
  canvas.addEventListener("pointerdown", (e) => { from = point(e); moved = 0; canvas.setPointerCapture(e.pointerId); });
  canvas.addEventListener("pointermove", (e) => {
    const p = point(e);
    if (from) { moved += Math.abs(p[0] - from[0]) + Math.abs(p[1] - from[1]); pan(p[0] - from[0], p[1] - from[1]); from = p; }
    else move(p[0], p[1], e);
  });
  canvas.addEventListener("pointerup", (e) => { const p = point(e); if (from && moved < 4) click(p[0], p[1]); from = null; });
  canvas.addEventListener("pointercancel", () => { from = null; });
  canvas.addEventListener("pointerleave", (e) => move(null, null, e));
  canvas.addEventListener("wheel", (e) => {
    e.preventDefault();
    const [x, y] = point(e);
    if (e.shiftKey) pan(-(e.deltaX || e.deltaY), 0); else zoom(x, y, Math.exp(-e.deltaY * (e.deltaMode ? 0.05 : 0.0015)));
  }, { passive: false });
}

// Rectangles over an axis that zooms sideways: `rects` [{x0, x1, y0, y1, tensor, fill, label, tip}] in [0, end] x [0, 1].
function Bars(canvas, end, marginLeft, rows, rects, axis, pick, tip) {
  const g2 = canvas.getContext("2d");
  let colours = {}, from = 0, to = end, size = [0, 0], frame = 0, selected = -1;
  const top = 6, bottom = 22;
  const X = (v) => marginLeft + (v - from) / (to - from) * (size[0] - marginLeft - 12);
  const Y = (v) => top + v * (size[1] - top - bottom);
  function draw() { if (!frame) frame = requestAnimationFrame(() => { frame = 0; paint(); }); }
  function paint() {
    const ratio = window.devicePixelRatio || 1, [w, h] = size;
    if (!w || !h) return;
    canvas.width = Math.round(w * ratio); canvas.height = Math.round(h * ratio);
    g2.setTransform(ratio, 0, 0, ratio, 0, 0);
    g2.fillStyle = colours.panel; g2.fillRect(0, 0, w, h);
    g2.font = "11px system-ui, sans-serif"; g2.textBaseline = "middle"; g2.lineWidth = 1;
    const step = nice((to - from) / Math.max(2, w / 110));
    for (let v = Math.ceil(from / step) * step; v <= to; v += step) {
      g2.strokeStyle = colours.line; g2.beginPath(); g2.moveTo(X(v), top); g2.lineTo(X(v), h - bottom); g2.stroke();
      g2.fillStyle = colours.muted; g2.textAlign = X(v) > w - 40 ? "right" : "center"; g2.fillText(axis(v), Math.min(X(v), w - 4), h - bottom / 2);
    }
    g2.save(); g2.beginPath(); g2.rect(marginLeft, 0, w - marginLeft, h - bottom + 1); g2.clip();
    const known = selected >= 0 && rects.some((r) => r.tensors.includes(selected));
    const wider = []; // labels of layers that are wider than their rectangles: as many as have room, over all of them
    let free = 0;
    for (const r of rects) {
      if (r.x1 < from || r.x0 > to) continue;
      const x0 = X(r.x0), y0 = Y(r.y0), rw = Math.max(0.7, X(r.x1) - x0 - 0.4), rh = Math.max(0.7, Y(r.y1) - y0 - 0.4);
      const dim = known && r.tensors.length && !r.tensors.includes(selected);
      g2.fillStyle = r.fill ?? colours.layer; g2.globalAlpha = dim ? 0.45 : 1; g2.fillRect(x0, y0, rw, rh);
      if (r.tensors.includes(selected)) { g2.strokeStyle = colours.ink; g2.lineWidth = 2; g2.strokeRect(x0, y0, rw, rh); }
      g2.globalAlpha = 1;
      const left = Math.max(x0, marginLeft), room = Math.min(x0 + rw, w) - left;
      if (rh < 12) continue;
      const short = r.layer === undefined ? null : r.labels[1], wide = short !== null && room < 6.2 * short.length + 6;
      if (wide && left >= free && left + 6.2 * short.length + 4 < w) wider.push([short, left + 2, y0 + rh / 2]);
      if (short !== null && (!wide || left >= free)) free = left + Math.max(room, 6.2 * short.length + 14);
      if (wide) continue;
      const most = Math.floor((room - 6) / 6.2), label = r.labels.find((l) => l.length <= most) ?? (most > 5 ? r.labels[r.labels.length - 1].slice(0, most - 1) + "…" : "");
      g2.fillStyle = colours[r.fill && !dim ? "bar-ink" : "ink"]; g2.textAlign = "left"; g2.fillText(label, left + 4, y0 + rh / 2);
    }
    g2.fillStyle = colours.ink;
    for (const [label, x, y] of wider) g2.fillText(label, x, y);
    g2.restore();
    g2.fillStyle = colours.muted; g2.textAlign = "right";
    for (const [label, y] of rows) g2.fillText(label, marginLeft - 8, Y(y));
  }
  const at = (x, y) => {
    for (let i = rects.length - 1; i >= 0; i--) {
      const r = rects[i];
      if (x >= X(r.x0) - 1 && x <= Math.max(X(r.x1), X(r.x0) + 1) + 1 && y >= Y(r.y0) && y <= Math.max(Y(r.y1), Y(r.y0) + 2)) return r;
    }
    return null;
  };
  const keep = (a, b) => { const span = Math.min(b - a, end); from = Math.max(0, Math.min(a, end - span)); to = from + span; draw(); };
  zoomable(canvas, (dx) => { const d = dx / (size[0] - marginLeft - 12) * (to - from); keep(from - d, to - d); }, (x, y, f) => {
    const v = from + (x - marginLeft) / (size[0] - marginLeft - 12) * (to - from), span = Math.max(end / 5000, (to - from) / f);
    keep(v - (v - from) * span / (to - from), v + (to - v) * span / (to - from));
  }, (x, y) => { const r = at(x, y); pick(r && r.tensors.length ? r.tensors[r.tensors.length - 1] : -1); },
  (x, y, e) => { const r = x === null ? null : at(x, y); canvas.style.cursor = r ? "pointer" : "grab"; tip(r ? r.tip() : "", e); });
  return {
    resize() { const r = canvas.getBoundingClientRect(); size = [r.width, r.height]; draw(); },
    theme(c) { colours = c; draw(); }, select(i) { selected = i; draw(); }, draw,
    where(i) { const r = rects.find((q) => q.tensors.includes(i)); return r ? [(X(r.x0) + X(r.x1)) / 2, (Y(r.y0) + Y(r.y1)) / 2] : null; },
  };
}
const nice = (x) => { const p = 10 ** Math.floor(Math.log10(x)); return [1, 2, 5, 10].map((m) => m * p).find((m) => m >= x); };

function timeLine(canvas, data, pick, tip) {
  const T = data.tensors, rects = [], n = data.n_threads, layered = T.some((t) => t.layer !== undefined), above = layered ? 0.13 : 0;
  let end = 1e-3, now = null;
  for (const s of data.steps) {
    const last = T[s.nodes[s.nodes.length - 1]], name = last.name, begin = Math.min(...s.spans.map((p) => p[1])), stop = Math.max(...s.spans.map((p) => p[2]));
    end = Math.max(end, stop);
    if (layered && last.layer !== now?.layer) rects.push(now = { layer: last.layer, x0: begin, y0: 0, y1: above - 0.02, tensors: [],
      labels: last.layer === undefined ? [""] : [data.layers[last.layer], numberOf(data.layers, last.layer), ""] });
    if (now) { now.x1 = stop; now.hide = now.layer === undefined; now.tip = now.hide ? () => "" : ((r) => () => `${data.layers[r.layer]}: ${micro(r.x1 - r.x0)}`)(now); }
    for (const [thread, from, to] of s.spans)
      rects.push({ x0: from, x1: to, y0: above + (1 - above) * (thread + 0.04) / n, y1: above + (1 - above) * (thread + 0.96) / n, tensors: s.nodes, fill: s.work[1], labels: [`${name} · ${s.op}`, name],
        tip: () => `${name} · ${s.op}\nthread ${thread}: ${micro(to - from)}, from ${micro(from)} on\n${micro(s.us)} in all, ${fixed(rate(s.bytes, s.us))} GB/s, ${fixed(rate(s.flops, s.us))} GFLOPS${s.nodes.length > 1 ? `\nfused: ${s.nodes.map((i) => T[i].name).join(", ")}` : ""}` });
  }
  const rows = [...Array(n).keys()].map((i) => [`thread ${i}`, above + (1 - above) * (i + 0.5) / n]);
  return Bars(canvas, end, 70, rows, rects.filter((r) => !r.hide), micro, pick, tip);
}

function memoryMap(canvas, data, pick, tip) {
  const T = data.tensors, rects = [], rows = [], total = Math.max(1, data.pools.reduce((s, p) => s + p.size, 0));
  let base = 0;
  for (const pool of data.pools) {
    const at = base;
    rows.push([pool.name, (at + pool.size / 2) / total]);
    rows.push([bytes(pool.size), (at + pool.size) / total]);
    for (const [i, offset, size, first, last] of pool.blocks)
      rects.push({ x0: first, x1: last + 1, y0: (at + offset) / total, y1: (at + offset + size) / total, tensors: [i], fill: workOf([T[i].op])[1], labels: [`${T[i].name} · ${T[i].op}`, T[i].name],
        tip: () => `${T[i].name} · ${T[i].op}\n${bytes(size)} at byte ${offset} of ${pool.name}\nsteps ${first} to ${last}` });
    base += pool.size;
  }
  return Bars(canvas, Math.max(1, data.n_steps), 70, rows, rects, (v) => (Number.isInteger(v) ? "step " + v : ""), pick, tip);
}
