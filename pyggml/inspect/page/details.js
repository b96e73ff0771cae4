// The panel on the right: what is known of the tensor that is selected.
function details(box, data, pick) {
  const T = data.tensors;
  let colours = {}, now = -1;
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
  function image(v) {
    const canvas = element("canvas", "image"), raw = atob(v.pixels);
    canvas.width = v.columns; canvas.height = raw.length / v.columns;
    const g2 = canvas.getContext("2d"), pixels = g2.createImageData(canvas.width, canvas.height);
    for (let k = 0; k < raw.length; k++) pixels.data.set(shade(raw.charCodeAt(k), v), 4 * k);
    g2.putImageData(pixels, 0, 0);
    return canvas;
  }
  const BLUE = [33, 102, 192], RED = [200, 60, 40], PALE = [245, 245, 240];
  function shade(p, v) { // 0: nothing finite; else from low (1) to high (255): blue below zero, red above
    if (!p) return [128, 128, 128, 255];
    const x = v.low + (p - 1) / 254 * (v.high - v.low), far = Math.max(Math.abs(v.low), Math.abs(v.high)) || 1, part = Math.min(1, Math.abs(x) / far), to = x < 0 ? BLUE : RED;
    return [...PALE.map((c, k) => Math.round(c + (to[k] - c) * Math.sqrt(part))), 255];
  }
  function overview() {
    box.append(element("h2", "", data.title), element("p", "", "Click a node for its values and neighbours, a layer to open it. Drag to move, turn the wheel to zoom."));
    box.append(element("h3", "", "this run"), list(Object.entries(data.about)));
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
    box.append(list([["ne", `[${t.ne.join(", ")}]`], ["NumPy shape", `(${t.shape.join(", ")}${t.shape.length === 1 ? "," : ""})`], ["nb", `[${t.nb.join(", ")}] bytes`],
      ["type", t.type], ["in place", t.store], ["backend", t.backend], ["memory", t.place ?? (t.op === "none" ? "" : "none: fused away")]]));
    if (s) {
      box.append(element("h3", "", "time"));
      box.append(list([["step", t.last ? (s.nodes.length > 1 ? `${s.op}, ${s.nodes.length} nodes fused` : s.op) : `in ${s.op} of ${T[s.nodes[s.nodes.length - 1]].name}`], ["took", micro(s.us)],
        ["of the run", (100 * s.us / data.wall).toFixed(2) + " %"], ["threads", s.spans.length], ["moved", `${bytes(s.bytes)}, ${fixed(rate(s.bytes, s.us))} GB/s`], ["worked", `${s.flops.toLocaleString("en")} flop, ${fixed(rate(s.flops, s.us))} GFLOPS`]]));
    }
    if (v) {
      const pair = element("div", "pair"), left = element("div"), ends = element("div", "ends");
      ends.append(element("span", "", number(v.low)), element("span", "", number(v.high)));
      left.append(histogram(v), ends); pair.append(left, image(v));
      box.append(element("h3", "", "values"), pair);
      box.append(list([["elements", v.n.toLocaleString("en")], ["mean", number(v.mean)], ["std", number(v.std)], ["NaN", v.nan || "", true], ["infinite", v.inf || ""]]));
      const table = element("table", "numbers");
      for (const row of v.corner) { const tr = element("tr"); for (const x of row) tr.append(element("td", "", number(x))); table.append(tr); }
      box.append(element("h3", "", "first rows"), table);
    }
    chips("reads", t.src.map((a, k) => [a, t.src.length > 1 ? t.roles[k] : ""]).filter(([a]) => a >= 0));
    chips("is read by", t.users.map((u) => [u, ""]));
  }
  return { select: show, theme(c) { colours = c; show(now); } };
}
