// Layered drawing of boxes {w, h, leaf} and edges [from, to] (indices): each row of boxes below what it reads.
// Sets x and y (the centre) of every box; returns {w, h, routes}: for each edge the points it goes through.
function layered(boxes, edges, gapX = 18, gapY = 26) {
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
  const least = Math.min(0, ...rank);
  // cells: the boxes, and points where long edges pass a row
  const cells = boxes.map((box, i) => ({ box, w: box.w, h: box.h, rank: rank[i] - least, up: [], down: [], x: 0 }));
  const paths = edges.map(([a, b]) => {
    const path = [a];
    if (cells[a].rank >= cells[b].rank) return path;
    for (let r = cells[a].rank + 1; r < cells[b].rank; r++) {
      cells.push({ w: 6, h: 0, rank: r, up: [], down: [], x: 0 });
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
  let left = Infinity, right = -Infinity, y = 0;
  for (const c of cells) { left = Math.min(left, c.x - c.w / 2); right = Math.max(right, c.x + c.w / 2); }
  for (const row of rows) {
    const h = Math.max(...row.map((c) => c.h));
    for (const c of row) { c.y = y + h / 2; c.x -= left; if (c.box) { c.box.x = c.x; c.box.y = c.y; } }
    y += h + gapY;
  }
  const routes = paths.map((path) => path.slice(1, -1).map((i) => [cells[i].x, cells[i].y]));
  return { w: right - left, h: y - gapY, routes };
}
