// The graph on its canvas: layers that fold, pan and zoom, selection.
const HUB = 3; // leafs that so many layers read: their edges are drawn when they are selected
function Graph(canvas, data, pick, hover) {
  const T = data.tensors, g2 = canvas.getContext("2d");
  const view = { x: 0, y: 0, k: 1 }, open = new Set();
  let colours = {}, byTime = false, selected = -1, hovered = null, items = [], edges = [], frame = 0, size = [0, 0];
  const layersOf = [...new Set(T.map((t) => t.layer).filter((l) => l !== undefined))].sort((a, b) => a - b);
  const slowest = Math.max(1e-9, ...T.map((t) => t.us || 0));
  const slowestLayer = Math.max(1e-9, ...layersOf.map((il) => layerTime(il)));
  function layerTime(il) { return T.reduce((s, t) => s + (t.layer === il ? t.us || 0 : 0), 0); }
  const isHub = T.map((t) => t.op === "none" && new Set(t.users.map((u) => T[u].layer)).size >= HUB);
  g2.font = "12px system-ui, sans-serif";
  const widths = T.map((t) => Math.max(g2.measureText(t.name).width, g2.measureText(t.op === "none" ? `${t.type} ${trimmed(t.ne)}` : `${t.op}  ${t.us ? micro(t.us) : ""}`).width * 0.88));
  const boxOf = (i) => ({ tensor: i, w: Math.min(230, Math.max(64, widths[i] + 22)), h: T[i].op === "none" ? 32 : 38 });

  function place(members, keyOf, boxes) { // lays boxes out by the edges between them
    const at = new Map(boxes.map((b, i) => [b.key, i])), seen = new Map();
    for (const i of members) for (const s of T[i].src) {
      if (s < 0 || isHub[s]) continue;
      const a = at.get(keyOf(s)), b = at.get(keyOf(i));
      if (a !== undefined && b !== undefined && a !== b) seen.set(a + "," + b, [a, b]);
    }
    for (const [s, i] of data.stored) { // what is stored is read below
      const a = at.get(keyOf(s)), b = at.get(keyOf(i));
      if (a !== undefined && b !== undefined && a !== b) seen.set(a + "," + b, [a, b]);
    }
    const between = [...seen.values()];
    const done = layered(boxes, between);
    const routes = new Map(between.map(([a, b], k) => [boxes[a].key + ">" + boxes[b].key, done.routes[k]]));
    return { w: done.w, h: done.h, routes };
  }
  const inner = new Map(); // layer -> its layout, made when it is opened first
  function insideOf(il) {
    if (!inner.has(il)) {
      const members = T.map((t, i) => i).filter((i) => T[i].layer === il);
      const boxes = members.map((i) => ({ ...boxOf(i), key: "t" + i }));
      inner.set(il, { boxes, ...place(members, (i) => "t" + i, boxes) });
    }
    return inner.get(il);
  }
  function build() {
    const boxes = [];
    T.forEach((t, i) => { if (t.layer === undefined) boxes.push({ ...boxOf(i), key: "t" + i }); });
    for (const il of layersOf) {
      const box = { layer: il, key: "l" + il, w: 190, h: 50 };
      if (open.has(il)) { const in_ = insideOf(il); box.w = in_.w + 40; box.h = in_.h + 64; box.open = in_; }
      boxes.push(box);
    }
    const keyOf = (i) => (T[i].layer === undefined ? "t" + i : "l" + T[i].layer);
    const outer = place(T.map((t, i) => i), keyOf, boxes);
    items = []; edges = [];
    const shown = new Map(), routes = [];
    for (const [key, points] of outer.routes) routes.push([key, points]);
    for (const b of boxes) {
      items.push(b);
      shown.set(b.key, b);
      if (!b.open) continue;
      const dx = b.x - b.w / 2 + 20, dy = b.y - b.h / 2 + 44;
      for (const c of b.open.boxes) { const d = { ...c, x: c.x + dx, y: c.y + dy }; items.push(d); shown.set(d.key, d); }
      for (const [key, points] of b.open.routes) routes.push([key, points.map(([x, y]) => [x + dx, y + dy])]);
    }
    const byKey = new Map(routes);
    const of = (i) => shown.get("t" + i) || shown.get("l" + T[i].layer);
    const seen = new Set();
    const add = (s, i, dotted) => {
      const a = of(s), b = of(i), key = a.key + ">" + b.key + (dotted ? "." : "");
      if (a === b || seen.has(key)) return;
      seen.add(key);
      // an edge into or out of an open layer passes where that of the layer as a whole does
      const points = byKey.get(a.key + ">" + b.key) || byKey.get(keyOf(s) + ">" + keyOf(i)) || [];
      edges.push({ a, b, points, s, i, hub: isHub[s], dotted, view: T[i].kind === "view" });
    };
    T.forEach((t, i) => t.src.forEach((s) => { if (s >= 0) add(s, i, false); }));
    data.stored.forEach(([s, i]) => add(s, i, true));
    draw();
  }
  const bounds = () => {
    let box = [Infinity, Infinity, -Infinity, -Infinity];
    for (const b of items) box = [Math.min(box[0], b.x - b.w / 2), Math.min(box[1], b.y - b.h / 2), Math.max(box[2], b.x + b.w / 2), Math.max(box[3], b.y + b.h / 2)];
    return box;
  };
  function show([x0, y0, x1, y1], most) {
    const k = Math.min(most, (size[0] - 60) / (x1 - x0), (size[1] - 100) / (y1 - y0));
    view.k = Math.max(k, 0.005); view.x = size[0] / 2 - (x0 + x1) / 2 * view.k; view.y = size[1] / 2 - (y0 + y1) / 2 * view.k;
    draw();
  }
  const fit = () => show(bounds(), 1.3);
  function draw() { if (!frame) frame = requestAnimationFrame(() => { frame = 0; paint(); }); }
  function heat(part) { return `color-mix(in srgb, ${colours.hot} ${Math.round(100 * Math.sqrt(Math.min(1, part)))}%, ${colours.cold})`; }
  const heats = new Map();
  function heatOf(part) { const k = Math.round(part * 200); if (!heats.has(k)) heats.set(k, heat(k / 200)); return heats.get(k); }
  function short(text, width) {
    const most = Math.floor(width / 6.4);
    return text.length <= most ? text : text.slice(0, most - 1) + "…";
  }
  function path(e) {
    const x0 = e.a.x, y0 = e.a.y + e.a.h / 2, x1 = e.b.x, y1 = e.b.y - e.b.h / 2;
    let px = x0, py = y0;
    g2.moveTo(x0, y0);
    if (view.k < 0.2) { for (const [x, y] of [...e.points, [x1, y1]]) g2.lineTo(x, y); return; }
    for (const [x, y] of [...e.points, [x1, y1]]) {
      const bend = Math.min(60, Math.max(10, Math.abs(y - py) / 2));
      g2.bezierCurveTo(px, py + bend, x, y - bend, x, y);
      px = x; py = y;
    }
  }
  function paint() {
    const ratio = window.devicePixelRatio || 1, [w, h] = size;
    if (canvas.width !== Math.round(w * ratio)) canvas.width = Math.round(w * ratio);
    if (canvas.height !== Math.round(h * ratio)) canvas.height = Math.round(h * ratio);
    g2.setTransform(ratio, 0, 0, ratio, 0, 0);
    g2.fillStyle = colours.bg; g2.fillRect(0, 0, w, h);
    g2.setTransform(ratio * view.k, 0, 0, ratio * view.k, ratio * view.x, ratio * view.y);
    const x0 = -view.x / view.k, y0 = -view.y / view.k, x1 = x0 + w / view.k, y1 = y0 + h / view.k;
    const seen = (b) => b.x + b.w / 2 > x0 && b.x - b.w / 2 < x1 && b.y + b.h / 2 > y0 && b.y - b.h / 2 < y1;
    const far = view.k < 0.3, thin = 1 / Math.max(view.k, 0.4);
    for (const b of items) if (b.open && seen(b)) box(b, colours["layer-open"], colours["layer-line"], 12);
    const touched = (e) => selected >= 0 && (e.s === selected || e.i === selected);
    for (const dotted of [false, true]) {
      g2.beginPath(); g2.strokeStyle = colours.edge; g2.lineWidth = (dotted ? 1.2 : 1) * thin; g2.setLineDash(dotted ? [2, 4] : []);
      for (const e of edges) {
        if (e.hub || e.dotted !== dotted || Math.max(e.a.y, e.b.y) < y0 || Math.min(e.a.y, e.b.y) > y1) continue;
        path(e);
      }
      g2.stroke();
    }
    g2.setLineDash([]);
    g2.beginPath(); g2.strokeStyle = colours.accent; g2.lineWidth = 2 * thin;
    for (const e of edges) if (touched(e)) path(e);
    g2.stroke();
    for (const b of items) {
      if (b.open) { if (seen(b) && view.k > 0.1) { g2.fillStyle = colours.muted; g2.font = "600 13px system-ui, sans-serif"; g2.textAlign = "left"; g2.fillText(`▾ layer ${b.layer}`, b.x - b.w / 2 + 16, b.y - b.h / 2 + 22); } continue; }
      if (!seen(b)) continue;
      const t = b.tensor === undefined ? null : T[b.tensor], kind = t ? t.kind : "layer";
      const fill = !byTime ? colours[kind] : t ? heatOf((t.us || 0) / slowest) : heatOf(layerTime(b.layer) / slowestLayer);
      const on = t && b.tensor === selected, bad = t && t.values && t.values.nan > 0;
      g2.setLineDash(kind === "view" && !far ? [4, 3] : []);
      g2.lineWidth = (on || bad ? 3 : b === hovered ? 2 : 1) * thin;
      box(b, fill, on || b === hovered ? colours.accent : bad ? colours.bad : byTime && far ? fill : colours[kind + "-line"], t && t.op === "none" ? 16 : 7);
      g2.setLineDash([]);
      if (far && !(b.layer !== undefined && view.k > 0.16)) continue;
      g2.fillStyle = colours.ink; g2.textAlign = "center"; g2.font = t ? "12px system-ui, sans-serif" : "600 14px system-ui, sans-serif";
      g2.fillText(t ? short(t.name, b.w) : `▸ layer ${b.layer}`, b.x, b.y - 2);
      g2.fillStyle = colours.muted; g2.font = "10.5px system-ui, sans-serif";
      const below = t ? (t.op === "none" ? `${t.type} ${trimmed(t.ne)}` : `${t.op}${t.us && t.last ? "  " + micro(t.us) : ""}`) : `${count(b.layer)} nodes  ${micro(layerTime(b.layer))}`;
      g2.fillText(short(below, b.w + 16), b.x, b.y + 12);
    }
  }
  const counts = new Map();
  function count(il) { if (!counts.has(il)) counts.set(il, T.filter((t) => t.layer === il && t.op !== "none").length); return counts.get(il); }
  function box(b, fill, line, r) {
    if (view.k < 0.2) { // too small for corners and borders
      g2.fillStyle = b.open ? fill : line; g2.fillRect(b.x - b.w / 2, b.y - b.h / 2, b.w, b.h);
      return;
    }
    g2.beginPath(); g2.roundRect(b.x - b.w / 2, b.y - b.h / 2, b.w, b.h, r);
    g2.fillStyle = fill; g2.fill(); g2.strokeStyle = line; g2.stroke();
  }
  function at(x, y) { // the topmost item under a point of the canvas
    const gx = (x - view.x) / view.k, gy = (y - view.y) / view.k;
    for (let i = items.length - 1; i >= 0; i--) {
      const b = items[i];
      if (Math.abs(gx - b.x) <= b.w / 2 && Math.abs(gy - b.y) <= b.h / 2) { if (b.open && gy > b.y - b.h / 2 + 34) continue; return b; }
    }
    return null;
  }
  function toggle(il, keep) { // opens or closes a layer; what stands at the point `keep` of the canvas stays there
    const before = items.find((b) => b.layer === il);
    const top = before ? (before.y - before.h / 2) * view.k + view.y : 0, mid = before ? before.x * view.k + view.x : 0;
    if (open.has(il)) open.delete(il); else open.add(il);
    build();
    const now = items.find((b) => b.layer === il);
    if (keep && now) { view.y += top - ((now.y - now.h / 2) * view.k + view.y); view.x += mid - (now.x * view.k + view.x); draw(); }
  }
  zoomable(canvas, (dx, dy) => { view.x += dx; view.y += dy; draw(); }, (x, y, f) => {
    const k = Math.min(4, Math.max(0.005, view.k * f));
    view.x = x - (x - view.x) * k / view.k; view.y = y - (y - view.y) * k / view.k; view.k = k; draw();
  }, (x, y) => { const b = at(x, y); if (!b) pick(-1); else if (b.layer !== undefined) toggle(b.layer, true); else pick(b.tensor); },
  (x, y) => {
    const b = x === null ? null : at(x, y);
    if (b !== hovered) { hovered = b; draw(); }
    canvas.style.cursor = b ? "pointer" : "grab";
    hover(b && b.tensor !== undefined ? b.tensor : -1);
  });
  return {
    fit, draw, paint, toggle, open, layers: layersOf,
    resize() { const r = canvas.getBoundingClientRect(); size = [r.width, r.height]; draw(); },
    theme(c) { colours = c; heats.clear(); draw(); },
    colour(time) { byTime = time; draw(); },
    openAll(yes) { open.clear(); if (yes) layersOf.forEach((il) => open.add(il)); build(); fit(); },
    select(i, bring) {
      selected = i;
      if (i >= 0 && bring) {
        if (T[i].layer !== undefined && !open.has(T[i].layer)) { open.add(T[i].layer); build(); }
        const b = items.find((c) => c.tensor === i);
        const k = Math.max(view.k, 0.75);
        view.k = k; view.x = size[0] / 2 - b.x * k; view.y = size[1] / 2 - b.y * k;
      }
      draw();
    },
    where(i) { const b = items.find((c) => c.tensor === i || (i < 0 && c.layer === -i - 1)); return b ? [b.x * view.k + view.x, (b.open ? b.y - b.h / 2 + 15 : b.y) * view.k + view.y] : null; },
    zoom(k) { view.k = k; draw(); }, pan(dx, dy) { view.x += dx; view.y += dy; },
    shown: () => items.length, folded: () => !open.size, scale: () => view.k, build,
  };
}
