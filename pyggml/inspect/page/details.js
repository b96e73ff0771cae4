// The panel on the right: what is known of the tensor that is selected.
function details(box, data, pick, tip) {
  const T = data.tensors;
  let colours = {}, now = -1, slice = 0; // the slice that was looked at last: a head is followed through the layers
  function list(rows) {
    const dl = element("dl");
    for (const [name, value, bad] of rows) if (value !== undefined && value !== "") dl.append(element("dt", "", name), element("dd", bad ? "bad" : "", value));
    return dl;
  }
  function chips(title, entries) {
    if (!entries.length) return;
    const div = element("div");
    for (const [i, role] of entries) {
      const chip = element("span", "chip", T[i].name);
      if (role) chip.prepend(element("small", "", role));
      chip.dataset.t = i; chip.onclick = () => pick(i, true);
      div.append(chip);
    }
    box.append(element("h3", "", title), div);
  }
  function histogram(v) {
    const canvas = element("canvas"), g2 = canvas.getContext("2d"), w = 180, h = 84, most = Math.max(1, ...v.bins);
    canvas.width = 2 * w; canvas.height = 2 * h; g2.scale(2, 2); g2.fillStyle = colours.accent;
    v.bins.forEach((n, k) => { const y = n ? Math.max(1, (h - 2) * n / most) : 0; g2.fillRect(k * w / v.bins.length, h - y, w / v.bins.length - 0.8, y); });
    return canvas;
  }
  // The planes of a tensor: a picture and the first rows of one, and which one it is.
  function planes(t) {
    const v = t.values, kept = v.corners.length, box = element("div"), canvas = element("canvas", t.scores ? "scores" : "image"), table = element("table", "numbers"), raw = atob(v.pixels), [h, w] = v.size;
    const labels = t.scores && data.tokens.length === v.columns ? data.tokens.map((x) => x.replace(/\s/g, "·")) : null, rows = labels && v.rows === labels.length ? labels : null;
    const word = t.scores ? "head" : "slice", title = element("b"), range = element("input"), pick = element("div", "slices");
    const pixel = (r, c) => raw.charCodeAt((slice * h + r) * w + c);
    function draw() {
      title.textContent = `${word} ${slice} of ${v.planes}`;
      range.value = slice;
      (t.scores ? scores : plain)();
      table.replaceChildren(...v.corners[slice].map((row, r) => { const tr = element("tr"); if (rows) tr.append(element("th", "", rows[r])); for (const x of row) tr.append(element("td", "", number(x))); return tr; }));
    }
    function plain() {
      canvas.width = w; canvas.height = h;
      const g2 = canvas.getContext("2d"), pixels = g2.createImageData(w, h);
      for (let k = 0; k < h * w; k++) pixels.data.set(shade(pixel(Math.floor(k / w), k % w), v), 4 * k);
      g2.putImageData(pixels, 0, 0);
    }
    const left = rows ? 62 : 4, top = labels ? 58 : 4, wide = () => (box.clientWidth || 236), cell = () => Math.min(30, (wide() - left - 4) / w, rows ? 30 : 200 / h);
    function scores() {
      const size = cell(), high = top + size * h + 4, g2 = canvas.getContext("2d"), every = Math.max(1, Math.ceil(10 / size));
      canvas.width = 2 * wide(); canvas.height = 2 * high; canvas.style.height = high + "px";
      g2.scale(2, 2); g2.font = "10px system-ui, sans-serif"; g2.textBaseline = "middle"; g2.fillStyle = colours.muted;
      const short = (x) => (x.length > 9 ? x.slice(0, 8) + "…" : x);
      for (let r = 0; r < h; r++) for (let c = 0; c < w; c++) { g2.fillStyle = `rgb(${shade(pixel(r, c), v).slice(0, 3).join()})`; g2.fillRect(left + c * size, top + r * size, size - 0.4, size - 0.4); }
      g2.fillStyle = colours.muted; g2.textAlign = "right";
      if (rows) for (let r = 0; r < h; r += every) g2.fillText(short(rows[Math.floor(r * v.rows / h)]), left - 4, top + (r + 0.5) * size);
      g2.textAlign = "left";
      if (labels) for (let c = 0; c < w; c += every) { g2.save(); g2.translate(left + (c + 0.5) * size, top - 4); g2.rotate(-Math.PI / 2); g2.fillText(short(labels[Math.floor(c * v.columns / w)]), 0, 0); g2.restore(); }
    }
    if (t.scores) canvas.onpointermove = (e) => {
      const at = canvas.getBoundingClientRect(), c = Math.floor((e.clientX - at.x - left) / cell()), r = Math.floor((e.clientY - at.y - top) / cell());
      const name = (names, k, n, all) => (names ? `${Math.floor(k * all / n)} “${names[Math.floor(k * all / n)]}”` : Math.floor(k * all / n));
      tip(c < 0 || r < 0 || c >= w || r >= h ? "" : `row ${name(rows, r, h, v.rows)}\ncolumn ${name(labels, c, w, v.columns)}\n${pixel(r, c) ? "about " + number(v.low + (pixel(r, c) - 1) / 254 * (v.high - v.low)) : "not finite"}`, e);
    };
    canvas.onpointerleave = (e) => tip("", e);
    const step = (by) => { slice = Math.max(0, Math.min(kept - 1, slice + by)); draw(); };
    slice = Math.min(slice, kept - 1);
    range.type = "range"; range.min = 0; range.max = kept - 1;
    range.oninput = () => { slice = +range.value; draw(); };
    const less = element("button", "", "‹"), more = element("button", "", "›");
    less.onclick = () => step(-1); more.onclick = () => step(1);
    pick.append(less, range, more, title);
    const [all0, all1] = t.ne, cut = all0 > v.columns || (all1 > v.rows && v.n === t.ne.reduce((a, b) => a * b, 1));
    return { box, canvas, table, pick: kept > 1 ? pick : "", note: [kept < v.planes ? `the first ${kept} are kept` : "", cut ? `${v.rows} × ${v.columns} without padding` : ""].filter(Boolean).join("; "), draw };
  }
  const BLUE = [33, 102, 192], RED = [200, 60, 40], PALE = [245, 245, 240];
  function shade(p, v) { // 0: nothing finite; else from low (1) to high (255): blue below zero, red above
    if (!p) return [128, 128, 128, 255];
    const x = v.low + (p - 1) / 254 * (v.high - v.low), far = Math.max(Math.abs(v.low), Math.abs(v.high)) || 1, part = Math.min(1, Math.abs(x) / far), to = x < 0 ? BLUE : RED;
    return [...PALE.map((c, k) => Math.round(c + (to[k] - c) * Math.sqrt(part))), 255];
  }
  function overview() {
    box.append(element("h2", "", data.title), element("p", "", "Click a node for its values and neighbours, a layer to open it. Drag to move, turn the wheel to zoom."));
    if (Object.keys(data.about).length) box.append(element("h3", "", "this run"), list(Object.entries(data.about)));
    const slow = data.steps.map((s) => s).sort((a, b) => b.us - a.us).slice(0, 8);
    if (slow.length) chips("slowest steps", slow.map((s) => [s.nodes[s.nodes.length - 1], micro(s.us)]));
    const nan = T.map((t, i) => i).filter((i) => T[i].values?.nan);
    if (nan.length) chips(`${nan.length} tensors with NaN, the first`, nan.slice(0, 12).map((i) => [i, `${T[i].values.nan}`]));
  }
  function show(i) {
    now = i;
    box.replaceChildren();
    box.scrollTop = 0;
    if (i < 0) return overview();
    const t = T[i], v = t.values, s = t.step;
    box.append(element("h2", "", t.name), element("p", "", t.op === "none" ? `leaf (${t.kind})` : `${t.op} ${t.params}`));
    const p = v && planes(t);
    if (t.scores && v) box.append(p.pick, p.box, element("p", "", p.note));
    box.append(list([["ne", `[${t.ne.join(", ")}]`], ["NumPy shape", `(${t.shape.join(", ")}${t.shape.length === 1 ? "," : ""})`], ["nb", `[${t.nb.join(", ")}] bytes`],
      ["type", t.type], ["in place", t.store], ["backend", t.backend], ["memory", t.place ?? (t.op === "none" ? "" : "none: fused away")]]));
    if (s) {
      box.append(element("h3", "", "time"));
      box.append(list([["step", t.last ? (s.nodes.length > 1 ? `${s.op}, ${s.nodes.length} nodes fused` : s.op) : `in ${s.op} of ${T[s.nodes[s.nodes.length - 1]].name}`], ["took", micro(s.us)],
        ["of the run", (100 * s.us / data.wall).toFixed(2) + " %"], ["threads", s.spans.length], ["moved", `${bytes(s.bytes)}, ${fixed(rate(s.bytes, s.us))} GB/s`], ["worked", `${s.flops.toLocaleString("en")} flop, ${fixed(rate(s.flops, s.us))} GFLOPS`]]));
    }
    if (v) {
      const pair = element("div", t.scores ? "" : "pair"), left = element("div"), ends = element("div", "ends");
      ends.append(element("span", "", number(v.low)), element("span", "", number(v.high)));
      left.append(histogram(v), ends); pair.append(left); p.box.prepend(p.canvas);
      box.append(element("h3", "", "values"), pair);
      if (!t.scores) { pair.append(p.box); box.append(p.pick, element("p", "", p.note)); }
      box.append(list([["elements", v.n.toLocaleString("en")], ["mean", number(v.mean)], ["std", number(v.std)], ["NaN", v.nan || "", true], ["infinite", v.inf || ""]]));
      const rows = element("div", "wide");
      rows.append(p.table);
      box.append(element("h3", "", "first rows"), rows);
      p.draw();
    }
    if (s && s.nodes.length > 1) chips(`fused into one step: ${s.op}`, s.nodes.map((m) => [m, T[m].op]));
    chips("reads", t.src.map((a, k) => [a, t.src.length > 1 ? t.roles[k] : ""]).filter(([a]) => a >= 0));
    chips("is read by", t.users.map((u) => [u, ""]));
  }
  return { select: show, theme(c) { colours = c; show(now); } };
}
