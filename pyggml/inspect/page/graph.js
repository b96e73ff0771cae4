// The graph on its canvas: layers and folds that open, pan and zoom, selection.
const READABLE = 9, PAD = 18, HEAD = 34; // pixels of the smallest text; around and above what is inside an open layer
const LATER = 3; // nodes between two readers of a leaf: beyond, it is drawn once more
function Graph(canvas, data, pick, hover) {
  const T = data.tensors, g2 = canvas.getContext("2d");
  const view = { x: 0, y: 0, k: 1 }, open = new Set();
  let colours = {}, byTime = false, selected = -1, mates = new Set(), hovered = null, items = [], edges = [], frame = 0, size = [0, 0], smallest = Infinity, whole = [0, 0, 1, 1];

  // what is drawn: boxes of tensors in layers, equal layers in folds. A leaf is drawn in each layer that reads it, and
  // again for readers that come much later
  const root = { key: "root", kids: [] }, groups = new Map(), parents = new Map(), boxesOf = T.map(() => []);
  const layers = [...new Set(T.map((t) => t.layer).filter((l) => l !== undefined))].sort((a, b) => a - b);
  const homes = T.map((t) => (t.layer === undefined ? "" : "layer " + t.layer));
  let last = "";
  T.forEach((t, i) => { if (t.op !== "none" && t.layer === undefined) homes[i] = "after " + last; else if (t.op !== "none") last = homes[i]; });
  for (const il of layers) {
    const fold = data.folds.find(([first, period, times]) => il >= first && il < first + period * times);
    let into = root;
    if (fold) {
      const [first, period, times] = fold, key = "fold " + first;
      if (!groups.has(key)) add({ key, kids: [], title: titleOf(data.layers, first, first + period * times - 1), times, period, layers: [] }, root);
      into = groups.get(key);
      into.layers.push(il);
    }
    add({ key: "layer " + il, kids: [], title: data.layers[il], layers: [il] }, into);
  }
  function add(group, into) { groups.set(group.key, group); parents.set(group.key, into); into.kids.push(group); }
  const widths = T.map((t) => { g2.font = "12.5px system-ui, sans-serif"; return Math.max(g2.measureText(inLayer(data.layers, t)).width, g2.measureText(below(t)).width * 0.9); });
  function below(t) { return t.op === "none" ? `${t.type} ${trimmed(t.ne)}` : `${t.op}${t.us && t.last ? "  " + micro(t.us) : ""}`; }
  function boxIn(i, home, copy = 0) { // the box of a tensor in a layer (or beside the layers)
    const key = `${i} in ${home}, ${copy}`;
    if (!parents.has(key)) {
      add({ key, tensor: i, w: Math.min(230, Math.max(64, widths[i] + 22)), h: T[i].op === "none" ? 34 : 40 }, groups.get(home) || root);
      boxesOf[i].push(key);
    }
    return key;
  }
  const copies = new Map(); // "leaf reader" -> which of its boxes the reader reads
  T.forEach((t, i) => {
    if (t.op !== "none" || !t.users.length) boxIn(i, homes[i]);
    else t.users.reduce((copy, u, k) => { copy += k && u - t.users[k - 1] > LATER ? 1 : 0; copies.set(i + " " + u, copy); boxIn(i, homes[u], copy); return copy; }, 0);
  });
  const chain = (key) => { const found = []; for (let at = key; at !== "root"; at = parents.get(at).key) found.push(at); return found.reverse(); };
  const links = [];
  const link = (s, i, dotted, role) => links.push({ a: chain(T[s].op === "none" ? boxIn(s, homes[i], copies.get(s + " " + i)) : boxIn(s, homes[s])), b: chain(boxIn(i, homes[i])), s, i, dotted, role });
  T.forEach((t, i) => t.src.forEach((s, k) => { if (s >= 0) link(s, i, false, t.src.length > 1 ? t.roles[k] : ""); }));
  data.stored.forEach(([s, i]) => link(s, i, true, "")); // what is stored is read below
  const timeOf = (g) => g.layers.reduce((sum, il) => sum + (times.get(il) || 0), 0), times = new Map(), counts = new Map();
  for (const t of T) if (t.layer !== undefined && t.op !== "none") { times.set(t.layer, (times.get(t.layer) || 0) + (t.us || 0)); counts.set(t.layer, (counts.get(t.layer) || 0) + 1); }
  const slowest = Math.max(1e-9, ...T.map((t) => t.us || 0)), slowestLayer = Math.max(1e-9, ...times.values());

  // A line crosses the border of an open layer at a port: it has a part in each group on its way.
  function segments() {
    const found = new Map();
    const part = (group, from, to, link, key) => {
      const of = found.get(group) || found.set(group, new Map()).get(group), name = `${from}>${to}${key}${link.dotted ? "." : ""}`;
      const seg = of.get(name) || of.set(name, { from, to, links: [], dotted: link.dotted, s: link.s }).get(name);
      seg.links.push(link);
    };
    for (const l of links) {
      let d = 0;
      while (l.a[d] === l.b[d] && d < l.a.length && open.has(l.a[d])) d++;
      if (l.a[d] === l.b[d]) continue; // both in one layer that is closed, or at one place
      part(d ? l.a[d - 1] : "root", l.a[d], l.b[d], l, open.has(l.a[d]) || open.has(l.b[d]) ? l.s : "");
      for (let e = d; open.has(l.a[e]); e++) part(l.a[e], l.a[e + 1], "out " + l.s, l, "");
      for (let e = d; open.has(l.b[e]); e++) part(l.b[e], "in " + l.s, l.b[e + 1], l, "");
    }
    return found;
  }
  const kept = new Map(); // layouts of layers: what they hold does not change
  function lay(group, segs) {
    const known = kept.get(group.key);
    if (known && known.room === size.join()) return known;
    const boxes = group.kids.map((kid) => {
      if (kid.tensor !== undefined) return { ...kid };
      if (!open.has(kid.key)) return { key: kid.key, group: kid, w: 196, h: 50 };
      const inside = lay(kid, segs);
      return { key: kid.key, group: kid, w: inside.w + 2 * PAD, h: inside.h + HEAD + PAD, inside };
    });
    const mine = [...(segs.get(group.key) || new Map()).values()], at = new Map(boxes.map((b) => [b.key, b])), pairs = new Map();
    for (const seg of mine) for (const end of [seg.from, seg.to]) if (!at.has(end)) {
      const port = { key: end, port: true, w: 6, h: 0, end: end.startsWith("in ") ? "top" : "bottom" };
      at.set(end, port); boxes.push(port);
    }
    const index = new Map(boxes.map((b, i) => [b.key, i]));
    for (const { from, to } of mine) pairs.set(from + ">" + to, [index.get(from), index.get(to)]);
    const done = layered(boxes, [...pairs.values()], { w: Math.max(300, size[0] - 60), h: Math.max(250, size[1] - 110) });
    const routes = new Map([...pairs.keys()].map((key, i) => [key, done.routes[i]]));
    const laid = { w: done.w, h: done.h, boxes, at, segs: mine.map((seg) => ({ ...seg, points: routes.get(seg.from + ">" + seg.to) })), room: size.join() };
    if (group !== root && !group.kids.some((kid) => kid.group || kid.kids)) kept.set(group.key, laid);
    return laid;
  }
  function build() {
    items = []; edges = [];
    const laid = lay(root, segments());
    whole = [0, 0, laid.w, laid.h];
    put(laid, 0, 0);
    draw();
  }
  function put(laid, dx, dy) {
    const placed = new Map();
    for (const b of laid.boxes) {
      const c = { ...b, x: b.x + dx, y: b.y + dy };
      placed.set(b.key, c);
      if (b.port) continue;
      items.push(c);
      if (b.inside) put(b.inside, c.x - c.w / 2 + PAD, c.y - c.h / 2 + HEAD);
    }
    const into = new Map();
    for (const seg of laid.segs) {
      const a = placed.get(seg.from), b = placed.get(seg.to), points = seg.points.map(([x, y, corner]) => [x + dx, y + dy, corner]);
      const port = (box, way, edge) => { const p = box.inside.at.get(way + seg.s); return [box.x - box.w / 2 + PAD + p.x, edge]; };
      const from = a.inside ? port(a, "out ", a.y + a.h / 2) : [a.x, a.y + a.h / 2];
      const to = b.inside ? port(b, "in ", b.y - b.h / 2) : [b.x, b.y - b.h / 2];
      if (a.port) from[1] = dy - HEAD; // on the border of the layer
      if (b.port) to[1] = dy + laid.h + PAD;
      const e = { ...seg, from, to, points, arrow: !b.port && !b.inside, role: b.tensor === undefined ? "" : [...new Set(seg.links.map((l) => l.role))].filter(Boolean).join(", ") };
      edges.push(e);
      if (e.arrow) into.set(b, [...(into.get(b) || []), e]);
    }
    for (const [b, es] of into) { // lines that enter a box stand side by side
      const side = (e) => (e.points.length ? e.points[e.points.length - 1] : e.from)[0], step = Math.min(es.some((e) => e.role.length > 2) ? 44 : 30, 0.84 * b.w / es.length);
      es.sort((d, e) => side(d) - side(e)).forEach((e, k) => { e.to[0] += (k - (es.length - 1) / 2) * step; });
    }
    for (const e of edges) for (const [end, k] of [[e.from, 0], [e.to, e.points.length - 1]]) if (e.points[k]?.[2]) e.points[k][0] = end[0];
  }
  function scaleOf([x0, y0, x1, y1]) { return Math.min(1.3, (size[0] - 40) / (x1 - x0), (size[1] - 100) / (y1 - y0)); }
  function fit(least = 0.005) { // shows everything; or the beginning, where everything would be smaller than `least`
    const [x0, y0, x1, y1] = whole, k = view.k = Math.max(least, scaleOf(whole));
    const first = items.reduce((a, b) => (b.inside || (a && a.y <= b.y) ? a : b), null); // the topmost box
    view.x = (x1 - x0) * k > size[0] - 40 ? Math.max(size[0] - 20 - x1 * k, Math.min(20 - x0 * k, size[0] / 2 - first.x * k)) : size[0] / 2 - (x0 + x1) / 2 * k;
    view.y = (y1 - y0) * k > size[1] - 100 ? 50 - y0 * k : size[1] / 2 - (y0 + y1) / 2 * k;
    draw();
  }
  const READABLE_SCALE = 0.8, NAMED_SCALE = 0.34; // where both lines of a box can be read; where its name can, or its beginning
  const closable = () => [...groups].filter(([, g]) => g.layers).map(([key]) => key); // layers and folds
  const opens = (way) => { open.clear(); way.forEach((key) => open.add(key)); build(); };
  function start() { // as much as can be read at once, and all of a small graph
    const all = closable(), small = T.length < 120, least = small ? NAMED_SCALE : READABLE_SCALE, ways = T.length < 1500 && all.length < 12 ? [all] : [];
    ways.push(all.filter((key) => key.startsWith("fold")), []);
    ways.some((way) => { opens(way); return scaleOf(whole) >= least; });
    fit(scaleOf(whole) >= least ? 0 : READABLE_SCALE);
  }
  function draw() { if (!frame) frame = requestAnimationFrame(() => { frame = 0; paint(); }); }
  function heat(part) { return `color-mix(in srgb, ${colours.hot} ${Math.round(100 * Math.sqrt(Math.min(1, part)))}%, ${colours.cold})`; }
  const heats = new Map();
  function heatOf(part) { const k = Math.round(part * 200); if (!heats.has(k)) heats.set(k, heat(k / 200)); return heats.get(k); }
  // Text of `px` pixels at scale 1, never smaller than READABLE on the screen: the first of `texts` that fits into `width`
  // (of the graph), or as much of the last one as does.
  function write(texts, x, y, px, width, weight = "") {
    const on = Math.max(READABLE, px * view.k), most = Math.floor(width * view.k / (on * 0.56));
    const text = texts.find((text) => text.length <= most) ?? texts[texts.length - 1];
    if (most < 4 && most < text.length) return;
    smallest = Math.min(smallest, on);
    g2.font = `${weight} ${on / view.k}px system-ui, sans-serif`;
    g2.fillText(text.length <= most ? text : text.slice(0, most - 1) + "…", x, y);
  }
  function path(e) {
    let [px, py] = e.from, corner = false;
    const points = [...e.points, e.to];
    g2.moveTo(px, py);
    points.forEach(([x, y, turns], i) => {
      if (view.k < 0.2) g2.lineTo(x, y);
      else if (turns) g2.arcTo(x, y, points[i + 1][0], points[i + 1][1], 7);
      else if (corner || x === px) g2.lineTo(x, y);
      else { const bend = Math.max(8, Math.abs(y - py) * 0.55); g2.bezierCurveTo(px, py + bend, x, y - bend, x, y); }
      px = x; py = y; corner = turns;
    });
  }
  function lines(es, colour, width, dash) {
    g2.beginPath(); g2.strokeStyle = g2.fillStyle = colour; g2.lineWidth = width; g2.setLineDash(dash);
    es.forEach(path);
    g2.stroke(); g2.setLineDash([]);
    if (view.k < 0.3) return;
    g2.beginPath();
    for (const { arrow, to: [x, y] } of es) if (arrow) { g2.moveTo(x, y); g2.lineTo(x - 3.6, y - 7.5); g2.lineTo(x + 3.6, y - 7.5); g2.closePath(); }
    g2.fill();
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
    smallest = Infinity;
    g2.textBaseline = "middle";
    for (const b of items) if (b.inside && seen(b)) box(b, colours[b.group.times ? "fold-open" : "layer-open"], colours["layer-line"], 12, thin);
    const crosses = (e) => { const ys = [e.from[1], e.to[1], ...e.points.map((p) => p[1])], xs = [e.from[0], e.to[0], ...e.points.map((p) => p[0])]; return Math.max(...ys) > y0 && Math.min(...ys) < y1 && Math.max(...xs) > x0 && Math.min(...xs) < x1; };
    const near = edges.filter(crosses), touched = near.filter((e) => selected >= 0 && e.links.some((l) => l.s === selected || l.i === selected));
    lines(near.filter((e) => !e.dotted), colours.edge, thin, []);
    lines(near.filter((e) => e.dotted), colours.edge, 1.2 * thin, [2, 4]);
    lines(touched, colours.accent, 2 * thin, []);
    for (const titles of [false, true]) for (const b of items) if (seen(b) && !b.inside !== titles) item(b, far, thin);
    g2.textAlign = "left"; g2.fillStyle = colours.muted;
    if (view.k > 0.7) for (const e of near) if (e.role) write([e.role], e.to[0] + 4, e.to[1] - 7, 10, 60);
  }
  function item(b, far, thin) {
    if (b.inside) {
      const left = b.x - b.w / 2, top = b.y - b.h / 2, high = Math.max(1.3 * READABLE / view.k, HEAD);
      if (b.h * view.k < 14 || (b.group.times && high > HEAD)) return; // the layers in a fold have titles themselves
      g2.textAlign = "left"; g2.fillStyle = colours[b.group.times ? "fold-open" : "layer-open"];
      if (high > HEAD) g2.fillRect(left, top, b.w, high); // from afar the title needs more room than there is
      g2.fillStyle = colours.muted;
      write([`▾ ${b.group.title}  ${sub(b.group)}`, b.group.title, numberOf(data.layers, b.group.layers[0])], left + Math.min(12, b.w * 0.1), top + (high > HEAD ? high / 2 : 16), 13, b.w * 0.9, "600");
      return;
    }
    const t = b.tensor === undefined ? null : T[b.tensor], kind = t ? t.kind : "layer";
    const fill = !byTime ? colours[kind] : t ? heatOf((t.us || 0) / slowest) : heatOf(timeOf(b.group) / b.group.layers.length / slowestLayer);
    const chosen = t && b.tensor === selected, mate = t && mates.has(b.tensor), bad = t && t.values && t.values.nan > 0;
    const line = chosen || mate || b === hovered ? colours.accent : bad ? colours.bad : byTime && far ? fill : colours[kind + "-line"];
    if (b.group && b.group.times && !far) for (const off of [8, 4]) box({ ...b, x: b.x + off, y: b.y + off }, fill, line, 7, thin);
    g2.setLineDash((kind === "view" || mate) && !chosen && !far ? [4, 3] : []);
    box(b, fill, line, t && t.op === "none" ? 16 : 7, (chosen || bad ? 3 : mate || b === hovered ? 2 : 1) * thin);
    g2.setLineDash([]);
    const lines = Math.floor(b.h * view.k / (READABLE * 1.25)); // that fit into the box
    if (lines < 1) return;
    g2.textAlign = "center"; g2.fillStyle = colours.ink;
    write(t ? [inLayer(data.layers, t), shortly(data.layers, t)] : [`▸ ${b.group.title}`], b.x, b.y - (lines > 1 ? b.h * 0.18 : 0), t ? 12.5 : 14, b.w - 6, t ? "" : "600");
    if (lines > 1) { g2.fillStyle = colours.muted; write(t ? [below(t), t.op === "none" ? t.type : t.op] : [sub(b.group)], b.x, b.y + b.h * 0.22, 11.3, b.w - 6); }
  }
  function sub(g) { return `${g.times ? `${g.times} × ` : ""}${g.layers.slice(0, g.period || 1).reduce((n, il) => n + (counts.get(il) || 0), 0)} nodes  ${micro(timeOf(g))}`; }
  function box(b, fill, line, r, width) {
    if (view.k < 0.15) { // too small for corners and borders
      g2.fillStyle = b.inside ? fill : line; g2.fillRect(b.x - b.w / 2, b.y - b.h / 2, b.w, b.h);
      return;
    }
    g2.beginPath(); g2.roundRect(b.x - b.w / 2, b.y - b.h / 2, b.w, b.h, r); g2.lineWidth = width;
    g2.fillStyle = fill; g2.fill(); g2.strokeStyle = line; g2.stroke();
  }
  function at(x, y) { // the topmost item under a point of the canvas
    const gx = (x - view.x) / view.k, gy = (y - view.y) / view.k;
    for (let i = items.length - 1; i >= 0; i--) {
      const b = items[i];
      if (Math.abs(gx - b.x) <= b.w / 2 && Math.abs(gy - b.y) <= b.h / 2 && !(b.inside && gy > b.y - b.h / 2 + HEAD - 4)) return b;
    }
    return null;
  }
  function toggle(key, keep) { // opens or closes a group; what stands at the point `keep` of the canvas stays there
    const title = () => { const b = items.find((c) => c.key === key); return b ? [b.x * view.k, (b.y - b.h / 2) * view.k] : [0, 0]; };
    const before = title();
    if (open.has(key)) open.delete(key); else open.add(key);
    build();
    const now = title(), b = items.find((c) => c.key === key);
    if (!keep) return;
    view.x += before[0] - now[0]; view.y += before[1] - now[1];
    if (b && b.inside) bringIn(b);
    draw();
  }
  function bringIn(b) { // all of an open layer, smaller if names can be read then; or its beginning
    const fits = scaleOf([b.x - b.w / 2, b.y - b.h / 2, b.x + b.w / 2, b.y + b.h / 2]), k = view.k = fits < NAMED_SCALE ? Math.max(view.k, READABLE_SCALE) : Math.min(view.k, fits);
    const left = b.x - b.w / 2, top = b.y - b.h / 2, inside = (at, from, length, room) => (fits < NAMED_SCALE ? from : Math.max(from, Math.min(at, from + room - length)));
    view.x = inside(view.x + left * k, 20, b.w * k, size[0] - 40) - left * k;
    view.y = inside(view.y + top * k, 46, b.h * k, size[1] - 100) - top * k;
  }
  zoomable(canvas, (dx, dy) => { view.x += dx; view.y += dy; draw(); }, (x, y, f) => {
    const k = Math.min(4, Math.max(0.005, view.k * f));
    view.x = x - (x - view.x) * k / view.k; view.y = y - (y - view.y) * k / view.k; view.k = k; draw();
  }, (x, y) => { const b = at(x, y); if (!b) pick(-1); else if (b.group) toggle(b.key, true); else pick(b.tensor); },
  (x, y) => {
    const b = x === null ? null : at(x, y);
    if (b !== hovered) { hovered = b; draw(); }
    canvas.style.cursor = b ? "pointer" : "grab";
    hover(b && b.tensor !== undefined ? b.tensor : -1);
  });
  const shownAs = (i) => items.find((c) => c.tensor === i);
  return {
    fit, draw, paint, start, toggle, layers,
    resize() { const r = canvas.getBoundingClientRect(); size = [r.width, r.height]; draw(); },
    theme(c) { colours = c; heats.clear(); draw(); },
    colour(time) { byTime = time; draw(); },
    openAll(yes) { opens(yes ? closable() : []); fit(); },
    select(i, bring) {
      selected = i;
      mates = new Set(i < 0 || !T[i].step ? [] : T[i].step.nodes.filter((j) => j !== i));
      if (i >= 0 && bring) {
        if (!shownAs(i)) { chain(boxesOf[i][0]).slice(0, -1).forEach((key) => open.add(key)); build(); }
        const b = shownAs(i), k = view.k = Math.max(view.k, READABLE_SCALE);
        view.x = size[0] / 2 - b.x * k; view.y = size[1] / 2 - b.y * k;
      }
      draw();
    },
    where(i) { const b = typeof i === "string" ? items.find((c) => c.key === i) : shownAs(i); return b ? [b.x * view.k + view.x, (b.inside ? b.y - b.h / 2 + 15 : b.y) * view.k + view.y] : null; },
    place: (x, y) => [x * view.k + view.x, y * view.k + view.y], shown: () => items.length, folded: () => !open.size, scale: () => view.k, smallest: () => smallest, edges: () => edges, items: () => items, build,
  };
}
