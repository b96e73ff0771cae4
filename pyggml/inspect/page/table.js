// Tables of nodes and of ops. Of the nodes only the rows in sight are in the document.
const ROW = 22;
function element(tag, className, text) { const e = document.createElement(tag); if (className) e.className = className; if (text !== undefined) e.textContent = text; return e; }
function nodeTable(box, data, pick) {
  const T = data.tensors;
  const columns = [
    ["name", (t) => t.name, true], ["op", (t) => (t.op === "none" ? "leaf" : t.op), true], ["layer", (t) => t.layer ?? -1, false, (v) => (v < 0 ? "" : data.layers[v] === `layer ${v}` ? v : data.layers[v])],
    ["type", (t) => t.type, true], ["shape", (t) => t.ne.reduce((a, b) => a * b, 1), false, (v, t) => trimmed(t.ne)],
    ["time", (t) => (t.last ? t.us : 0), false, (v) => (v ? micro(v) : "")], ["moved", (t) => (t.last ? t.step.bytes : 0), false, (v) => (v ? bytes(v) : "")],
    ["GB/s", (t) => (t.last ? rate(t.step.bytes, t.us) : 0), false, (v) => (v ? fixed(v) : "")], ["GFLOPS", (t) => (t.last ? rate(t.step.flops, t.us) : 0), false, (v) => (v ? fixed(v) : "")],
    ["min", (t) => t.values?.low ?? 0, false, (v, t) => (t.values ? number(v) : "")], ["max", (t) => t.values?.high ?? 0, false, (v, t) => (t.values ? number(v) : "")],
    ["mean", (t) => t.values?.mean ?? 0, false, (v, t) => (t.values ? number(v) : "")], ["NaN", (t) => t.values?.nan ?? 0, false, (v) => (v ? v : "")],
  ];
  let order = T.map((t, i) => i), all = order, by = columns.findIndex(([name]) => name === "time"), down = true, selected = -1;
  const table = element("table", "rows"), head = element("tr"), body = element("tbody");
  columns.forEach(([name, , text], c) => {
    const th = element("th", text ? "text" : "", name);
    th.onclick = () => { down = by === c ? !down : !text; by = c; sort(); };
    head.append(th);
  });
  const thead = element("thead"); thead.append(head); table.append(thead, body); box.append(table);
  function sort() {
    [...head.children].forEach((th, c) => { th.textContent = columns[c][0] + (c === by ? (down ? " ↓" : " ↑") : ""); });
    if (by >= 0) {
      const value = columns[by][1], sign = down ? -1 : 1;
      order = [...all].sort((a, b) => { const x = value(T[a]), y = value(T[b]); return sign * (x < y ? -1 : x > y ? 1 : 0) || a - b; });
    } else order = all;
    fill();
  }
  function fill() {
    const first = Math.max(0, Math.floor(box.scrollTop / ROW) - 4), n = Math.ceil((box.clientHeight || 240) / ROW) + 8;
    body.replaceChildren(spacer(first), ...order.slice(first, first + n).map(row), spacer(order.length - first - n));
  }
  function spacer(rows) { const tr = element("tr"), td = element("td"); td.colSpan = columns.length; td.style.height = Math.max(0, rows) * ROW + "px"; td.style.border = "0"; td.style.padding = "0"; tr.append(td); return tr; }
  function row(i) {
    const tr = element("tr", i === selected ? "on" : ""), t = T[i];
    tr.dataset.t = i;
    for (const [name, value, text, show] of columns) {
      const v = value(t);
      tr.append(element("td", (text ? "text" : "") + (name === "NaN" && v ? " bad" : ""), show ? show(v, t) : v));
    }
    tr.onclick = () => pick(i);
    return tr;
  }
  box.addEventListener("scroll", fill);
  sort();
  return { resize: fill, select(i) { selected = i; fill(); }, filter(wanted) { all = wanted || T.map((t, i) => i); box.scrollTop = 0; sort(); } };
}

function opTable(box, data) {
  const rows = new Map();
  for (const s of data.steps) {
    const r = rows.get(s.op) || rows.set(s.op, { n: 0, us: 0, bytes: 0, flops: 0, work: s.work }).get(s.op);
    r.n++; r.us += s.us; r.bytes += s.bytes; r.flops += s.flops;
  }
  const total = Math.max(1e-9, [...rows.values()].reduce((a, r) => a + r.us, 0)), table = element("table", "rows"), head = element("tr"), body = element("tbody");
  for (const [name, text] of [["op", 1], ["share of the time", 1], ["steps"], ["time"], ["moved"], ["GB/s"], ["GFLOPS"]]) head.append(element("th", text ? "text" : "", name));
  for (const [op, r] of [...rows].sort((a, b) => b[1].us - a[1].us)) {
    const tr = element("tr"), share = element("td", "text"), meter = element("span", "meter");
    meter.style.width = 220 * r.us / total + "px"; meter.style.background = r.work[1];
    share.append(meter, (100 * r.us / total).toFixed(1) + " %");
    tr.append(element("td", "text", op), share, element("td", "", r.n), element("td", "", micro(r.us)), element("td", "", bytes(r.bytes)),
      element("td", "", fixed(rate(r.bytes, r.us))), element("td", "", fixed(rate(r.flops, r.us))));
    body.append(tr);
  }
  const thead = element("thead"); thead.append(head); table.append(thead, body); box.append(table);
}
