// Layered drawing of boxes {w, h, end} and edges [from, to] (indices): each row of boxes below what it reads; boxes of
// `end` "top" or "bottom" stand above or below all others. Rows are wrapped into columns, as many as show them largest in
// `room` {w, h}. Sets x and y (the centre) of every box; returns {w, h, routes}: for each edge the points [x, y, corner] it
// goes through between its boxes. Lines between corners are straight.
function layered(boxes, edges, room, gapX = 18, gapY = 30) {
  const n = boxes.length, reads = boxes.map(() => []), users = boxes.map(() => []);
  for (const [a, b] of edges) reads[b].push(a);
  const rank = new Array(n).fill(-1), path = new Set(); // a box on the path to itself: that edge is not looked at
  for (let first = 0; first < n; first++) {
    const stack = [first];
    while (stack.length) {
      const i = stack[stack.length - 1];
      if (rank[i] >= 0) { stack.pop(); continue; }
      path.add(i);
      reads[i] = reads[i].filter((a) => !path.has(a));
      const next = reads[i].find((a) => rank[a] < 0);
      if (next !== undefined) { stack.push(next); continue; }
      rank[i] = Math.max(0, ...reads[i].map((a) => rank[a] + 1));
      path.delete(i);
      stack.pop();
    }
  }
  reads.forEach((from, b) => from.forEach((a) => users[a].push(b)));
  for (let i = 0; i < n; i++) if (!reads[i].length && users[i].length) rank[i] = Math.min(...users[i].map((b) => rank[b])) - 1;
  const first = Math.min(0, ...rank) - 1, last = Math.max(0, ...rank) + 1;
  boxes.forEach((b, i) => { if (b.end) rank[i] = b.end === "top" ? first : last; });
  const least = Math.min(...rank);
  // cells: the boxes, and points where long edges pass a row
  const cells = boxes.map((box, i) => ({ box, w: box.w, h: box.h, rank: rank[i] - least, up: [], down: [], x: 0, source: i }));
  const paths = edges.map(([a, b]) => {
    const path = [a];
    if (cells[a].rank >= cells[b].rank) return path;
    for (let r = cells[a].rank + 1; r < cells[b].rank; r++) {
      cells.push({ w: 6, h: 0, rank: r, up: [], down: [], x: 0, source: a });
      path.push(cells.length - 1);
    }
    path.push(b);
    for (let k = 1; k < path.length; k++) { cells[path[k]].up.push(cells[path[k - 1]]); cells[path[k - 1]].down.push(cells[path[k]]); }
    return path;
  });
  const rows = [];
  for (const c of cells) (rows[c.rank] = rows[c.rank] || []).push(c);
  const number = (row) => row.forEach((c, i) => { c.at = i; });
  rows.forEach(number);
  for (let sweep = 0; sweep < 10; sweep++) {
    const down = sweep % 2 === 0;
    for (const row of down ? rows : [...rows].reverse()) {
      for (const c of row) { const near = down ? c.up : c.down; c.want = near.length ? near.reduce((s, d) => s + d.at, 0) / near.length : c.at; }
      row.sort((a, b) => a.want - b.want || a.at - b.at);
      number(row);
    }
  }
  for (const row of rows) { let x = 0; for (const c of row) { c.off = x + c.w / 2; x += c.w + gapX; } for (const c of row) c.x = c.off - x / 2; }
  for (let sweep = 0; sweep < 16; sweep++) {
    const down = sweep % 2 === 0;
    for (const row of down ? rows : [...rows].reverse()) {
      // as near as can be to where the neighbours are, in this order: blocks of cells that push each other move as one
      const blocks = [];
      for (const c of row) {
        const near = sweep > 11 ? [...c.up, ...c.down] : down ? c.up : c.down;
        const want = near.length ? near.reduce((s, d) => s + d.x, 0) / near.length : c.x;
        const weight = near.length ? (c.box ? 1 : 4) : 0.05;
        let b = { cells: [c], sum: (want - c.off) * weight, weight };
        while (blocks.length && blocks[blocks.length - 1].sum / blocks[blocks.length - 1].weight > b.sum / b.weight) {
          const before = blocks.pop();
          b = { cells: [...before.cells, ...b.cells], sum: before.sum + b.sum, weight: before.weight + b.weight };
        }
        blocks.push(b);
      }
      for (const b of blocks) for (const c of b.cells) c.x = c.off + b.sum / b.weight;
    }
  }
  // columns of rows, from the left to the right
  const high = rows.map((row) => Math.max(...row.map((c) => c.h)));
  const crossing = rows.map((row) => new Set(row.flatMap((c) => c.up.map((d) => d.source))).size); // lines from the row above
  const ends = rows.map((row) => [Math.min(...row.map((c) => c.x - c.w / 2)), Math.max(...row.map((c) => c.x + c.w / 2))]);
  let best = null;
  for (let n = 1; n <= Math.min(40, rows.length); n++) {
    const starts = cut(n), cols = starts.map((from, g) => {
      const to = starts[g + 1] ?? rows.length, left = Math.min(...ends.slice(from, to).map((e) => e[0])), right = Math.max(...ends.slice(from, to).map((e) => e[1]));
      return { from, to, left, w: right - left, h: high.slice(from, to).reduce((s, h) => s + h + gapY, -gapY) };
    });
    const lanes = Math.max(0, ...starts.slice(1).map((r) => crossing[r])), gap = 36 + 6 * lanes, edge = n > 1 ? 16 + 6 * lanes : 0;
    const w = cols.reduce((s, c) => s + c.w + gap, -gap), h = Math.max(...cols.map((c) => c.h)) + 2 * edge, k = Math.min(1, room.w / w, room.h / h);
    if (!best || k > best.k * 1.06) best = { k, cols, gap, edge, w, h };
  }
  function cut(n) { // the rows with which n columns begin: about equally high, with few lines between them
    const total = high.reduce((s, h) => s + h + gapY, 0), starts = [0];
    let y = 0, found = -1, cost = Infinity;
    for (let r = 0; r < rows.length; r++) {
      const off = starts.length < n && r ? Math.abs(y - starts.length * total / n) / (total / n) : Infinity;
      if (off < 0.3 && off * 6 + crossing[r] < cost) { cost = off * 6 + crossing[r]; found = r; }
      if (found > 0 && (off >= 0.3 || r === rows.length - 1)) { starts.push(found); found = -1; cost = Infinity; }
      y += high[r] + gapY;
    }
    return starts;
  }
  let x = 0;
  best.cols.forEach((col, g) => {
    let y = best.edge;
    for (let r = col.from; r < col.to; r++) {
      for (const c of rows[r]) { c.y = y + high[r] / 2; c.top = y; c.bottom = y + high[r]; c.x += x - col.left; c.col = g; if (c.box) { c.box.x = c.x; c.box.y = c.y; } }
      y += high[r] + gapY;
    }
    col.bottom = y - gapY; col.right = x + col.w; col.lane = new Map();
    x += col.w + best.gap;
  });
  const routes = paths.map((path) => {
    const points = [];
    path.forEach((i, k) => {
      const c = cells[i], before = k ? cells[path[k - 1]] : c;
      if (before.col !== c.col) { // down, up between the columns, and down again
        const col = best.cols[before.col], lane = col.lane.get(path[0]) ?? col.lane.size, off = 8 + 6 * lane;
        col.lane.set(path[0], lane);
        points.push([before.x, col.bottom + off, true], [col.right + 10 + off, col.bottom + off, true], [col.right + 10 + off, best.edge - off, true], [c.x, best.edge - off, true]);
      }
      if (!c.box) points.push([c.x, c.top], [c.x, c.bottom]);
    });
    return points;
  });
  return { w: best.w, h: best.h, routes };
}
